# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the command line, in this process, on a model of a few thousand weights."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import load_config
from quadriga.observe.progress import step_fields
from quadriga.observe.timing import Timeline
from quadriga.trainer.build import build_run

Lines = Callable[[Path], list[dict[str, Any]]]
Train = Callable[..., Path]


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a Python file of a user's."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All lines of a file that ends with a whole one."""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_steps_without_a_loop(arguments: Callable[..., list[str]]) -> None:
    """A program can call `train_step` itself, as benchmarks do; there is no progress bar then."""
    run = build_run(load_config(arguments()).config, Timeline())
    try:
        for _ in range(2):
            batch = run.trainer.train_step()
            assert len(batch) == 8
            assert run.trainer.metrics["timing_s/gen"] > 0
    finally:
        run.close()


def test_reward_rises(train: Train, metric_lines: Lines) -> None:
    """In fifteen steps the model learns to write the letter that is asked for."""
    lines = metric_lines(
        train(
            "trainer.total_training_steps=15",
            "data.train_batch_size=8",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "trainer.test_freq=15",
        )
    )
    rewards = [line["critic/rewards/mean"] for line in lines]
    assert rewards[0] < 0.1
    assert sum(rewards[-3:]) / 3 > 0.5
    assert lines[-1]["val-core/letters/reward/mean@1"] > 0.5
    entropies = [line["actor/entropy"] for line in lines if "actor/entropy" in line]
    assert entropies[-1] < entropies[0] / 4


def test_headlines_are_metrics_of_the_trainer(train: Train, home: Path) -> None:
    """Every field of the progress line finds its metric, by the names in metrics.jsonl."""
    (record, *_) = read_jsonl(train() / "metrics.jsonl")
    labels = ["reward", "loss", "kl", "entropy", "grad", "lr", "len", "mfu", "tok/s", "s/step"]
    assert list(step_fields(record)) == labels


def test_old_log_prob_pass_changes_no_number(
    train: Train, metric_lines: Lines, user_file: Callable
) -> None:
    """With one update a batch the old log-probs are the current ones: computing them gives the same run.

    Entropy is then measured by the other pass, in another order of additions; all else is equal in the last bit but
    for the ratio, which is 1 by construction in one run and exp of a difference of 1e-7 in the other.
    """
    estimator = user_file(
        "estimator.py",
        "from quadriga.algorithms.advantages.grpo import grpo\n\n"
        "def with_old(token_level_rewards, response_mask, uid, old_log_probs):\n"
        "    return grpo(token_level_rewards, response_mask, uid)\n",
    )
    # Without the pass the entropy is of the rows that are computed, unless it is asked of all.
    options = ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.calculate_entropy=true")
    options = (*options, "trainer.total_training_steps=4")
    without = metric_lines(train(*options, run="without"))
    with_pass = metric_lines(
        train(*options, f"algorithm.adv_estimator={estimator}:with_old", run="with")
    )
    assert len(with_pass) == len(without) == 4
    for left, right in zip(with_pass, without, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=2e-6), (
                name,
                left["step"],
            )


def test_critic_learns(train: Train, metric_lines: Lines, tmp_path: Path) -> None:
    """Answers that all earn 1: the values come near it."""
    script = tmp_path / "answers.jsonl"
    script.write_text('{"response": [5, 5, 5, 5]}\n')
    lines = metric_lines(
        train(
            "actor_rollout_ref.rollout.name=scripted",
            f"actor_rollout_ref.rollout.engine_kwargs.responses_file={script}",
            "algorithm.adv_estimator=gae",
            "critic.ppo_epochs=4",
            "critic.ppo_mini_batch_size=2",
            "critic.optim.lr=3e-3",
            "trainer.total_training_steps=8",
        )
    )
    assert all(line["critic/returns/mean"] == pytest.approx(1) for line in lines)
    assert lines[0]["critic/values/mean"] < 0.5
    assert lines[-1]["critic/values/mean"] == pytest.approx(1, abs=0.1)


def test_actor_waits_for_the_critic(train: Train, metric_lines: Lines) -> None:
    """In the steps of critic_warmup only the critic learns."""
    overrides = (
        "algorithm.adv_estimator=gae",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=3",
    )
    lines = metric_lines(train(*overrides))
    assert ["actor/grad_norm" in line for line in lines] == [False, False, True]
    assert all("critic/grad_norm" in line for line in lines)


def test_remax_subtracts_the_greedy_answer(train: Train, user_file: Callable, home: Path) -> None:
    """The baseline is the reward of the greedy answer: where sampling is greedy too, no advantage is left."""
    lines = read_jsonl(train("algorithm.adv_estimator=remax", run="sampled") / "metrics.jsonl")
    assert {"timing_s/gen_max", "timing_s/data"} <= set(lines[0])
    assert any(line["critic/advantages/max"] != line["critic/advantages/min"] for line in lines)
    cold = read_jsonl(
        train(
            "algorithm.adv_estimator=remax",
            "actor_rollout_ref.rollout.temperature=1e-6",
            run="cold",
        )
        / "metrics.jsonl"
    )
    assert all(line["critic/advantages/max"] == line["critic/advantages/min"] == 0 for line in cold)


