# SPDX-License-Identifier: Apache-2.0
"""Checks between keys: what is refused before a run starts, and what the message says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import load_config, training_findings
from quadriga.errors import ConfigError

REPLAY = "actor_rollout_ref.actor.router_replay"


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line that can train, in a directory that holds what it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").touch()
    (tmp_path / "val.parquet").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return [
        "data.train_files=train.parquet",
        "data.val_files=val.parquet",
        "data.train_batch_size=16",
        "actor_rollout_ref.model.path=model",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "trainer.save_freq=10",
    ]


def findings(overrides: list[str]) -> tuple[dict[str, str], str]:
    problems, notices = training_findings(load_config(overrides).config)
    return {one.where: str(one) for one in problems}, "\n".join(notices)


def test_a_sound_run_hears_nothing(ready: list[str]) -> None:
    assert load_config(ready, for_training=True).notices == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["data.train_files="], "data.train_files"),
        (["data.train_files=nowhere.parquet"], "data.train_files"),
        (["data.train_files=no*.parquet"], "data.train_files"),
        (["data.val_files="], "data.val_files"),
        (["data.val_files=", "trainer.val_before_train=False", "trainer.test_freq=5"], "data.val_files"),
        (["data.val_files=gone.parquet", "trainer.val_before_train=False"], "data.val_files"),
        (["actor_rollout_ref.model.path="], "actor_rollout_ref.model.path"),
        (["actor_rollout_ref.model.path=./no/model"], "actor_rollout_ref.model.path"),
        (["actor_rollout_ref.model.path=."], "actor_rollout_ref.model.path"),
        (["critic.model.path=/no/critic"], "critic.model.path"),
        ([f"{REPLAY}=rollout", "actor_rollout_ref.rollout.name=hf"], REPLAY),
        ([f"{REPLAY}=old_log_prob", "algorithm.rollout_correction.bypass_mode=True"], REPLAY),
        ([f"{REPLAY}=old_log_prob", "actor_rollout_ref.actor.pipeline_model_parallel_size=2", "trainer.backend=ray",
          "trainer.n_gpus_per_node=2"], REPLAY),
        (["custom_reward_function.path=reward.py"], "custom_reward_function.path"),
        (["data.custom_cls.path=x.py", "data.custom_cls.name=X"], "data.custom_cls.path"),
        (["data.sampler.class_path=x.py", "data.sampler.class_name=X"], "data.sampler.class_path"),
        (["trainer.default_local_dir=train.parquet/run"], "trainer.default_local_dir"),
        (["trainer.rollout_data_dir=hdfs://host/x"], "trainer.rollout_data_dir"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path"),
        (["trainer.resume_mode=path", "trainer.resume_from_path=gone"], "trainer.resume_from_path"),
        (["actor_rollout_ref.rollout.temperature=0"], "actor_rollout_ref.rollout.temperature"),
        (["actor_rollout_ref.rollout.n=1", "algorithm.filter_groups.enable=True", "algorithm.adv_estimator=gae"],
         "algorithm.filter_groups.enable"),
        (["algorithm.filter_groups.enable=True", "actor_rollout_ref.rollout.skip.enable=True",
          "actor_rollout_ref.rollout.skip.action=repeat"], "actor_rollout_ref.rollout.skip.action"),
        (["actor_rollout_ref.rollout.do_sample=False"], "actor_rollout_ref.rollout.do_sample"),
        (["actor_rollout_ref.rollout.name=scripted"], "actor_rollout_ref.rollout.engine_kwargs.responses_file"),
        (["actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n"),
        (["actor_rollout_ref.model.custom_chat_template=chat.jinja"],
         "actor_rollout_ref.model.custom_chat_template"),
        (["data.train_max_samples=8"], "data.train_batch_size"),
        (["trainer.val_only=True", "trainer.val_before_train=False"], "trainer.val_only"),
        (["actor_rollout_ref.actor.echo_coeff=0.1"], "actor_rollout_ref.actor.echo_coeff"),
        (["actor_rollout_ref.actor.echo_coeff=0.1", "actor_rollout_ref.rollout.mode=async"],
         "actor_rollout_ref.actor.echo_coeff"),
        (["trainer.total_training_steps=5", "trainer.critic_warmup=5"], "trainer.critic_warmup"),
        (["actor_rollout_ref.actor.checkpoint.save_contents=[model]",
          "actor_rollout_ref.actor.checkpoint.load_contents=[model, optimizer]"],
         "actor_rollout_ref.actor.checkpoint.load_contents"),
    ],
)  # fmt: skip
def test_is_refused_and_nothing_else_is(ready: list[str], changes: list[str], key: str) -> None:
    problems, _ = findings(ready + changes)
    assert list(problems) == [key]
    with pytest.raises(ConfigError, match="expected"):
        load_config(ready + changes, for_training=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["actor_rollout_ref.actor.ppo_mini_batch_size=256"],
         "mini-batches of 256 of 16 prompts: the whole batch is one mini-batch"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=5"], "16 prompts in mini-batches of 5: the last one has 1"),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.actor.use_dynamic_bsz=True"],
         "actor.ppo_micro_batch_size_per_gpu: not used"),
        (["data.max_response_length=20000"],
         "ref.log_prob_max_token_len_per_gpu: 16384 tokens, but a sequence may have 20512"),
        (["actor_rollout_ref.rollout.top_p=0.9"], "leaves out unlikely tokens"),
        (["actor_rollout_ref.rollout.log_prob_diff_stop=0.01"], "stops at 0.01 before it would warn at 0.1"),
        (["actor_rollout_ref.rollout.skip.enable=True"], "responses are in outputs/rollout_dump do not generate"),
        (["actor_rollout_ref.rollout.skip.enable=True", "actor_rollout_ref.rollout.skip.action=repeat"],
         "every step learns from the same responses"),
        (["algorithm.filter_groups.enable=True"], "the run ends with the step that takes the last batch of"),
        (["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=0"],
         "never happens if the scores of no group differ"),
        (["actor_rollout_ref.rollout.val_kwargs.temperature=1.0"], "val_kwargs.temperature: not used"),
        (["actor_rollout_ref.rollout.val_kwargs.do_sample=True"], "at temperature 0"),
        (["actor_rollout_ref.rollout.val_kwargs.n=4"], "the 4 responses to a prompt are equal"),
        (["actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True"], "counts twice"),
        (["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0"], "only to report"),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0"], "only to report"),
        (["algorithm.kl_ctrl.type=adaptive"], "algorithm.kl_ctrl.type: not used"),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], "divided by data.max_response_length, 512"),
        (["actor_rollout_ref.actor.loss_scale_factor=100"],
         "loss_scale_factor: not used because actor_rollout_ref.actor.loss_agg_mode is 'token-mean'"),
        (["actor_rollout_ref.actor.echo_roles=[tool]"],
         "echo_roles: not used because actor_rollout_ref.actor.echo_coeff is 0.0"),
        (["actor_rollout_ref.rollout.engine_kwargs.vllm.x=1"], "engine_kwargs.vllm: not used"),
        (["trainer.resume_from_path=model"], "trainer.resume_from_path: not used"),
        (["trainer.save_freq=-1"], "no checkpoint is written"),
        (["actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"], "without model, optimizer, extra"),
        (["trainer.total_training_steps=5", "actor_rollout_ref.actor.optim.lr_warmup_steps=5"], "never reaches 1e-06"),
        (["actor_rollout_ref.actor.optim.min_lr_ratio=0.1"],
         "min_lr_ratio: not used because actor_rollout_ref.actor.optim.lr_scheduler_type is 'constant'"),
        (["actor_rollout_ref.actor.optim.lr=0"], "nothing is learned"),
        (["critic.profiler.ranks=[0]"], "critic.profiler.ranks: not used because global_profiler.tool is null"),
        (["global_profiler.tool=torch"], "global_profiler.tool: not used because global_profiler.steps is []"),
        (["global_profiler.steps=[1]"], "global_profiler.steps: not used because global_profiler.tool is null"),
    ],
)  # fmt: skip
def test_is_told(ready: list[str], changes: list[str], said: str) -> None:
    problems, notices = findings(ready + changes)
    assert problems == {}
    assert said in notices


@pytest.mark.parametrize(
    "changes",
    [
        ["data.train_files=*.parquet"],
        ["data.train_files=[train.parquet, val.parquet]"],
        ["data.train_files=s3://bucket/train.parquet"],
        ["data.val_files=", "trainer.val_before_train=False"],
        ["data.val_files=null", "trainer.val_before_train=False"],
        ["actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus"],
        ["actor_rollout_ref.model.custom_chat_template={{ messages }}"],
        ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"],
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=model"],
    ],
)
def test_is_fine(ready: list[str], changes: list[str]) -> None:
    assert findings(ready + changes) == ({}, "")


def test_a_command_line_of_verls_may_compare_a_response_with_nothing(ready: list[str]) -> None:
    config = load_config([*ready, "actor_rollout_ref.rollout.n=1"]).config
    assert len(training_findings(config)[0]) == 1
    assert training_findings(config, is_verls=True)[0] == []


def test_training_fills_in_the_size_of_groups(ready: list[str]) -> None:
    """Where the estimator compares responses and no number is given; the schema keeps 1."""
    ready.remove("actor_rollout_ref.rollout.n=8")
    assert load_config(ready).config.actor_rollout_ref.rollout.n == 1
    loaded = load_config(ready, for_training=True)
    assert loaded.config.actor_rollout_ref.rollout.n == 8
    assert "rollout.n: 8 responses to each prompt" in "".join(loaded.notices)
    other = load_config([*ready, "algorithm.adv_estimator=gae"], for_training=True)
    assert other.config.actor_rollout_ref.rollout.n == 1


def test_the_likeliest_token_several_times(ready: list[str]) -> None:
    """What would happen is said."""
    problems, _ = findings([*ready, "actor_rollout_ref.rollout.temperature=0"])
    assert (
        "All 8 responses to a prompt would be the same"
        in problems["actor_rollout_ref.rollout.temperature"]
    )


def test_no_answers_at_all(ready: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.n: got 0, expected .*at least 1"):
        load_config([*ready, "actor_rollout_ref.rollout.n=0"])


def test_everything_comes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["actor_rollout_ref.rollout.temperature=0"], for_training=True)
    for key in (
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.path",
        "rollout.temperature",
    ):
        assert key in str(caught.value)


ON = "reward_model.enable=True"
PATH = "reward_model.model.path"
Found = tuple[dict[str, str], list[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`folder(**described)`: `judge/config.json` below the current directory holds this."""
    monkeypatch.chdir(tmp_path)

    def write(**described: Any) -> None:
        (tmp_path / "judge").mkdir(exist_ok=True)
        (tmp_path / "judge" / "config.json").write_text(json.dumps(described))

    return write


