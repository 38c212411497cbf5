# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk. Only one that is written in full, listed, read back and renamed counts.

    DIRECTORY/
      config.yaml                           the resolved configuration: see settings.py
      latest_checkpointed_iteration.txt     step of the checkpoint that was written last
      global_step_20/
        manifest.json                       size and SHA-256 of every file below
        trainer/                            step, loader position, random states; `by_time` marks a
                                            checkpoint that trainer.save_minutes has written
        actor/  critic/                     one folder per role that learns: workers/checkpoint.py

A folder named global_step_N is complete: it gets this name after its last byte is on disk, and
loses it before its first byte is deleted. What a killed run leaves behind has another name, and the
next save deletes it. A complete checkpoint that turns out to be damaged is kept as
damaged_global_step_N. Checkpoints of another run in the same directory are kept in superseded_N,
with their configurations.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from quadriga.config.actor import HF_FOLDER
from quadriga.config.loader import as_override
from quadriga.config.trainer import TrainerConfig
from quadriga.errors import CheckpointError, DamagedCheckpointError

MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
_COMPLETE = re.compile(r"global_step_(\d+)")
_UNFINISHED = ".unfinished_"
_BY_TIME = Path("trainer", "by_time")
_SUPERSEDED = ".superseded"
"""File in a checkpoint that is no longer part of the run, which has resumed from an earlier one."""


