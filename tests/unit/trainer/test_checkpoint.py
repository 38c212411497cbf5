# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or not at all, whatever happens while they are written or deleted."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from quadriga.config import TrainerConfig
from quadriga.errors import CheckpointError
from quadriga.trainer.checkpoint import (
    LATEST,
    MANIFEST,
    Checkpoints,
    model_folder,
    step_of,
    verify,
    write_configuration,
)


class Killed(BaseException):
    """The process dies here: nothing after it runs that a dead process could not run."""


def write(checkpoints: Checkpoints, step: int, text: str = "weights") -> Path:
    """A checkpoint with one file per role."""
    directory = checkpoints.begin(step)
    for name in ("actor", "trainer"):
        (directory / name).mkdir()
        (directory / name / "state").write_text(f"{text} {step}")
    checkpoints.complete(step)
    return checkpoints.path(step)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run")


def test_written_checkpoint_is_whole(checkpoints: Checkpoints) -> None:
    path = write(checkpoints, 3)
    verify(path)
    assert (path / "actor" / "state").read_text() == "weights 3"
    assert names(checkpoints.directory) == ["global_step_3", LATEST]
    assert (checkpoints.directory / LATEST).read_text() == "3\n"
    assert (checkpoints.steps(), checkpoints.newest(), step_of(path)) == ([3], 3, 3)


def test_steps_are_in_order_of_number(checkpoints: Checkpoints) -> None:
    for step in (9, 10, 100):
        write(checkpoints, step)
    (checkpoints.directory / "global_step_11").write_text("a file")
    (checkpoints.directory / "global_step_12_copy").mkdir()
    assert checkpoints.steps() == [9, 10, 100]


def test_error_while_writing_leaves_what_was_there(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1)
    refused = pytest.raises(CheckpointError, match=r"step 2 .*No space left.*Step 1 is still there")
    directory = checkpoints.begin(2)
    with refused as caught, checkpoints.guarded(2):
        (directory / "half").write_text("hal")
        raise OSError(28, "No space left on device")
    assert isinstance(caught.value.__cause__, OSError)
    assert names(checkpoints.directory) == ["global_step_1", LATEST]


def test_error_of_a_role_says_what_is_left(checkpoints: Checkpoints) -> None:
    refused = pytest.raises(CheckpointError, match=r"step 2 .*got actor: SafetensorError: full.*no earlier")
    checkpoints.begin(2)
    with refused, checkpoints.guarded(2):
        raise CheckpointError("actor", got="SafetensorError: full")
    assert names(checkpoints.directory) == []


def test_bug_of_ours_comes_through_as_it_is(checkpoints: Checkpoints) -> None:
    checkpoints.begin(2)
    with pytest.raises(ZeroDivisionError), checkpoints.guarded(2):
        raise ZeroDivisionError
    assert names(checkpoints.directory) == []


def test_same_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1, "old")
    assert (write(checkpoints, 1, "new") / "actor" / "state").read_text() == "new 1"
    assert names(checkpoints.directory) == ["global_step_1", LATEST]


