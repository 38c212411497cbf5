# SPDX-License-Identifier: Apache-2.0
"""What a run that goes on changes, which settings each step was made with, and what is said where no step is left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quadriga.config import Config, load_config
from quadriga.errors import CheckpointError, ConfigError
from quadriga.trainer.checkpoint import Checkpoints
from quadriga.trainer.settings import RunSettings, has_nothing_to_do, keep_settings, settings_of
from quadriga.user_function import write_function

LR, N = "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n"
Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A configuration with a data file and a reward function of its own."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "reward.py").write_text("# reward\n")
    own = (
        f"data.train_files={tmp_path / '*.jsonl'}",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )
    return lambda *overrides: load_config([*own, *overrides]).config


def done(config: Config, step: int, last: int, begin: int = 0) -> Path:
    """As a run leaves it that went on after step `begin` and wrote a checkpoint."""
    keep_settings(config, RunSettings.of(config), begin, last)
    checkpoints = Checkpoints(config.trainer.directory)
    (checkpoints.begin(step) / "state").write_text("state")
    checkpoints.complete(step)
    return checkpoints.path(step)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("config*"))


def test_changes_are_named_by_key_and_by_file(make: Make, tmp_path: Path) -> None:
    before = RunSettings.of(make())
    assert before.changes(RunSettings.of(make("trainer.resume_mode=disable"))) == []
    assert before.changes(RunSettings.of(make("trainer.save_freq=after_each_epoch"))) == []
    (tmp_path / "reward.py").write_text("# another\n")
    (tmp_path / "train.jsonl").write_text("{}\n{}\n")
    assert before.changes(RunSettings.of(make(f"{LR}=0.5", "algorithm.adv_options={x: 1}"))) == [
        f"{LR}: 1.0e-06 -> 0.5",
        "algorithm.adv_options: {} -> {x: 1}",
        f"{tmp_path / 'train.jsonl'}: its content",
        f"{tmp_path / 'reward.py'}: its content",
    ]


def test_functions_of_a_program_are_named_by_their_source(make: Make, tmp_path: Path) -> None:
    def first(response: str) -> float:
        return 0.0

    def second(response: str) -> float:
        return 1.0

    key = "custom_reward_function.path"
    files = [write_function(function, tmp_path, "reward")[0] for function in (first, second)]
    before, after = (RunSettings.of(make(f"{key}={file}")) for file in files)
    (change,) = before.changes(after)
    place = "test_functions_of_a_program_are_named_by_their_source"
    assert change == f"{key}: {place}.first of {__file__} -> {place}.second of {__file__}"
    third = write_function(
        lambda response: 2.0, tmp_path, "reward", f"{place}.second of {__file__}"
    )
    (change,) = after.changes(RunSettings.of(make(f"{key}={third[0]}")))
    assert change == f"{key}: another version of {place}.second of {__file__}"


def test_what_is_written_is_read_again(make: Make) -> None:
    """As a configuration too, and as the settings that were written."""
    config = make("custom_reward_function.reward_kwargs={api_key: opensesame}")
    done(config, 2, last=4)
    file = config.trainer.directory / "config.yaml"
    read = RunSettings.read(file, "rl")
    assert (
        read is not None
        and (read.first, read.last) == (1, 4)
        and "opensesame" not in file.read_text()
    )
    assert read.changes(RunSettings.of(config)) == [] == RunSettings.of(config).changes(read)
    assert (
        load_config(["custom_reward_function.reward_kwargs.api_key=opensesame"], [file]).config
        == config
    )


def test_each_step_has_the_settings_that_it_was_made_with(make: Make) -> None:
    directory = done(make(), 2, last=2).parent
    done(make("trainer.total_training_steps=4", f"{N}=2"), 4, last=4, begin=2)
    done(make("trainer.total_training_steps=6", f"{N}=3"), 6, last=6, begin=4)
    assert names(directory) == ["config.yaml", "config_from_step_1.yaml", "config_from_step_3.yaml"]
    held = {step: settings_of(directory / f"global_step_{step}", "rl") for step in range(1, 8)}
    assert [one.values[N] for one in held.values() if one] == [1, 1, 2, 2, 3, 3, 3]
    # A run from step 3 on leaves out what came behind it.
    done(make("trainer.total_training_steps=6", f"{N}=9"), 4, last=6, begin=3)
    assert names(directory) == ["config.yaml", "config_from_step_1.yaml", "config_from_step_3.yaml"]
    done(make(f"{N}=8"), 2, last=2)
    assert names(directory) == ["config.yaml"]


def test_nothing_is_written_where_no_step_follows_or_nothing_has_changed(make: Make) -> None:
    directory = done(make(), 2, last=2).parent
    before = (directory / "config.yaml").read_bytes()
    for config, begin in (
        (make(f"{LR}=1"), 2),
        (make(f"{LR}=1", "trainer.val_only=True"), 0),
        (make(), 1),
    ):
        keep_settings(config, RunSettings.of(config), begin, 2)
        assert (directory / "config.yaml").read_bytes() == before and names(directory) == [
            "config.yaml"
        ]


@pytest.mark.parametrize(
    "steps", ["trainer.total_training_steps=2", "trainer.total_training_steps=null"]
)
def test_a_finished_run(
    steps: str, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a number of steps and by epochs: said where nothing differs, refused where something does."""
    directory = done(make(steps), 2, last=2).parent
    assert has_nothing_to_do(make(steps), RunSettings.of(make(steps)))
    assert (
        f"nothing to do: 2 of 2 steps are done in {directory}; raise trainer.total_"
        in capsys.readouterr().out
    )
    again = make(steps, f"{LR}=1.0")
    with pytest.raises(ConfigError, match="2 of 2 steps are done"):
        has_nothing_to_do(again, RunSettings.of(again))
    (tmp_path / "reward.py").write_text("# another\n")
    if "null" in steps:
        # Other data may be more steps: the loop finds out.
        assert not has_nothing_to_do(again, RunSettings.of(again))
        return
    with pytest.raises(
        ConfigError,
        match=rf"2 of 2 steps are done.*\n  {LR}: 1.0e-06 -> 1.0\n  .*reward.py: its content",
    ):
        has_nothing_to_do(again, RunSettings.of(again))
    (directory / "global_step_2" / "state").write_text("stat")
    assert not has_nothing_to_do(again, RunSettings.of(again))


