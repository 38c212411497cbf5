# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or not at all, whatever happens while they are written or deleted."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from quadriga.config import TrainerConfig
from quadriga.errors import CheckpointError, DamagedCheckpointError
from quadriga.trainer.checkpoint import (
    LATEST,
    MANIFEST,
    Checkpoints,
    model_folder,
    step_of,
    verify,
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


def resumed(checkpoints: Checkpoints, **trainer: str) -> Path | None:
    """The checkpoint that a run with these keys goes on from."""
    return checkpoints.resume(TrainerConfig(**trainer), lambda path: None)


def damage(checkpoint: Path) -> None:
    (checkpoint / "actor" / "state").write_text("weighty")


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
    refused = pytest.raises(
        CheckpointError, match=r"step 2 .*got actor: SafetensorError: full.*no earlier"
    )
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
    with pytest.raises(
        CheckpointError, match=r"step 2 .*actor/state: other content.*Step 1 is still there"
    ):
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


def test_half_deleted_checkpoint_is_none(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("kept", [1, 2])
def test_leftovers_of_a_save_that_no_save_follows(
    kept: int, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before or while the last save deletes the oldest checkpoint: it is deleted later."""
    checkpoints.max_to_keep = kept
    for step in range(1, kept + 1):
        write(checkpoints, step)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_delete_surplus", lambda newest, max_to_keep: None)
        write(checkpoints, kept + 1)
    assert checkpoints.steps() == list(range(1, kept + 2))
    (checkpoints.directory / ".unfinished_global_step_1_123").mkdir()

    checkpoints.delete_leftovers()
    expected = [f"global_step_{step}" for step in range(2, kept + 2)]
    assert names(checkpoints.directory) == [*expected, LATEST]


def test_run_begun_anew_goes_on_from_its_own(checkpoints: Checkpoints) -> None:
    """Later checkpoints of a predecessor in the same directory are neither taken nor deleted."""
    checkpoints.max_to_keep = 1
    write(checkpoints, 100, "predecessor")
    for step in (1, 2):
        write(checkpoints, step)
    assert resumed(checkpoints) == checkpoints.path(2)
    assert checkpoints.steps() == [2, 100]


NOTES = {"none": "", "gone": "7\n", "no number": "2 or so\n", "no text": "\x00", "cut": "2"}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_what_is_no_past_of_a_run_is_never_gone_on_from(
    note: str, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run has begun anew: what stood there then is not an older state of it, and stands aside, with its settings."""
    for step in (1, 2, 3, 9):
        write(checkpoints, step, "predecessor")
    (checkpoints.directory / "config.yaml").write_text("trainer: {}\n")
    assert resumed(checkpoints, resume_mode="disable") is None
    aside = checkpoints.directory / "superseded_1"
    assert f"steps 1, 2, 3, 9, were moved to {aside}." in capsys.readouterr().out
    assert (
        names(checkpoints.directory) == ["config.yaml", "superseded_1"]
        and (aside / "config.yaml").is_file()
    )
    assert resumed(checkpoints) is None
    write(checkpoints, 2)
    write(checkpoints, 3)
    (checkpoints.directory / LATEST).write_text(note)
    assert resumed(checkpoints) == checkpoints.path(3)
    assert ("DAMAGED" in capsys.readouterr().out) == bool(note)
    damage(checkpoints.path(3))
    assert resumed(checkpoints) == checkpoints.path(2)
    damage(checkpoints.path(2))
    with pytest.raises(
        DamagedCheckpointError, match=r"global_step_2/actor/state.* No other checkpoint"
    ):
        resumed(checkpoints)
    first = str(aside / "global_step_1")
    assert resumed(checkpoints, resume_mode="resume_path", resume_from_path=first) == Path(first)


def test_run_from_an_earlier_step_goes_on_from_there(checkpoints: Checkpoints) -> None:
    """Killed before its first checkpoint, it does not take the later ones of the run that it has left."""
    first = write(checkpoints, 1)
    write(checkpoints, 2)
    for number in (1, 2):
        assert resumed(checkpoints, resume_mode="resume_path", resume_from_path=str(first)) == first
        assert resumed(checkpoints) == first and checkpoints.steps() == [1]
        assert (checkpoints.directory / f"superseded_{number}" / "global_step_2").is_dir()
        write(checkpoints, 2, "again")


def test_a_validation_alone_moves_nothing(checkpoints: Checkpoints) -> None:
    write(checkpoints, 1)
    assert (
        checkpoints.resume(TrainerConfig(resume_mode="disable", val_only=True), lambda path: None)
        is None
    )
    assert (checkpoints.steps(), checkpoints.newest()) == ([1], 1)


def test_newest_without_its_note(checkpoints: Checkpoints) -> None:
    """A kill between the rename and the note, and a note of a checkpoint that is gone: the highest step counts."""
    write(checkpoints, 1)
    write(checkpoints, 2)
    (checkpoints.directory / LATEST).unlink()
    assert checkpoints.newest() == 2
    (checkpoints.directory / LATEST).write_text("7\n")
    assert checkpoints.newest() == 2


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: (path / "actor" / "state").unlink(), "actor/state: got no such file"),
    "cut": (
        lambda path: (path / "actor" / "state").write_text("weight"),
        "actor/state: got 6 bytes, expected 9 bytes",
    ),
    "changed": (
        lambda path: (path / "actor" / "state").write_text("weighty 3"),
        "actor/state: got other content",
    ),
    "a folder": (
        lambda path: (
            (path / "actor" / "state").replace(path / "x") and (path / "actor" / "state").mkdir()
        ),
        "",
    ),
    "no manifest": (
        lambda path: (path / MANIFEST).unlink(),
        f"got no {MANIFEST}, expected a complete checkpoint",
    ),
    "half a manifest": (
        lambda path: (path / MANIFEST).write_text("{"),
        "got no list of files (JSONDecodeError",
    ),
    "empty manifest": (
        lambda path: (path / MANIFEST).write_text("{}"),
        "got no list of files (ValueError: it is empty)",
    ),
    "other manifest": (
        lambda path: (path / MANIFEST).write_text("[1]"),
        "got no list of files (AttributeError",
    ),
    "no facts": (
        lambda path: (path / MANIFEST).write_text('{"actor": {}}'),
        "got no list of files (KeyError",
    ),
    "no text": (
        lambda path: (path / MANIFEST).write_bytes(b"\xff{}"),
        "got no list of files (UnicodeDecodeError",
    ),
    "nested": (
        lambda path: (path / MANIFEST).write_text("[" * 100_000),
        "got no list of files (RecursionError",
    ),
    "outside": (
        lambda path: (path / MANIFEST).write_text('{"../x": {"bytes": 1, "sha256": ""}}'),
        "it names ../x, which is outside",
    ),
    "far outside": (
        lambda path: (path / MANIFEST).write_text('{"/etc/passwd": {"bytes": 1, "sha256": ""}}'),
        "it names /etc/passwd, which is outside",
    ),
    "nothing": (shutil.rmtree, f"got no {MANIFEST}, expected a complete checkpoint"),
}


@pytest.mark.parametrize(("spoil", "words"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named(
    spoil: Callable[[Path], object], words: str, checkpoints: Checkpoints
) -> None:
    path = write(checkpoints, 3)
    spoil(path)
    with pytest.raises(DamagedCheckpointError) as caught:
        verify(path)
    assert words in str(caught.value)


def test_a_file_that_may_not_be_read_is_damage(checkpoints: Checkpoints) -> None:
    """Root may read it; so a process of another user looks."""
    path = write(checkpoints, 3)
    for one in (checkpoints.directory, *checkpoints.directory.parents):
        if not one.stat().st_mode & 0o001:
            one.chmod(0o755)
    (path / "actor" / "state").chmod(0)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            verify(path)
        except DamagedCheckpointError as error:
            status = 0 if "actor/state: got PermissionError" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_where_to_resume(checkpoints: Checkpoints) -> None:
    assert resumed(checkpoints) is None
    first = write(checkpoints, 1)
    second = write(checkpoints, 2)
    assert resumed(checkpoints) == second
    (checkpoints.directory / LATEST).unlink()
    assert resumed(checkpoints) == second and (checkpoints.directory / LATEST).read_text() == "2\n"
    assert resumed(checkpoints, resume_mode="resume_path", resume_from_path=str(first)) == first
    assert resumed(checkpoints) == first
    second = checkpoints.directory / "superseded_1" / "global_step_2"
    with pytest.raises(
        CheckpointError, match=r"no manifest\.json, .* Resume from .*global_step_1 "
    ):
        resumed(checkpoints, resume_mode="path", resume_from_path=str(checkpoints.directory))


@pytest.mark.parametrize("spoil", [spoil for spoil, _ in DAMAGES.values()], ids=DAMAGES)
def test_damaged_newest_is_passed_over_and_kept(
    spoil: Callable[[Path], object], checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is damaged is never swept, overwritten or counted, and a second one with the same step neither."""
    checkpoints.max_to_keep = 2
    write(checkpoints, 1)
    for number in (1, 2):
        spoil(write(checkpoints, 2, f"weight{number}"))
        was = {path: path.read_bytes() for path in checkpoints.path(2).rglob("*") if path.is_file()}
        assert resumed(checkpoints) == checkpoints.path(1)
        said = capsys.readouterr().out
        aside = checkpoints.directory / (
            "damaged_global_step_2" if number == 1 else "damaged_global_step_2_2"
        )
        if was:
            assert (
                "DAMAGED: " in said
                and f"kept as {aside}." in said
                and "what came after step 1 is done again" in said
            )
        assert {
            aside / path.relative_to(checkpoints.path(2)): content for path, content in was.items()
        } == {path: path.read_bytes() for path in aside.rglob("*") if path.is_file()}
        assert (checkpoints.steps(), checkpoints.newest()) == ([1], 1)
    write(checkpoints, 2)
    write(checkpoints, 3)
    assert checkpoints.steps() == [2, 3] and resumed(checkpoints) == checkpoints.path(3)
    assert sum(name.startswith("damaged_") for name in names(checkpoints.directory)) == (
        2 if was else 0
    )


def test_damage_that_shows_when_it_is_loaded_is_passed_over_too(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3):
        write(checkpoints, step)
    tried: list[str] = []

    def load(path: Path) -> None:
        tried.append(path.name)
        if path.name != "global_step_1":
            raise DamagedCheckpointError(str(path), got="half of it")

    assert checkpoints.resume(TrainerConfig(), load) == checkpoints.path(1)
    assert tried == ["global_step_3", "global_step_2", "global_step_1"]
    assert names(checkpoints.directory)[:2] == ["damaged_global_step_2", "damaged_global_step_3"]


def test_checkpoint_of_another_model_is_no_damage(checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        write(checkpoints, step)

    def load(path: Path) -> None:
        raise CheckpointError(str(path), got="another model")

    with pytest.raises(CheckpointError, match="another model"):
        checkpoints.resume(TrainerConfig(), load)
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize(
    "keys",
    [
        {"resume_fallback": "none"},
        {"resume_mode": "resume_path", "resume_from_path": "global_step_3"},
    ],
    ids=["none", "named by the user"],
)
def test_damaged_one_is_refused_by_the_name_of_a_whole_one(
    keys: dict[str, str], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(checkpoints, step)
    damage(checkpoints.path(2))
    damage(checkpoints.path(3))
    monkeypatch.chdir(checkpoints.directory)
    advice = "global_step_3/actor/state: got 7 bytes, .*resume_path trainer.resume_from_path=.*global_step_1"
    with pytest.raises(DamagedCheckpointError, match=advice):
        resumed(checkpoints, **keys)
    assert checkpoints.steps() == [1, 2, 3]


def test_where_all_are_damaged_the_run_does_not_begin_anew(checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        damage(write(checkpoints, step))
    said = "global_step_2/actor/state: got 7.* global_step_1/actor/state: got 7.*No other .*resume_mode=disable"
    said = said.replace(" global_step_1", ".*global_step_1")
    for _ in range(2):
        with pytest.raises(DamagedCheckpointError, match=said):
            resumed(checkpoints)
        assert names(checkpoints.directory) == ["global_step_1", "global_step_2", LATEST]
    for step in (1, 2):
        shutil.rmtree(checkpoints.path(step))
    with pytest.raises(
        DamagedCheckpointError, match=f"{LATEST}: got '2', expected .*there is none"
    ):
        resumed(checkpoints)


def test_damaged_one_is_not_overwritten_by_a_run_from_before_it(checkpoints: Checkpoints) -> None:
    first = write(checkpoints, 1)
    damage(write(checkpoints, 2))
    assert resumed(checkpoints, resume_mode="resume_path", resume_from_path=str(first)) == first
    write(checkpoints, 2)
    aside = checkpoints.directory / "superseded_1" / "global_step_2"
    assert (aside / "actor" / "state").read_text() == "weighty"
    verify(checkpoints.path(2))


def test_checkpoint_that_is_still_open_elsewhere_does_not_end_the_run(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS the folder of a deleted file that is open stays until it is closed."""
    checkpoints.max_to_keep = 1
    write(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", Mock(side_effect=OSError(39, "Directory not empty")))
        write(checkpoints, 2)
    assert (
        checkpoints.steps() == [2] and len(list(checkpoints.directory.glob(".unfinished_*"))) == 1
    )
    write(checkpoints, 3)
    assert names(checkpoints.directory) == ["global_step_3", LATEST]


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (MANIFEST, '{"actor/state": {"bytes": 1e400, "sha256": ""}}'),
        (MANIFEST, '{"actor/state": {"bytes": 4398046511104, "sha256": ""}}'),
        *[
            (MANIFEST, "[" * 10_000),
            (MANIFEST, "pipe"),
            ("actor/state", "pipe"),
            (f"../{LATEST}", "pipe"),
        ],
    ],
)
def test_hostile_files_are_passed_over(checkpoints: Checkpoints, name: str, text: str) -> None:
    for step in (1, 2):
        write(checkpoints, step)
    (place := checkpoints.path(2) / name).unlink()
    os.mkfifo(place) if text == "pipe" else place.write_text(text)
    assert resumed(checkpoints) == checkpoints.path(2 if LATEST in name else 1)