def test_older_ones_stay_until_the_new_one_is_read_back(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that returns other bytes than were listed: the new one gets no name, and nothing is deleted for it."""
    checkpoints.max_to_keep = 1
    write(checkpoints, 1)

    def damage(directory: Path) -> None:
        (directory / "actor" / "state").write_text("weights 7")

    monkeypatch.setattr("quadriga.trainer.checkpoint._sync", damage)
    with pytest.raises(CheckpointError, match=r"step 2 .*actor/state: other content.*Step 1 is still there"):
        write(checkpoints, 2)
    assert names(checkpoints.directory) == ["global_step_1", LATEST]
    verify(checkpoints.path(1))
    assert (checkpoints.newest(), checkpoints.last_written) == (1, 1)


def test_checkpoint_that_is_not_complete_is_none(checkpoints: Checkpoints) -> None:
    """While it is written, the one before is the newest; given up, it leaves nothing."""
    write(checkpoints, 1)
    (checkpoints.begin(2) / "half").write_text("hal")
    assert (checkpoints.steps(), checkpoints.newest()) == ([1], 1)
    checkpoints.abandon(2)
    assert names(checkpoints.directory) == ["global_step_1", LATEST]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_only_the_newest_stay(kept: int, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, max_to_keep=kept)
    for step in range(1, 6):
        write(checkpoints, step)
    assert checkpoints.steps() == list(range(6 - kept, 6))


def test_leftovers_of_a_killed_run_are_swept(checkpoints: Checkpoints) -> None:
    """Folders and files alike."""
    checkpoints.directory.mkdir()
    (checkpoints.directory / ".unfinished_7_123").mkdir()
    (checkpoints.directory / ".unfinished_7_123" / "half").write_text("hal")
    (checkpoints.directory / f".unfinished_{LATEST}").write_text("7")
    (checkpoints.directory / "mine.txt").write_text("not the run's")
    write(checkpoints, 8)
    assert names(checkpoints.directory) == ["global_step_8", LATEST, "mine.txt"]


@pytest.mark.parametrize("call", ["rename", "replace"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_kill_between_two_system_calls(
    call: str, number: int, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dying at any rename leaves only whole checkpoints, the newest of which is as good as the one before.

    A kill does not run `finally`, so the removal of unfinished folders is switched off too.
    """
    checkpoints.max_to_keep = 2
    for step in (1, 2):
        write(checkpoints, step)
    seen, original = [], getattr(Path, call)

    def dying(path: Path, *args: object) -> object:
        seen.append(path)
        if len(seen) == number:
            raise Killed
        return original(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, dying)
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        with suppress(Killed):
            write(checkpoints, 2, "again")
            write(checkpoints, 3)
    for step in checkpoints.steps():
        verify(checkpoints.path(step))
    newest = checkpoints.newest()
    assert newest in (1, 2, 3)
    write(checkpoints, newest + 1)
    assert checkpoints.newest() == newest + 1
    assert not list(checkpoints.directory.glob(".unfinished*"))


def test_half_deleted_checkpoint_is_none(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while an old checkpoint is deleted must not leave half of it under its name."""
    checkpoints.max_to_keep = 1
    write(checkpoints, 1)

    def dying(*args: object, **kwargs: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", dying)
        write(checkpoints, 2)
    assert checkpoints.steps() == [2]
    verify(checkpoints.path(2))


def test_run_begun_anew_goes_on_from_its_own(checkpoints: Checkpoints) -> None:
    """Later checkpoints of a predecessor in the same directory are neither taken nor deleted."""
    checkpoints.max_to_keep = 1
    write(checkpoints, 100, "predecessor")
    for step in (1, 2):
        write(checkpoints, step)
    assert checkpoints.to_resume(TrainerConfig()) == checkpoints.path(2)
    assert checkpoints.steps() == [2, 100]


def test_newest_without_its_note(checkpoints: Checkpoints) -> None:
    """A kill between the rename and the note, and a note of a checkpoint that is gone: the highest step counts."""
    write(checkpoints, 1)
    write(checkpoints, 2)
    (checkpoints.directory / LATEST).unlink()
    assert checkpoints.newest() == 2
    (checkpoints.directory / LATEST).write_text("7\n")
    assert checkpoints.newest() == 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "actor" / "state").unlink(), "actor/state: got no such file"),
        (lambda path: (path / "actor" / "state").write_text("weight"), "actor/state: got 6 bytes, expected 9 bytes"),
        (lambda path: (path / "actor" / "state").write_text("weighty 3"), "actor/state: got other content"),
        (lambda path: (path / MANIFEST).unlink(), f"got no {MANIFEST}"),
        (lambda path: (path / MANIFEST).write_text("{"), "got no JSON"),
        (shutil.rmtree, f"got no {MANIFEST}"),
    ],
    ids=["missing", "cut", "changed", "no manifest", "damaged manifest", "nothing"],
)
def test_damage_is_named(damage: Callable[[Path], object], words: str, checkpoints: Checkpoints) -> None:
    path = write(checkpoints, 3)
    damage(path)
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    assert words in str(caught.value)
    assert "resume_path" in str(caught.value)


def test_where_to_resume(checkpoints: Checkpoints) -> None:
    assert checkpoints.to_resume(TrainerConfig()) is None
    first = write(checkpoints, 1)
    second = write(checkpoints, 2)
    assert checkpoints.to_resume(TrainerConfig()) == second
    assert checkpoints.to_resume(TrainerConfig(resume_mode="disable")) is None
    named = TrainerConfig(resume_mode="resume_path", resume_from_path=str(first))
    assert checkpoints.to_resume(named) == first
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        checkpoints.to_resume(TrainerConfig(resume_mode="path", resume_from_path=str(checkpoints.directory)))


def test_damaged_newest_is_not_passed_over(checkpoints: Checkpoints) -> None:
    """Going on from an older one instead would lose steps in silence."""
    write(checkpoints, 1)
    (write(checkpoints, 2) / "actor" / "state").write_text("weights 9")
    with pytest.raises(CheckpointError, match="global_step_2"):
        checkpoints.to_resume(TrainerConfig())


def test_step_stands_in_the_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a folder named global_step_N"):
        step_of(tmp_path / "copy_of_step_3")


def test_model_folder(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A run, a checkpoint, its actor, and the model itself lead to the same folder."""
    write(checkpoints, 1)
    directory = checkpoints.begin(2)
    (directory / "actor").mkdir()
    (directory / "actor" / "config.json").write_text("{}")
    checkpoints.complete(2)
    actor = checkpoints.path(2) / "actor"
    for path in (checkpoints.directory, checkpoints.path(2), actor):
        assert model_folder(path) == actor
    assert model_folder("someone/some-model") == "someone/some-model"
    with pytest.raises(CheckpointError, match=r"config\.json"):
        model_folder(checkpoints.path(1))


def test_model_folder_of_a_checkpoint_with_hf_model_only(checkpoints: Checkpoints) -> None:
    directory = checkpoints.begin(1)
    (directory / "actor" / "huggingface").mkdir(parents=True)
    (directory / "actor" / "huggingface" / "config.json").write_text("{}")
    checkpoints.complete(1)
    assert model_folder(checkpoints.directory) == checkpoints.path(1) / "actor" / "huggingface"


def test_configuration_is_written_or_refused(tmp_path: Path) -> None:
    write_configuration(tmp_path / "a" / "run", "trainer: {}\n")
    assert names(tmp_path / "a" / "run") == ["config.yaml"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"default_local_dir=.*NotADirectoryError.*Set|Free"):
        write_configuration(tmp_path / "file" / "run", "trainer: {}\n")
