# SPDX-License-Identifier: Apache-2.0
"""Commands that are printed for pasting name the same paths after a shell has read them."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from quadriga.api import Run
from quadriga.cli import prepare
from quadriga.config import load_config
from quadriga.config.loader import parse_override
from quadriga.errors import CheckpointError, DamagedCheckpointError
from quadriga.trainer.checkpoint import MANIFEST, Checkpoints
from quadriga.trainer.task_runner import what_next

NAMES = ["plain", "a b", "*", "it's", "$HOME", "[a", '"b', "{c", "a #b;c"]


def words_of(command: str) -> list[str]:
    """The arguments that `quadriga` gets when a shell runs the command."""
    script = f"quadriga() {{ printf '%s\\0' \"$@\"; }}\n{command}"
    done = subprocess.run(
        ["sh", "-ec", script], capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout.split("\0")[:-1]


def commands_in(text: str) -> list[list[str]]:
    return [words_of(line) for line in text.splitlines() if line.startswith("  quadriga ")]


@pytest.fixture(params=NAMES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A relative path, which may begin with any character."""
    monkeypatch.chdir(tmp_path)
    return Path(request.param)


def test_what_comes_after_a_run(place: Path) -> None:
    values = {"trainer.default_local_dir": str(place / "run").replace("{", "{{")}
    config = load_config(values=values | {"data.val_files": "v.jsonl"}).config
    evaluate, export = commands_in(what_next(config, 3))
    assert evaluate == ["eval", f"{place}/run", "--config", f"{place}/run/config.yaml"]
    assert export == ["export", f"{place}/run", "--output", "DIR"]
    for task, key in (
        ("sft", "actor_rollout_ref.model.path"),
        ("reward_model", "reward_model.model.path"),
    ):
        [train] = commands_in(what_next(load_config(values=values, task=task).config, None))
        assert parse_override(train[-1]) == (key, f"{place}/run/model")


def test_the_checkpoint_to_resume_from(place: Path) -> None:
    checkpoints = Checkpoints(place)
    for step in (1, 2):
        (checkpoints.begin(step) / "state").write_text("state")
        checkpoints.complete(step)
    (checkpoints.path(2) / MANIFEST).unlink()
    config = load_config(["trainer.resume_fallback=none"]).config.trainer
    with pytest.raises(DamagedCheckpointError) as caught:
        checkpoints.resume(config, lambda path: None)
    *_, override = words_of(
        "quadriga train " + re.search(r"with (trainer\.resume_mode.*)", caught.value.fix)[1]
    )
    assert parse_override(override) == ("trainer.resume_from_path", str(checkpoints.path(1)))


def test_the_playground(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = SimpleNamespace(prepare_playground=lambda output, seed: {"model": output / "model"})
    monkeypatch.setattr(prepare, "_import_recipe", lambda name: recipe)
    assert prepare.main(["playground", "--output", str(place)]) == 0
    commands = commands_in(capsys.readouterr().out)
    assert commands == [
        ["sft", "--config", f"{place}/sft.yaml"],
        ["train", "--config", f"{place}/sums.yaml"],
    ]


def test_the_model_of_a_run_that_has_none(place: Path) -> None:
    run = Run(place, config=load_config().config)
    with pytest.raises(CheckpointError) as caught:
        _ = run.model_folder
    command = "quadriga export" + caught.value.fix.partition("quadriga export")[2]
    assert words_of(command) == ["export", str(place), "--output", "FOLDER"]