class Checkpoints:
    """The checkpoints of a run's directory.

    Args:
        directory: the run's directory; it need not exist yet.
        max_to_keep: number of newest checkpoints that `complete` keeps; None: all.
        is_by_time: whether checkpoints are written by the clock. These are marked, and
            `max_to_keep` neither counts nor deletes others.

    Attributes:
        last_written: step of the checkpoint that this object wrote last; None if it wrote none.
    """

    def __init__(
        self, directory: Path, max_to_keep: int | None = None, *, is_by_time: bool = False
    ) -> None:
        self.directory = directory
        self.max_to_keep = max_to_keep
        self.is_by_time = is_by_time
        self.last_written: int | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints on disk, in ascending order."""
        folders = numbered_paths(self.directory, "global_step_")
        return [step for step, path in folders.items() if path.is_dir()]

    def newest(self, before_step: float = math.inf) -> int | None:
        """Step of the checkpoint that was written last; None if there is none.

        This need not be the highest step: a run that resumed from an earlier step leaves the later
        checkpoints, which are then superseded, in place.

        Args:
            before_step: consider only earlier steps, and no superseded checkpoints.
        """
        steps = [step for step in self.steps() if step < before_step]
        latest = self._read_latest()
        if latest in map(str, steps):
            return int(latest)
        # LATEST is missing or damaged, or names a checkpoint that is missing or too late.
        candidates = self._without_superseded(steps)
        # To resume, a superseded checkpoint is better than none.
        if not candidates and before_step == math.inf:
            candidates = steps
        return max(candidates, default=None)

    def newest_path(self) -> Path | None:
        """Folder of the checkpoint that was written last; None if there is none."""
        newest = self.newest()
        return None if newest is None else self.path(newest)

    def _read_latest(self) -> str:
        """Read the file `LATEST`.

        Returns:
            The step as a text if the file is intact; "" if there is no file, or if it is empty.
            Otherwise another text, which equals no step: why the file cannot be read, or its wrong
            content.
        """
        path = self.directory / LATEST
        try:
            if path.exists() and not path.is_file():
                return "no regular file"
            text = path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            return str(error.strerror)
        if text and not text.endswith("\n"):
            return f"{text} without an end of line"
        return text.removesuffix("\n")

    def _without_superseded(self, steps: list[int]) -> list[int]:
        """Leave out the steps whose checkpoints are superseded: the run has resumed before them."""
        return [step for step in steps if not os.path.exists(self.path(step) / _SUPERSEDED)]

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step, whether it exists or not."""
        return self.directory / f"global_step_{step}"

    # Writing

    def begin(self, step: int) -> Path:
        """Create the folder in which a step's checkpoint is written until `complete` renames it.

        Raises:
            CheckpointError: the folder cannot be created.
        """
        folder = self._unfinished(step)
        with self.guarded(step):
            self._delete_unfinished()
            folder.mkdir(parents=True)
            if self.is_by_time:
                mark = folder / _BY_TIME
                mark.parent.mkdir()
                mark.touch()
        return folder

    def complete(self, step: int) -> None:
        """Turn the folder of `begin` into a checkpoint, and delete the oldest beyond `max_to_keep`.

        The files are listed, synchronized to disk and read back before the folder gets its name.

        Raises:
            CheckpointError: a file cannot be written, or is not the same when it is read back.
                Older checkpoints are untouched.
        """
        unfinished = self._unfinished(step)
        with self.guarded(step):
            entries = {}
            for path in sorted(unfinished.rglob("*")):
                if path.is_file():
                    name = path.relative_to(unfinished).as_posix()
                    entries[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            manifest = json.dumps(entries, indent=2) + "\n"
            (unfinished / MANIFEST).write_text(manifest, encoding="utf-8")
            # The files are synchronized before they are read back, and both happen before the folder
            # gets the name of a checkpoint.
            _sync(unfinished)
            verify(unfinished)

            if self.path(step).exists():
                self._make_room(step)
            unfinished.rename(self.path(step))
            # The rename itself must reach the disk before LATEST names the checkpoint.
            _sync(self.directory)
            write_atomically(self.directory / LATEST, f"{step}\n")
            self.last_written = step
            if self.max_to_keep is not None:
                self._delete_surplus(step, self.max_to_keep)

    def _delete_surplus(self, newest: int, max_to_keep: int) -> None:
        """Delete older checkpoints, so that at most `max_to_keep` up to step `newest` are left."""
        # Checkpoints of later steps are superseded: they are neither counted nor deleted.
        steps = [step for step in self.steps() if step <= newest]
        if self.is_by_time:
            steps = [step for step in steps if (self.path(step) / _BY_TIME).exists()]
        for step in steps[:-max_to_keep]:
            self._discard(self.path(step))

    def delete_leftovers(self) -> None:
        """Delete what a process that was killed during a save has left.

        The next save does this too. It is needed where no step, and so no save, is left.
        """
        self._delete_unfinished()
        newest = self.newest()
        if newest is not None and self.max_to_keep is not None:
            self._delete_surplus(newest, self.max_to_keep)

    def _delete_unfinished(self) -> None:
        """Delete the unfinished folders of processes that were killed."""
        # Only one process at a time writes here, so no folder is still in use.
        for leftover in self.directory.glob(f"{_UNFINISHED}*"):
            _delete(leftover)

    def abandon(self, step: int) -> None:
        """Delete the folder of a checkpoint that will not be completed."""
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    @contextmanager
    def guarded(self, step: int) -> Iterator[None]:
        """Context manager: abandon the checkpoint of a step if the block fails.

        Raises:
            CheckpointError: the block has raised an OSError or a CheckpointError, for example
                because the disk is full. The error names the checkpoint that is left to resume from.
        """
        try:
            yield
        except (OSError, CheckpointError) as error:
            self.abandon(step)
            if isinstance(error, CheckpointError):
                got = f"{error.where}: {error.got}"
            else:
                got = f"{type(error).__name__}: {error.strerror or error}"
            newest = self.newest()
            advice = f"Step {newest} is still there to resume from."
            if newest is None:
                advice = "There is no earlier checkpoint."
            raise CheckpointError(
                f"checkpoint of step {step} in {self.directory}",
                got=got,
                expected="room and permission to write it",
                fix=f"Free space or set trainer.default_local_dir. {advice}",
            ) from error
        # Not on KeyboardInterrupt, after which the checkpoint may still be completed.
        except Exception:
            self.abandon(step)
            raise

    def _unfinished(self, step: int) -> Path:
        """Folder in which this process writes the checkpoint of a step."""
        return self.directory / f"{_UNFINISHED}{step}_{os.getpid()}"

    def _make_room(self, step: int) -> None:
        """Remove an older checkpoint of the same step, or rename it if it is damaged."""
        if self._read_latest() == str(step):
            # If the process is killed after this, LATEST must not name a missing checkpoint.
            (self.directory / LATEST).unlink()
        try:
            verify(self.path(step))
        except DamagedCheckpointError:
            self._keep_damaged(self.path(step))
        else:
            self._discard(self.path(step))

    def _discard(self, checkpoint: Path) -> None:
        """Rename a checkpoint, then delete it: half a checkpoint must not look complete."""
        unfinished = self.directory / f"{_UNFINISHED}{checkpoint.name}_{os.getpid()}"
        checkpoint.rename(unfinished)
        _delete(unfinished)

    def _keep_damaged(self, checkpoint: Path) -> Path:
        """Rename a damaged checkpoint to a new name that says so. Returns the new path."""
        place = self.directory / f"damaged_{checkpoint.name}"
        number = 1
        while place.exists():
            number += 1
            place = self.directory / f"damaged_{checkpoint.name}_{number}"
        return checkpoint.rename(place)

    # Resuming

    def resume(self, config: TrainerConfig, load: Callable[[Path], None]) -> Path | None:
        """Verify and load the checkpoint that a run resumes from.

        Args:
            config: section with `resume_mode` and the keys that belong to it.
            load: loads a checkpoint. After it raises a `DamagedCheckpointError` it may be called
                again with an older one.

        Returns:
            The checkpoint; None if the run starts from the beginning.

        Raises:
            DamagedCheckpointError: the checkpoint is damaged, and no other one may be loaded
                instead: the user named this one, no older one is intact, or `resume_fallback`
                forbids it.
            CheckpointError: the checkpoint belongs to another model or optimizer, or the directory
                cannot be changed.
        """
        path = None
        damaged = {}
        if config.resume_mode == "resume_path":
            path = Path(config.resume_from_path or "")
            try:
                verify(path)
                load(path)
            except DamagedCheckpointError as error:
                # The user may have named the directory of a run instead of a checkpoint in it.
                checkpoints = Checkpoints(path)
                if not checkpoints.steps():
                    checkpoints = Checkpoints(path.parent)
                error.fix = checkpoints._advice({path})
                raise
        elif config.resume_mode == "auto":
            takes_older = config.resume_fallback == "newest_intact"
            path, damaged = self._load_newest(load, takes_older=takes_older)
        try:
            self._set_others_aside(path, damaged, config)
        except OSError as error:
            raise CheckpointError(
                str(self.directory),
                got=f"{type(error).__name__}: {error.strerror or error}",
                expected="permission to rename and write there",
            ) from error
        return path

    def _load_newest(
        self, load: Callable[[Path], None], *, takes_older: bool
    ) -> tuple[Path | None, dict[Path, DamagedCheckpointError]]:
        """Verify and load the newest checkpoint.

        Args:
            load: as for `resume`.
            takes_older: whether an older one may be loaded if the newest is damaged.

        Returns:
            The checkpoint, None if there is none; and the errors of the damaged files and
            checkpoints that were passed over, by path.

        Raises:
            DamagedCheckpointError: there are checkpoints, but none that may be loaded.
        """
        steps = self.steps()
        newest = self.newest()
        latest = self._read_latest()
        damaged = {}
        if latest and latest != str(newest):
            # LATEST is damaged, or the checkpoint that it names is gone.
            place = self.directory / LATEST
            known_steps = ", ".join(map(str, steps)) or "there is none"
            damaged[place] = DamagedCheckpointError(
                str(place),
                got=repr(latest),
                expected=f"the step of a checkpoint that is there: {known_steps}",
            )

        # From the newest to the oldest.
        candidates = []
        if newest is not None:
            older_steps = [step for step in self._without_superseded(steps) if step < newest]
            candidates = [newest, *reversed(older_steps)]
        for step in candidates:
            if damaged and not takes_older:
                break
            path = self.path(step)
            try:
                verify(path)
                load(path)
                return path, damaged
            except DamagedCheckpointError as error:
                damaged[path] = error
        if not damaged:
            return None, {}

        # Nothing was loaded: the first error is raised, with the others in its advice.
        first_error, *other_errors = damaged.values()
        findings = [f"{error.where}: got {error.got}." for error in other_errors]
        first_error.fix = " ".join([*findings, self._advice(damaged)])
        raise first_error

    def _set_others_aside(
        self,
        path: Path | None,
        damaged: Mapping[Path, DamagedCheckpointError],
        config: TrainerConfig,
    ) -> None:
        """Set aside the checkpoints in the directory that a starting run does not continue.

        Damaged checkpoints are reported and renamed. Checkpoints of steps after the start are marked
        as superseded if the run resumes by itself (`resume_mode=auto`). If the user said where the
        run starts, such checkpoints belong to another run, and are moved to a folder.

        Args:
            path: the checkpoint that the run resumes from; None: it starts from the beginning.
            damaged: errors of damaged checkpoints, and of a damaged `LATEST`, by path.
            config: as for `resume`.
        """
        # 0 if the run starts from the beginning, or from a checkpoint in another directory.
        resumed_step = 0
        if path is not None and path.resolve().parent == self.directory.resolve():
            resumed_step = step_of(path)
        for place, error in damaged.items():
            # The damaged file may be LATEST, which is written again or removed below.
            print(f"DAMAGED: {error.where}: got {error.got}, expected {error.expected}.")
            if place.name != LATEST:
                print(f"It is kept as {self._keep_damaged(place)}.")
        if damaged:
            print(
                f"The run goes on from {path}: what came after step {resumed_step} is done again.",
                flush=True,
            )
        # A run that only validates takes no steps which could supersede others.
        if config.val_only:
            return

        later_steps = [step for step in self.steps() if step > resumed_step]
        quarantined = quarantined_files(self.directory)
        later_files = [file for step, file in quarantined.items() if step > resumed_step]
        if config.resume_mode == "auto":
            for step in later_steps:
                (self.path(step) / _SUPERSEDED).touch()
        elif later_steps or later_files:
            self._move_aside(later_steps, later_files)

        # LATEST must name the checkpoint that the run continues from.
        if not resumed_step:
            (self.directory / LATEST).unlink(missing_ok=True)
        elif self._read_latest() != str(resumed_step):
            write_atomically(self.directory / LATEST, f"{resumed_step}\n")

    def _move_aside(self, steps: list[int], files_of_rows: list[Path]) -> None:
        """Move what another run has left in the directory to a new folder `superseded_N`.

        Args:
            steps: steps of its checkpoints.
            files_of_rows: files with the rows of steps that it has skipped.
        """
        number = 1
        while (aside := self.directory / f"superseded_{number}").exists():
            number += 1
        aside.mkdir()
        for file in self.directory.glob("config*.yaml"):
            shutil.copy2(file, aside)
        for step in reversed(steps):
            self.path(step).rename(aside / self.path(step).name)
        for file in files_of_rows:
            file.rename(aside / file.name)
        if steps:
            print(
                "Checkpoints of another run that stood here, steps "
                f"{', '.join(map(str, steps))}, were moved to {aside}."
            )
        if files_of_rows:
            print(f"The rows of steps that another run has skipped were moved to {aside}.")

    def _advice(self, damaged: Collection[Path]) -> str:
        """Advice on how to continue without the checkpoints that are known to be damaged."""
        # Recommend the newest intact checkpoint.
        for step in reversed(self.steps()):
            path = self.path(step)
            if path in damaged:
                continue
            try:
                verify(path)
            except DamagedCheckpointError:
                continue
            override = as_override("trainer.resume_from_path", path)
            return f"Resume from {path} with trainer.resume_mode=resume_path {override}"
        return (
            f"No other checkpoint in {self.directory} is whole. Put the files back from a copy, "
            "or name a checkpoint elsewhere with trainer.resume_mode=resume_path "
            "trainer.resume_from_path, or begin anew with trainer.resume_mode=disable."
        )


def quarantined_files(directory: Path) -> dict[int, Path]:
    """Files with the rows of skipped steps (quarantine.py), by step."""
    return numbered_paths(directory / "quarantine", "step_", ".jsonl")


def numbered_paths(directory: Path, prefix: str, suffix: str = "") -> dict[int, Path]:
    """Files and folders of a directory whose names are PREFIX, a number and SUFFIX.

    Returns:
        The paths by their numbers, in ascending order.
    """
    paths = {}
    for path in directory.glob(f"{prefix}*{suffix}"):
        number = path.name.removeprefix(prefix).removesuffix(suffix)
        if number.isdecimal():
            paths[int(number)] = path
    return dict(sorted(paths.items()))


def checkpoint_to_resume(config: TrainerConfig) -> Path | None:
    """The checkpoint from which a run would resume, which is not verified; None: it starts anew."""
    if config.resume_mode == "resume_path":
        return Path(config.resume_from_path or "")
    if config.resume_mode == "auto":
        return Checkpoints(config.directory).newest_path()
    return None


def step_of(checkpoint: Path) -> int:
    """The training step after which a checkpoint was written.

    Raises:
        CheckpointError: the folder does not have the name of a checkpoint.
    """
    match = _COMPLETE.fullmatch(checkpoint.resolve().name)
    if match is None:
        raise CheckpointError(
            str(checkpoint), got="this name", expected="a folder named global_step_N"
        )
    return int(match[1])


def model_folder(path: str | Path) -> str | Path:
    """Find the Hugging Face folder of a run, a checkpoint, or a role's folder in a checkpoint.

    A Hugging Face folder is returned as it is. So is a path that does not exist, because it may be
    the name of a model on a hub.

    Raises:
        CheckpointError: the folder is none of these.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        return path
    # If the folder is a run's directory, its newest checkpoint is meant.
    checkpoint = Checkpoints(folder).newest_path() or folder
    for candidate in (folder, checkpoint / "actor", checkpoint / "actor" / HF_FOLDER):
        if (candidate / "config.json").is_file():
            return candidate
    key = "actor_rollout_ref.actor.checkpoint.save_contents"
    raise CheckpointError(
        str(folder),
        got="a folder without config.json",
        expected="a run, a checkpoint (global_step_N) or a Hugging Face folder",
        fix=f"A checkpoint has the model when `model` or `hf_model` is in {key}.",
    )


def verify(checkpoint: Path) -> None:
    """Compare a checkpoint with its manifest.

    Raises:
        DamagedCheckpointError: the checkpoint is missing, or a file is missing, truncated, changed
            or unreadable.
    """
    manifest = checkpoint / MANIFEST
    file = manifest  # the file that is being read, for errors
    try:
        _require_regular_file(manifest)
        entries = json.loads(manifest.read_bytes())
        if entries == {}:
            raise ValueError("it is empty")
        # All entries are checked before the first file, whose checksum may take minutes.
        files = []
        for name, entry in entries.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"it names {name}, which is outside")
            files.append((name, int(entry["bytes"]), str(entry["sha256"])))

        for name, size, digest in files:
            file = checkpoint / name
            _require_regular_file(file)
            actual_size = file.stat().st_size
            if actual_size != size:
                raise _damaged_error(file, f"{actual_size} bytes", f"{size} bytes")
            if sha256_of(file) != digest:
                raise _damaged_error(file, "other content than was written", "its SHA-256")
    except FileNotFoundError as error:
        if file == manifest:
            raise _damaged_error(checkpoint, f"no {MANIFEST}", "a complete checkpoint") from error
        raise _damaged_error(file, "no such file", "one that was written") from error
    except OSError as error:
        raise _damaged_error(
            file, f"{type(error).__name__}: {error.strerror}", "a file that can be read"
        ) from error
    # The manifest is no JSON, or JSON of another form.
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise _damaged_error(
            manifest, f"no list of files ({type(error).__name__}: {error})", "the list of files"
        ) from error


def _damaged_error(path: Path, got: str, expected: str) -> DamagedCheckpointError:
    """The error for a damaged file of a checkpoint."""
    return DamagedCheckpointError(
        str(path), got=got, expected=expected, fix="Take another checkpoint."
    )


def _require_regular_file(path: Path) -> None:
    """Refuse anything but a regular file: reading a named pipe would wait forever.

    A file that does not exist is not refused; reading it raises an error of its own.
    """
    if path.exists() and not path.is_file():
        raise _damaged_error(path, "no regular file", "a file that can be read")


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file under a temporary name, then rename it, so that it is never incomplete.

    Args:
        path: the file.
        text: its content.
        mode: its permissions, before the process's umask is applied.
    """
    unfinished = path.with_name(f"{_UNFINISHED}{path.name}")
    opener = partial(os.open, mode=mode)
    # JSON can hold half of a surrogate pair as an escape, UTF-8 cannot.
    content = text.encode(errors="backslashreplace")
    try:
        with open(unfinished, "wb", opener=opener) as file:
            file.write(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _delete(path: Path) -> None:
    """Delete a file or folder.

    A folder may remain in part: NFS keeps files that are still open. The next save deletes it.
    """
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    """Synchronize a folder to disk, with everything in it if it is an unfinished checkpoint."""
    paths = [directory]
    if directory.name.startswith(_UNFINISHED):
        paths = [*directory.rglob("*"), directory]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