def test_hf_rollout_trains(train: Train, metric_lines: Lines) -> None:
    """Transformers' generate in place of ours: its copy of the weights is the trainer's at every step."""
    lines = metric_lines(
        train("actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=3")
    )
    assert all(line["rollout/log_prob_diff_max"] < 1e-4 for line in lines)


def test_a_users_engine_trains(train: Train, metric_lines: Lines) -> None:
    """The engine of examples/custom has the weights of each step: its log-probs are the trainer's."""
    file = Path(__file__).parents[2] / "examples" / "custom" / "engine.py"
    lines = metric_lines(train(f"actor_rollout_ref.rollout.name={file}:BruteForceEngine"))
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rollout/log_prob_diff_max"] < 1e-4 for line in lines)
    assert lines[1]["actor/grad_norm"] > 0


def test_a_users_data_set_and_reward_manager_train(
    train: Train, metric_lines: Lines, tmp_path: Path
) -> None:
    """The data set of examples/custom reads text files, and its manager shares scores."""
    examples = Path(__file__).parents[2] / "examples" / "custom"
    for name, numbers in (("train", range(10)), ("val", range(20, 24))):
        prompts = [f"say a {number}\ta\n" for number in numbers]
        (tmp_path / f"{name}.txt").write_text("".join(prompts))
    run = train(
        f"data.train_files={tmp_path / 'train.txt'}",
        f"data.val_files={tmp_path / 'val.txt'}",
        f"data.custom_cls.path={examples / 'dataset.py'}",
        "data.custom_cls.name=TextLines",
        "+data.source=letters",
        f"reward_model.reward_manager={examples / 'manager.py'}:Originality",
        # More responses than tokens: some are equal.
        "data.max_response_length=1",
        "actor_rollout_ref.rollout.n=16",
        "trainer.total_training_steps=1",
        f"trainer.rollout_data_dir={tmp_path / 'responses'}",
    )
    assert len(metric_lines(run)) == 1
    samples = read_jsonl(tmp_path / "responses" / "1.jsonl")
    assert {sample["data_source"] for sample in samples} == {"letters"}
    counts = Counter(sample["output"].strip() for sample in samples)
    assert max(counts.values()) > 1
    for sample in samples:
        assert sample["copies"] == counts[sample["output"].strip()]
        assert sample["score"] == pytest.approx(sample["acc"] / sample["copies"])


def test_hf_rollout_trains_in_float16(train: Train, metric_lines: Lines) -> None:
    """Both round logits and states on their own; the weights are the trainer's."""
    dtype = "actor_rollout_ref.actor.fsdp_config.model_dtype=float16"
    lines = metric_lines(
        train("actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=2", dtype)
    )
    assert all(
        0 < line["rollout/log_prob_diff_max"] < 1e-2 and line["actor/grad_norm"] > 0
        for line in lines
    )


def test_scripted_rollout_is_graded_as_written(
    train: Train, metric_lines: Lines, tmp_path: Path
) -> None:
    """Canned answers get the rewards that the function gives them."""
    script = tmp_path / "answers.jsonl"
    script.write_text('{"response": "aaaa"}\n{"response": "abab"}\n')
    engine = (
        "actor_rollout_ref.rollout.name=scripted",
        f"actor_rollout_ref.rollout.engine_kwargs.responses_file={script}",
    )
    lines = metric_lines(train(*engine))
    assert [line["critic/score/mean"] for line in lines] == [0.75, 0.75]
    assert [line["response_length/mean"] for line in lines] == [5.0, 5.0]


TRL_REWARD = """
def reads_all(prompts, completions, ability, bonus, **kwargs):
    assert len(prompts) == len(completions) == len(ability) > 1
    scores = []
    for prompt, completion, name in zip(prompts, completions, ability):
        is_chat = prompt[0]["content"].startswith("say a") and completion[0]["role"] == "assistant"
        scores.append(bonus if is_chat and name == "spelling" else 0.0)
    return scores
"""


def test_a_reward_function_of_trls_form_reads_prompts_and_columns(
    train: Train, metric_lines: Lines, user_file: Callable
) -> None:
    lines = metric_lines(
        train(
            f"custom_reward_function.path={user_file('trl_reward.py', TRL_REWARD)}",
            "custom_reward_function.name=reads_all",
            "custom_reward_function.reward_kwargs={bonus: 0.5}",
            "reward_model.reward_manager=batch",
            "trainer.total_training_steps=1",
        )
    )
    assert [line["critic/score/mean"] for line in lines] == [0.5]


