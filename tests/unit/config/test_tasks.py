# SPDX-License-Identifier: Apache-2.0
"""The supervised tasks in the one tree: their keys, defaults and spellings, and what they cannot have."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from quadriga.config import (
    Config,
    DataConfig,
    Loaded,
    leaf_keys,
    load_config,
    show,
    training_findings,
)
from quadriga.config.root import spell_key, spell_text
from quadriga.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
# Five of them choose the training engine, one divides experts, one leaves bad rows out, one checks the memory.
MAX_KEYS = 106


def load_sft_config(
    overrides: Sequence[str], files: Sequence[Path] = (), *, for_training: bool = False
) -> Loaded:
    """As `quadriga sft` reads it."""
    return load_config(overrides, files, for_training=for_training, task="sft")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides of a run that could start: data and a model that are there."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}")
    return [
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        f"model.path={tmp_path / 'model'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]


def test_every_key_says_what_it_means() -> None:
    leaves = leaf_keys("sft")
    assert all(leaf.meaning.endswith(".") and leaf.kind for leaf in leaves.values())
    assert len(leaves) <= MAX_KEYS


def test_defaults_pass_their_own_checks() -> None:
    for task in ("sft", "reward_model"):
        config = Config(task=task)
        assert Config.model_validate(config.model_dump()) == config


def test_values_are_read_as_their_keys_take_them(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("data: {max_length: 64, seed: 3}\noptim: {lr: 1e-4, betas: [0.9, 0.95]}\n")
    overrides = [
        "data.seed=4",
        "trainer.experiment_name=12",
        "data.apply_chat_template_kwargs.enable_thinking=false",
    ]
    config = load_sft_config(overrides, [file]).config
    assert (config.data.max_length, config.data.seed) == (64, 4)
    optim = config.actor_rollout_ref.actor.optim
    assert (optim.lr, optim.betas) == (1e-4, (0.9, 0.95))
    assert config.trainer.experiment_name == "12"
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_everything_that_is_wrong_comes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_sft_config(
            ["data.max_lenght=3", "optim.lr=-1", "objective=ppo", "nonsense", "data.seed={a"]
        )
    said = str(caught.value)
    assert "5 things" in said
    assert "Did you mean data.max_length" in said
    assert "optim.lr: got -1, expected a number, at least 0" in said
    assert "objective: got 'ppo', expected one of rl, sft, reward_model" in said
    assert "'nonsense', expected key=value" in said


def test_it_is_read_as_the_other_tree_is(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(
        "optim:\ndata:\n  apply_chat_template_kwargs: {enable_thinking: true, style: {tone: calm}}\n"
    )
    second.write_text("data:\n  apply_chat_template_kwargs: {style: {size: 2}}\n")
    loaded = load_sft_config(["data.seed=3", "++data.seed=4"], [first, second])
    kwargs = loaded.config.data.apply_chat_template_kwargs
    assert kwargs == {"enable_thinking": True, "style": {"tone": "calm", "size": 2}}
    assert loaded.notices == [
        "data.seed is set twice on the command line; the last value is used: 4."
    ]
    with pytest.raises(ConfigError) as caught:
        load_sft_config(["model.path=${HOME}/x", "engine=3", "trainer.save_freq=None"])
    said = str(caught.value)
    assert "model.path: got '${HOME}/x', expected a value. References" in said
    assert (
        "engine: got 3, expected a section. Its keys are " in said
        and " max_token_len_per_gpu," in said
    )
    assert "trainer.save_freq: got 'None'" in said


def test_a_key_like_no_other_brings_the_list_of_this_tree() -> None:
    for key in ("zebra.stripes", "zebra.num_cpus"):
        with pytest.raises(ConfigError) as caught:
            load_sft_config([f"{key}=null"])
        assert caught.value.fix == "`quadriga sft --keys` lists all keys."


def test_checks_between_keys_come_with_the_errors_of_single_keys(files: list[str]) -> None:
    wrong = [
        "objective=reward_model",
        "data.truncation=right",
        "optim.lr=-1",
        "data.train_files=${HOME}/x",
    ]
    with pytest.raises(ConfigError) as caught:
        load_sft_config([*files, *wrong], for_training=True)
    said = str(caught.value)
    assert "optim.lr: got -1" in said and "data.truncation: got 'right', for pairs" in said
    # A wrong key is not said to be missing too.
    assert said.count("data.train_files: ") == 1


def test_what_is_shown_can_be_read_again(tmp_path: Path) -> None:
    config = load_sft_config(
        ["objective=reward_model", "trainer.experiment_name=0123", "optim.lr=1e-6"]
    ).config
    file = tmp_path / "resolved.yaml"
    file.write_text(show(config))
    assert load_sft_config([], [file]).config == config


def test_a_wrong_key_of_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("data:\n  max_lenght: 64\n")
    with pytest.raises(ConfigError, match=r"data\.max_lenght \(.*a\.yaml, line 2\)"):
        load_sft_config([], [file])


def test_files_are_looked_for_before_a_run_in_the_words_of_this_tree(
    tmp_path: Path, files: list[str]
) -> None:
    load_sft_config(files, for_training=True)
    with pytest.raises(ConfigError) as caught:
        load_sft_config([f"trainer.default_local_dir={tmp_path}"], for_training=True)
    said = str(caught.value)
    assert "data.train_files: got nothing" in said and " model.path: got nothing" in said
    assert "actor_rollout_ref" not in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.truncation=right", "data.truncation: got 'right', for pairs"),
        (
            "engine.tensor_model_parallel_size=2",
            "engine.tensor_model_parallel_size: got 2, for objective=reward_model",
        ),
    ],
)
def test_what_pairs_cannot_have_is_refused(files: list[str], override: str, said: str) -> None:
    arguments = [
        *files,
        "objective=reward_model",
        "trainer.backend=ray",
        "trainer.n_gpus_per_node=2",
        override,
    ]
    with pytest.raises(ConfigError, match=said):
        load_sft_config(arguments, for_training=True)


def test_supervised_learning_has_no_rollouts() -> None:
    """Each response is one row, so a mean per rollout would be another mode under a second name."""
    change = "engine.loss_agg_mode=rollout-mean-token-mean"
    found, _ = training_findings(load_config((change,), task="sft").config)
    assert any("task=sft has no rollouts" in str(problem) for problem in found)


def test_each_task_has_its_defaults() -> None:
    config = load_sft_config([]).config
    actor = config.actor_rollout_ref.actor
    assert (config.task, config.trainer.experiment_name, actor.optim.lr) == ("sft", "sft", 1e-5)
    assert (config.data.train_batch_size, config.data.val_batch_size) == (256, 256)
    assert not actor.use_prefix_sharing
    assert load_sft_config(
        ["objective=reward_model"]
    ).config.actor_rollout_ref.actor.use_prefix_sharing
    assert Config().data == DataConfig()


def test_a_step_is_one_update_on_sequences_with_one_limit() -> None:
    overrides = ["engine.max_token_len_per_gpu=77", "data.train_batch_size=5", "data.max_length=9"]
    config = load_sft_config(overrides).config
    actor = config.actor_rollout_ref.actor
    assert (
        actor.ppo_max_token_len_per_gpu,
        actor.ppo_mini_batch_size,
        actor.loss_scale_factor,
    ) == (77, 5, 9.0)
    assert config.data.max_prompt_length + config.data.max_response_length == 9


def test_a_key_has_two_spellings_and_messages_the_short_one(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    for key in (
        f"{actor}.optim.lr",
        f"{actor}.ppo_max_token_len_per_gpu",
        f"{actor}.grad_clip",
        "task",
    ):
        assert spell_key(spell_key(key, "sft"), "sft", in_full=True) == key
        assert spell_key(key, "rl") == key
    file = tmp_path / "run.yaml"
    file.write_text(f"task: sft\n{actor.replace('.', ': {')}: {{optim: {{lr: 2e-5}}}}}}\n")
    assert (
        load_sft_config(["model.path=x"], [file]).config
        == load_config(
            [f"{actor}.optim.lr=2e-5", "actor_rollout_ref.model.path=x"], task="sft"
        ).config
    )
    text = f"{actor}.ppo_max_token_len_per_gpu, {actor}.optim.lr, actor_rollout_ref.model.path"
    assert spell_text(text, "sft") == "engine.max_token_len_per_gpu, optim.lr, model.path"


@pytest.mark.parametrize(
    "override", ["critic.optim.lr=1", "engine.clip_ratio=0.1", "trainer.critic_warmup=2"]
)
def test_a_key_that_the_task_does_not_read_is_no_key_of_it(override: str) -> None:
    with pytest.raises(ConfigError, match="got a key that does not exist"):
        load_sft_config([override])


def test_a_task_is_named_by_a_file_or_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("objective: sft\noptim: {lr: 3e-5}\n")
    assert load_config([], [file]).config.actor_rollout_ref.actor.optim.lr == 3e-5
    assert load_config(["task=reward_model", "optim.lr=3e-5"]).config.task == "reward_model"
    with pytest.raises(ConfigError, match=r"Did you mean actor_rollout_ref\.actor\.optim\.lr"):
        load_config(["optim.lr=3e-5"])


@pytest.mark.parametrize(
    "file", sorted((REPOSITORY / "configs").glob("sft*.yaml")), ids=lambda file: file.name
)
def test_configuration_file_loads(file: Path) -> None:
    load_sft_config([], [file])


def test_there_are_configurations() -> None:
    assert sorted(file.name for file in (REPOSITORY / "configs").glob("sft*.yaml")) == [
        "sft.yaml",
        "sft_reward_model.yaml",
    ]