def test_a_run_that_goes_on_says_what_it_changes(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = done(make(f"{LR}=1e-5"), 2, last=4)
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    for words in ((), path):
        config = make("trainer.total_training_steps=9", *words)
        assert not has_nothing_to_do(config, RunSettings.of(config))
        said = "The run goes on from step 2 with other settings than before:\n"
        assert f"{said}  {LR}: 1.0e-05 -> " in capsys.readouterr().out
    for words in (("trainer.resume_mode=disable",), ("trainer.val_only=True",)):
        config = make(*words)
        assert (
            not has_nothing_to_do(config, RunSettings.of(config)) and capsys.readouterr().out == ""
        )


@pytest.mark.parametrize("content", ["2\n", "a: [", "\x00", "[" * 10_000, ""])
def test_settings_that_cannot_be_read_are_unknown(
    content: str, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on without them, keeps the file aside and says so, and writes its own."""
    config = make("trainer.total_training_steps=2")
    checkpoint = done(config, 2, last=2)
    (checkpoint.parent / "config.yaml").write_text(content)
    assert settings_of(checkpoint, "rl") is None and has_nothing_to_do(
        config, RunSettings.of(config)
    )
    keep_settings(config, RunSettings.of(config), 2, 3)
    assert settings_of(checkpoint.parent / "global_step_3", "rl") is not None
    assert (checkpoint.parent / "damaged_config.yaml").read_text() == content
    assert "config.yaml holds no configuration" in capsys.readouterr().out


def test_a_directory_that_cannot_be_written(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = make(f"trainer.default_local_dir={tmp_path / 'file' / 'run'}")
    with pytest.raises(CheckpointError, match=r"default_local_dir=.*NotADirectoryError.*Set|Free"):
        keep_settings(config, RunSettings.of(config), 0, 2)
