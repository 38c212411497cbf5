# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: written aside, listed, read back, renamed, and only then trusted.

    DIRECTORY/
      config.yaml                           the resolved configuration: see settings.py
      latest_checkpointed_iteration.txt     the step of the one written last
      global_step_20/
        manifest.json                       size and SHA-256 of every file below
        trainer/                            step, loader position, random states
        actor/  critic/                     one folder per role that learns: see workers/checkpoint.py

A folder named global_step_N is complete: it got this name by a rename after its last byte was on disk, and loses
it by another before its first byte is deleted. Whatever a killed run left behind has another name and is swept away
by the next save. A complete one that is found to be damaged later is kept as damaged_global_step_N. Those that are no
part of a run which began anew, or from an earlier step, are kept in superseded_N, with their configurations.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path

from quadriga.config.loader import as_override
from quadriga.config.trainer import TrainerConfig
from quadriga.errors import CheckpointError, DamagedCheckpointError
from quadriga.workers.checkpoint import HF_FOLDER

MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
_COMPLETE = re.compile(r"global_step_(\d+)")
_UNFINISHED = ".unfinished_"
_SKIPPED = re.compile(r"step_(\d+)\.jsonl")
_SUPERSEDED = ".superseded"
"""In a checkpoint: a run has begun at an earlier step since, so that this one is no part of its past."""