def found(*overrides: str) -> Found:
    """Problems and notices that concern a reward model."""
    problems, notices = training_findings(load_config([f"{PATH}=judge", *overrides]).config)
    mine = [notice for notice in notices if notice.startswith("reward_model.")]
    return {one.where: str(one) for one in problems if one.where.startswith("reward_model.")}, mine


def test_a_classifier_with_one_label_is_taken(folder: Callable) -> None:
    folder(
        architectures=["LlamaForSequenceClassification"],
        id2label={"0": "LABEL_0"},
        max_position_embeddings=4096,
    )
    assert found(ON) == ({}, [])
    # By its name in a configuration, and where nothing is said of the architecture.
    folder(num_labels=1)
    assert found(ON) == ({}, [])


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "names Qwen2ForCausalLM: it has no classification head",
        ),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "a classifier with 2 labels"),
        ({"id2label": {"0": "bad", "1": "so", "2": "good"}}, "a classifier with 3 labels"),
        ({"num_labels": 5}, "a classifier with 5 labels"),
    ],
)
def test_what_cannot_score_is_refused(
    folder: Callable, described: dict[str, Any], said: str
) -> None:
    folder(**described)
    problems, _ = found(ON)
    assert list(problems) == [PATH] and said in problems[PATH]


def test_code_of_its_own_may_have_a_head_of_its_own_name(folder: Callable) -> None:
    folder(architectures=["JudgeModel"], num_labels=1)
    assert found(ON, "reward_model.model.trust_remote_code=True") == ({}, [])
    assert list(found(ON)[0]) == [PATH]