def test_validation_alone(
    train: Train, metric_lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    """val_only measures the model as it is, with several sampled answers a prompt, and trains nothing."""
    run = train(
        "trainer.val_only=True",
        "trainer.val_before_train=True",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "data.val_batch_size=3",
    )
    (line,) = metric_lines(run)
    assert line["step"] == 0
    assert line["val-core/letters/reward/best@4/mean"] > line["val-core/letters/reward/mean@4"] >= 0
    assert not list(run.glob("global_step_*"))


def test_dumps_are_whole(train: Train, metric_lines: Lines, tmp_path: Path) -> None:
    """Every answer of training and validation is a line of JSON, and their scores are those of the metrics."""
    run = train(
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
        f"trainer.validation_data_dir={tmp_path / 'validations'}",
        "trainer.val_before_train=True",
        "trainer.test_freq=2",
    )
    lines = {line["step"]: line for line in metric_lines(run)}
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["1.jsonl", "2.jsonl"]
    assert sorted(path.name for path in (tmp_path / "validations").iterdir()) == [
        "0.jsonl",
        "2.jsonl",
    ]
    for step in (1, 2):
        rows = read_jsonl(tmp_path / "rollouts" / f"{step}.jsonl")
        assert len(rows) == 8
        assert len({row["uid"] for row in rows}) == 4
        assert all(row["input"].startswith("say a") and row["step"] == step for row in rows)
        mean = sum(row["score"] for row in rows) / len(rows)
        assert mean == pytest.approx(lines[step]["critic/score/mean"])
    rows = read_jsonl(tmp_path / "validations" / "2.jsonl")
    assert sum(row["score"] for row in rows) / 4 == pytest.approx(
        lines[2]["val-core/letters/reward/mean@1"]
    )


def test_divergence_counts_in_the_reward(train: Train, metric_lines: Lines) -> None:
    """The reward is the score less the controller's share of the divergence from the first policy."""
    lines = metric_lines(
        train(
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.kl_coef=0.5",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "trainer.total_training_steps=4",
        )
    )
    assert lines[0]["critic/rewards/mean"] == pytest.approx(lines[0]["critic/score/mean"], abs=1e-6)
    assert abs(lines[-1]["critic/rewards/mean"] - lines[-1]["critic/score/mean"]) > 1e-3


def test_divergence_counts_in_the_loss(train: Train, metric_lines: Lines) -> None:
    """A strong pull towards the reference keeps the policy nearer to it."""
    options = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.optim.lr=1e-2")
    steps = ("trainer.total_training_steps=6", "actor_rollout_ref.rollout.n=4")
    coefficient = "actor_rollout_ref.actor.kl_loss_coef"
    free = metric_lines(train(*options, *steps, f"{coefficient}=0", run="free"))
    held = metric_lines(train(*options, *steps, f"{coefficient}=10", run="held"))
    assert free[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert held[-1]["actor/kl_loss"] < 0.5 * free[-1]["actor/kl_loss"]


def test_data_set_and_sampler_learn_from_each_batch(
    train: Train, user_file: Callable, tmp_path: Path
) -> None:
    """A curriculum: the user's data set hears of each batch after its update, and the sampler chooses the next."""
    told = tmp_path / "told.txt"
    classes = user_file(
        "curriculum.py",
        "from pathlib import Path\n"
        "from torch.utils.data import Sampler\n"
        "from quadriga.data import RLHFDataset\n\n"
        "class Rows(RLHFDataset):\n"
        "    def on_batch_end(self, batch):\n"
        f"        with Path({str(told)!r}).open('a') as file:\n"
        "            step, learned = batch.meta_info['global_steps'], 'advantages' in batch.batch.keys()\n"
        "            file.write(f'{step} {len(batch)} {learned}\\n')\n\n"
        "class First(Sampler):\n"
        "    def __init__(self, data_source, data_config):\n"
        "        self.rows, self.turn = len(data_source), 0\n"
        "    def __len__(self):\n"
        "        return self.rows\n"
        "    def __iter__(self):\n"
        "        for _ in range(self.rows):\n"
        "            yield self.turn % self.rows\n"
        "    def update(self, batch):\n"
        "        self.turn += 1\n",
    )
    train(
        f"data.custom_cls.path={classes}",
        "data.custom_cls.name=Rows",
        f"data.sampler.class_path={classes}",
        "data.sampler.class_name=First",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
    )
    assert told.read_text().splitlines() == ["1 8 True", "2 8 True"]
    first, second = (
        {row["input"] for row in read_jsonl(tmp_path / "rollouts" / f"{step}.jsonl")}
        for step in (1, 2)
    )
    assert len(first) == len(second) == 1
    assert first != second


def test_ragged_sizes_are_no_matter(train: Train, metric_lines: Lines) -> None:
    """5 prompts with 3 answers, mini-batches of 2, micro-batches of 4: nothing divides anything, and nothing stops."""
    lines = metric_lines(
        train(
            "data.train_batch_size=5",
            "actor_rollout_ref.rollout.n=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=7",
            "actor_rollout_ref.rollout.max_num_seqs=4",
        )
    )
    assert len(lines) == 2
    assert all(
        line["actor/grad_norm"] >= 0 and line["actor/nonfinite_steps"] == 0 for line in lines
    )