class Checkpoints:
    """The checkpoints below a run's directory, of which the newest `max_to_keep` stay (None: all).

    `last_written` is the step of the checkpoint that this object wrote last.
    """

    def __init__(self, directory: Path, max_to_keep: int | None = None) -> None:
        self.directory, self.max_to_keep = directory, max_to_keep
        self.last_written: int | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first, as the disk has them."""
        found = (
            _COMPLETE.fullmatch(path.name)
            for path in self.directory.glob("global_step_*")
            if path.is_dir()
        )
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> int | None:
        """The step of the checkpoint that was written last, if there is one.

        It need not be the highest: a run that began anew, or from an earlier step, leaves later ones of its
        predecessor where they are.
        """
        steps = self.steps()
        written = self._written()
        if written in map(str, steps):
            return int(written)
        return max(self._own(steps) or steps, default=None)

    def _written(self) -> str:
        """What stands in the file that names the step written last; it is written with an end of line."""
        try:
            path = self.directory / LATEST
            if path.exists() and not path.is_file():
                return "no regular file"
            text = path.read_bytes().decode(errors="replace")
            return text[:-1] if text.endswith("\n") else text and f"{text} without an end of line"
        except FileNotFoundError:
            return ""
        except OSError as error:
            return str(error.strerror)

    def _own(self, steps: list[int]) -> list[int]:
        return [step for step in steps if not os.path.exists(self.path(step) / _SUPERSEDED)]

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self.directory / f"global_step_{step}"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into; `complete` makes one of it.
        Raises CheckpointError: it cannot be made."""
        with self.guarded(step):
            for leftover in self.directory.glob(f"{_UNFINISHED}*"):
                _delete(leftover)
            self._aside(step).mkdir(parents=True)
        return self._aside(step)

    def complete(self, step: int) -> None:
        """All is written: list it, put it on the disk, read it back, and only then name it and delete older ones.
        Raises CheckpointError: something cannot be written, or is not what was written; older ones are untouched."""
        aside = self._aside(step)
        with self.guarded(step):
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            names = [path.relative_to(aside).as_posix() for path in files]
            found = [{"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files]
            facts = dict(zip(names, found, strict=True))
            (aside / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            _sync(aside)
            verify(aside)
            if self.path(step).exists():
                self._make_room(step)
            aside.rename(self.path(step))
            _sync(self.directory)
            write_atomically(self.directory / LATEST, f"{step}\n")
            self.last_written = step
            if self.max_to_keep is not None:
                for older in [each for each in self.steps() if each <= step][: -self.max_to_keep]:
                    self._discard(self.path(older))

    def abandon(self, step: int) -> None:
        """Take away what was written of a checkpoint that will not be one."""
        shutil.rmtree(self._aside(step), ignore_errors=True)

    @contextmanager
    def guarded(self, step: int) -> Iterator[None]:
        """What goes wrong inside ends the checkpoint of this step, and says what is left to resume from.
        Raises CheckpointError: it cannot be written, say because the disk is full; older checkpoints are untouched."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            self.abandon(step)
            left = self.newest()
            rest = (
                "There is no earlier checkpoint."
                if left is None
                else f"Step {left} is still there to resume from."
            )
            where, got = f"checkpoint of step {step} in {self.directory}", _reason(error)
            fix = f"Free space or set trainer.default_local_dir. {rest}"
            raise CheckpointError(
                where, got=got, expected="room and permission to write it", fix=fix
            ) from error
        except Exception:
            self.abandon(step)
            raise

    def _aside(self, step: int) -> Path:
        return self.directory / f"{_UNFINISHED}{step}_{os.getpid()}"

    def _make_room(self, step: int) -> None:
        """Take the name of an older checkpoint of the same step away."""
        if self._written() == str(step):
            # After a kill in between nothing names a checkpoint that is not there.
            (self.directory / LATEST).unlink()
        try:
            verify(self.path(step))
        except DamagedCheckpointError:
            self._set_aside(self.path(step))
        else:
            self._discard(self.path(step))

    def _discard(self, checkpoint: Path) -> None:
        """Take its name first: half a checkpoint must not look like a whole one."""
        aside = self.directory / f"{_UNFINISHED}{checkpoint.name}_{os.getpid()}"
        checkpoint.rename(aside)
        _delete(aside)

    def _set_aside(self, checkpoint: Path) -> Path:
        """Keep a damaged checkpoint under a name that says so, and that nothing else uses."""
        ends = chain([""], (f"_{number}" for number in count(2)))
        places = (self.directory / f"damaged_{checkpoint.name}{end}" for end in ends)
        return checkpoint.rename(next(place for place in places if not place.exists()))

    def resume(self, config: TrainerConfig, load: Callable[[Path], None]) -> Path | None:
        """Verify and load the checkpoint that a run with this configuration goes on from.
        `load`: reads a checkpoint. It may be called again, with an older one, after a DamagedCheckpointError. Returns
        the checkpoint; None: the run begins anew.
        Raises DamagedCheckpointError: it is damaged, and the user named it, or no older one is whole or is to be taken.
        Raises CheckpointError: it is that of another model or optimizer, or the directory cannot be changed."""
        path, damaged = None, {}
        if config.resume_mode == "resume_path":
            path = Path(config.resume_from_path or "")
            try:
                verify(path)
                load(path)
            except DamagedCheckpointError as error:
                # The folder of a run may have been named in place of one in it.
                others = Checkpoints(path if Checkpoints(path).steps() else path.parent)
                error.fix = others._advice({path})
                raise
        elif config.resume_mode == "auto":
            path, damaged = self._load_newest(config.resume_fallback == "newest_intact", load)
        try:
            self._leave_behind(path, damaged, config)
        except OSError as error:
            expected = "permission to rename and write there"
            raise CheckpointError(
                str(self.directory), got=_reason(error), expected=expected
            ) from error
        return path

    def _load_newest(
        self, takes_older: bool, load: Callable[[Path], None]
    ) -> tuple[Path | None, dict[Path, DamagedCheckpointError]]:
        """The checkpoint that was loaded, and the damage that was passed over."""
        steps, written, newest = self.steps(), self._written(), self.newest()
        damaged: dict[Path, DamagedCheckpointError] = {}
        if written and written != str(newest):
            expected = f"the step of a checkpoint that is there: {', '.join(map(str, steps)) or 'there is none'}"
            place = self.directory / LATEST
            damaged[place] = DamagedCheckpointError(
                str(place), got=repr(written), expected=expected
            )
        own = [step for step in self._own(steps) if newest is not None and step < newest]
        for path in map(self.path, reversed([*own, *([] if newest is None else [newest])])):
            if damaged and not takes_older:
                break
            try:
                verify(path)
                load(path)
                return path, damaged
            except DamagedCheckpointError as error:
                damaged[path] = error
        if not damaged:
            return None, {}
        error, *others = damaged.values()
        error.fix = " ".join(
            [*(f"{one.where}: got {one.got}." for one in others), self._advice(set(damaged))]
        )
        raise error

    def _leave_behind(
        self,
        path: Path | None,
        damaged: Mapping[Path, DamagedCheckpointError],
        config: TrainerConfig,
    ) -> None:
        """Say what was damaged, and keep it; mark what is no part of the past of a run that goes on from here, or move
        it aside where the configuration says from where."""
        is_ours = path is not None and path.resolve().parent == self.directory.resolve()
        begun = step_of(path) if path is not None and is_ours else 0
        for place, error in damaged.items():
            print(f"DAMAGED: {error.where}: got {error.got}, expected {error.expected}.")
            if place.name != LATEST:
                print(f"It is kept as {self._set_aside(place)}.")
        if damaged:
            print(
                f"The run goes on from {path}: what came after step {begun} is done again.",
                flush=True,
            )
        if config.val_only:
            return
        later = [step for step in self.steps() if step > begun]
        skipped = [path for step, path in quarantined_files(self.directory).items() if step > begun]
        if config.resume_mode == "auto":
            for step in later:
                (self.path(step) / _SUPERSEDED).touch()
        elif later or skipped:
            self._move_aside(later, skipped)
        if not begun:
            (self.directory / LATEST).unlink(missing_ok=True)
        elif self._written() != str(begun):
            write_atomically(self.directory / LATEST, f"{begun}\n")

    def _move_aside(self, later: list[int], skipped: list[Path]) -> None:
        """Keep checkpoints and skipped rows of a run that stood here before."""
        aside = self._aside_folder()
        for step in reversed(later):
            self.path(step).rename(aside / self.path(step).name)
        for path in skipped:
            path.rename(aside / path.name)
        if later:
            steps = ", ".join(map(str, later))
            print(
                f"Checkpoints of another run that stood here, steps {steps}, were moved to {aside}."
            )
        if skipped:
            print(f"The rows of steps that another run has skipped were moved to {aside}.")

    def _aside_folder(self) -> Path:
        """A new folder for checkpoints of a run that stood here before, with what they were made with."""
        places = (self.directory / f"superseded_{number}" for number in count(1))
        aside = next(place for place in places if not place.exists())
        aside.mkdir()
        for file in self.directory.glob("config*.yaml"):
            shutil.copy2(file, aside)
        return aside

    def _advice(self, damaged: set[Path]) -> str:
        """How to go on without the damaged ones: which other is whole."""
        for path in [self.path(step) for step in reversed(self.steps())]:
            if path in damaged:
                continue
            try:
                verify(path)
            except DamagedCheckpointError:
                continue
            named = as_override("trainer.resume_from_path", path)
            return f"Resume from {path} with trainer.resume_mode=resume_path {named}"
        return (
            f"No other checkpoint in {self.directory} is whole. Put the files back from a copy, or name a checkpoint "
            "elsewhere with trainer.resume_mode=resume_path trainer.resume_from_path, or begin anew with "
            "trainer.resume_mode=disable."
        )


def quarantined_files(directory: Path) -> dict[int, Path]:
    """The rows of steps that a run has skipped (quarantine.py): files, by step."""
    paths = (directory / "quarantine").glob("step_*.jsonl")
    matches = [(_SKIPPED.fullmatch(path.name), path) for path in paths]
    return {int(match[1]): path for match, path in matches if match}


def start_of(config: TrainerConfig) -> Path | None:
    """The checkpoint that a run goes on from if it is whole; None: the run begins anew."""
    if config.resume_mode == "resume_path":
        return Path(config.resume_from_path or "")
    own = Checkpoints(config.directory)
    newest = own.newest() if config.resume_mode == "auto" else None
    return None if newest is None else own.path(newest)


def step_of(checkpoint: Path) -> int:
    """The training step after which a checkpoint was written."""
    match = _COMPLETE.fullmatch(checkpoint.resolve().name)
    if match is None:
        raise CheckpointError(
            str(checkpoint), got="this name", expected="a folder named global_step_N"
        )
    return int(match[1])


def model_folder(path: str | Path) -> str | Path:
    """The Hugging Face folder that a run, a checkpoint, a role's part of one, or such a folder itself stands for.

    A path that does not exist is returned as it is: it may be the name of a model on a hub.

    Raises CheckpointError: a folder that is none of these.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        return path
    checkpoints = Checkpoints(folder)
    newest = checkpoints.newest()
    checkpoint = folder if newest is None else checkpoints.path(newest)
    for candidate in (folder, checkpoint / "actor", checkpoint / "actor" / HF_FOLDER):
        if (candidate / "config.json").is_file():
            return candidate
    expected = "a run, a checkpoint (global_step_N) or a Hugging Face folder"
    key = "actor_rollout_ref.actor.checkpoint.save_contents"
    fix = f"A checkpoint has the model when `model` or `hf_model` is in {key}."
    raise CheckpointError(
        str(folder), got="a folder without config.json", expected=expected, fix=fix
    )


def verify(checkpoint: Path) -> None:
    """Compare a checkpoint with its manifest.
    Raises DamagedCheckpointError: it is missing, or a file is missing, cut, changed or cannot be read; names it."""
    fix = "Take another checkpoint."
    file = manifest = checkpoint / MANIFEST
    try:
        _require_regular(manifest)
        files = json.loads(manifest.read_bytes())
        if files == {}:
            raise ValueError("it is empty")
        facts = [(name, int(each["bytes"]), str(each["sha256"])) for name, each in files.items()]
        if outside := [
            name for name in files if Path(name).is_absolute() or ".." in Path(name).parts
        ]:
            raise ValueError(f"it names {outside[0]}, which is outside")
        for name, size, digest in facts:
            file = checkpoint / name
            _require_regular(file)
            found = file.stat().st_size
            if found != size:
                raise DamagedCheckpointError(
                    str(file), got=f"{found} bytes", expected=f"{size} bytes", fix=fix
                )
            if _sha256(file) != digest:
                got = "other content than was written"
                raise DamagedCheckpointError(str(file), got=got, expected="its SHA-256", fix=fix)
    except FileNotFoundError as error:
        place, got, expected = file, "no such file", "one that was written"
        if file == manifest:
            place, got, expected = checkpoint, f"no {MANIFEST}", "a complete checkpoint"
        raise DamagedCheckpointError(str(place), got=got, expected=expected, fix=fix) from error
    except OSError as error:
        got = f"{type(error).__name__}: {error.strerror}"
        raise DamagedCheckpointError(
            str(file), got=got, expected="a file that can be read", fix=fix
        ) from error
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        got = f"no list of files ({type(error).__name__}: {error})"
        raise DamagedCheckpointError(
            str(manifest), got=got, expected="the list of files", fix=fix
        ) from error


def _require_regular(path: Path) -> None:
    """Refuse what is no regular file, such as a named pipe, which would be waited for without end."""
    if path.exists() and not path.is_file():
        expected = "a file that can be read"
        raise DamagedCheckpointError(
            str(path), got="no regular file", expected=expected, fix="Take another checkpoint."
        )


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file that is whole under its name, whatever happens; `mode` less what the process's umask takes."""
    aside = path.with_name(f"{_UNFINISHED}{path.name}")
    try:
        # JSON can hold half of a character as its escape, UTF-8 cannot.
        with open(
            aside,
            "w",
            encoding="utf-8",
            errors="backslashreplace",
            opener=partial(os.open, mode=mode),
        ) as file:
            file.write(text)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _delete(path: Path) -> None:
    """What is still open elsewhere stays for a while on NFS; the next save finds it again."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _reason(error: OSError | CheckpointError) -> str:
    if isinstance(error, CheckpointError):
        return f"{error.where}: {error.got}"
    return f"{type(error).__name__}: {error.strerror or error}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    """Ask the system to put a folder and what is in it on the disk."""
    for path in (
        [*directory.rglob("*"), directory]
        if directory.name.startswith(_UNFINISHED)
        else [directory]
    ):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