def test_paths(folder: Callable) -> None:
    assert "got null, with reward_model.enable=True" in found(ON, f"{PATH}=null")[0][PATH]
    assert "expected a model's folder" in found(ON, f"{PATH}=./nowhere")[0][PATH]
    folder()
    Path("judge/config.json").unlink()
    assert "without a config.json" in found(ON)[0][PATH]
    Path("judge/config.json").write_text("{")
    assert "expected JSON" in found(ON)[0][PATH]


def test_lengths(folder: Callable) -> None:
    """A sequence of the policy has up to 1024 tokens here."""
    folder(num_labels=1, max_position_embeddings=1000)
    _, (notice,) = found(ON)
    assert "1000 tokens, but a sequence of the policy may have 1024" in notice
    _, (notice,) = found(ON, "reward_model.max_length=100")
    assert notice.startswith("reward_model.max_length: 100 tokens")
    problems, _ = found(ON, "reward_model.max_length=1001")
    assert "expected at most 1000" in problems["reward_model.max_length"]


def test_how_passes_are_cut(folder: Callable) -> None:
    folder(num_labels=1)
    _, (notice,) = found(
        ON, "reward_model.micro_batch_size_per_gpu=2", "reward_model.use_dynamic_bsz=True"
    )
    assert notice.startswith("reward_model.micro_batch_size_per_gpu: not used")
    _, (notice,) = found(ON, "reward_model.forward_max_token_len_per_gpu=1000")
    assert "1000 tokens, but a sequence may have 1024" in notice


def test_both_scores_are_added_and_keys_without_a_model_are_not_used(folder: Callable) -> None:
    folder(num_labels=1)
    Path("reward.py").touch()
    _, (notice,) = found(ON, "custom_reward_function.path=reward.py")
    assert notice.endswith("the reward is the sum of both scores.")
    _, (notice,) = found("reward_model.max_length=7")
    assert (
        notice
        == "reward_model.model.path, reward_model.max_length: not used because reward_model.enable is false."
    )
