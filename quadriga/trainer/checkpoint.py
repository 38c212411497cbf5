# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: written aside, listed, read back, renamed, and only then trusted.

    DIRECTORY/
      config.yaml                           the resolved configuration
      latest_checkpointed_iteration.txt     the step of the one written last
      global_step_20/
        manifest.json                       size and SHA-256 of every file below
        trainer/                            step, loader position, random states
        actor/  critic/                     one folder per role that learns: see workers/checkpoint.py

A folder named global_step_N is complete: it got this name by a rename after its last byte was on disk, and loses
it by another before its first byte is deleted. Whatever a killed run left behind has another name and is swept away
by the next save.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quadriga.config.trainer import TrainerConfig
from quadriga.errors import CheckpointError
from quadriga.workers.checkpoint import HF_FOLDER

MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
CONFIGURATION = "config.yaml"
_COMPLETE = re.compile(r"global_step_(\d+)")
_UNFINISHED = ".unfinished_"


class Checkpoints:
    """The checkpoints below a run's directory, of which the newest `max_to_keep` stay (None: all).

    `last_written` is the step of the checkpoint that this object wrote last.
    """

    def __init__(self, directory: Path, max_to_keep: int | None = None) -> None:
        self.directory, self.max_to_keep = directory, max_to_keep
        self.last_written: int | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first, as the disk has them."""
        found = (_COMPLETE.fullmatch(path.name) for path in self.directory.glob("global_step_*") if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> int | None:
        """The step of the checkpoint that was written last, if there is one.

        It need not be the highest: a run that began anew, or from an earlier step, leaves later ones of its
        predecessor where they are.
        """
        steps = self.steps()
        file = self.directory / LATEST
        written = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        return int(written) if written in map(str, steps) else max(steps, default=None)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self.directory / f"global_step_{step}"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into; `complete` makes one of it.

        Raises:
            CheckpointError: it cannot be made.
        """
        with self.guarded(step):
            for leftover in self.directory.glob(f"{_UNFINISHED}*"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()
            self._aside(step).mkdir(parents=True)
        return self._aside(step)

    def complete(self, step: int) -> None:
        """All is written: list it, put it on the disk, read it back, and only then name it and delete older ones.

        Raises:
            CheckpointError: something cannot be written, or is not what was written; older ones are untouched.
        """
        aside = self._aside(step)
        with self.guarded(step):
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            facts = {
                path.relative_to(aside).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
                for path in files
            }
            (aside / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            _sync(aside)
            verify(aside)
            if self.path(step).exists():
                self._discard(self.path(step))
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

        Raises:
            CheckpointError: it cannot be written, say because the disk is full; older checkpoints are untouched.
        """
        try:
            yield
        except (OSError, CheckpointError) as error:
            self.abandon(step)
            left = self.newest()
            rest = "There is no earlier checkpoint." if left is None else f"Step {left} is still there to resume from."
            raise CheckpointError(
                f"checkpoint of step {step} in {self.directory}",
                got=_reason(error),
                expected="room and permission to write it",
                fix=f"Free space or set trainer.default_local_dir. {rest}",
            ) from error
        except Exception:
            self.abandon(step)
            raise

    def _aside(self, step: int) -> Path:
        return self.directory / f"{_UNFINISHED}{step}_{os.getpid()}"

    def _discard(self, checkpoint: Path) -> None:
        """Take its name first: half a checkpoint must not look like a whole one."""
        aside = self.directory / f"{_UNFINISHED}{checkpoint.name}_{os.getpid()}"
        checkpoint.rename(aside)
        shutil.rmtree(aside)

    def to_resume(self, config: TrainerConfig) -> Path | None:
        """The checkpoint that a run with this configuration goes on from, verified; None to start anew."""
        if config.resume_mode == "disable":
            return None
        if config.resume_mode == "resume_path":
            path = Path(config.resume_from_path or "")
        else:
            step = self.newest()
            if step is None:
                return None
            path = self.path(step)
        verify(path)
        return path


def step_of(checkpoint: Path) -> int:
    """The training step after which a checkpoint was written."""
    match = _COMPLETE.fullmatch(checkpoint.resolve().name)
    if match is None:
        raise CheckpointError(str(checkpoint), got="this name", expected="a folder named global_step_N")
    return int(match[1])


def model_folder(path: str | Path) -> str | Path:
    """The Hugging Face folder that a run, a checkpoint, a role's part of one, or such a folder itself stands for.

    A path that does not exist is returned as it is: it may be the name of a model on a hub.

    Raises:
        CheckpointError: a folder that is none of these.
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
    raise CheckpointError(
        str(folder),
        got="a folder without config.json",
        expected="a run, a checkpoint (global_step_N) or a Hugging Face folder",
        fix="A checkpoint has the model when `model` or `hf_model` is in "
        "actor_rollout_ref.actor.checkpoint.save_contents.",
    )


def verify(checkpoint: Path) -> None:
    """Compare a checkpoint with its manifest.

    Raises:
        CheckpointError: it is missing, or a file is missing, cut or damaged; names it.
    """
    fix = "Resume from another checkpoint with trainer.resume_mode=resume_path trainer.resume_from_path=..."
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(str(checkpoint), got=f"no {MANIFEST}", expected="a complete checkpoint", fix=fix)
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError as error:
        got = f"no JSON ({error})"
        raise CheckpointError(str(manifest), got=got, expected="the list of files", fix=fix) from error
    for name, facts in files.items():
        file, expected = checkpoint / name, f"{facts['bytes']} bytes"
        if not file.is_file():
            raise CheckpointError(str(file), got="no such file", expected=expected, fix=fix)
        if (size := file.stat().st_size) != facts["bytes"]:
            raise CheckpointError(str(file), got=f"{size} bytes", expected=expected, fix=fix)
        if _sha256(file) != facts["sha256"]:
            raise CheckpointError(str(file), got="other content than was written", expected="its SHA-256", fix=fix)


def write_configuration(directory: Path, text: str) -> None:
    """Write config.yaml, and so find out before an hour of training that its result has nowhere to go.

    Raises:
        CheckpointError: nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / CONFIGURATION, text)
    except OSError as error:
        raise CheckpointError(
            f"trainer.default_local_dir={directory}: got {_reason(error)}, expected a directory that can be written",
            fix="Free space or set trainer.default_local_dir to another one.",
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is whole under its name, whatever happens."""
    aside = path.with_name(f"{_UNFINISHED}{path.name}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _reason(error: OSError | CheckpointError) -> str:
    if isinstance(error, CheckpointError):
        return f"{error.where}: {error.got}"
    return f"{type(error).__name__}: {error.strerror or error}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    """Ask the system to put a folder and what is in it on the disk."""
    for path in [*directory.rglob("*"), directory] if directory.name.startswith(_UNFINISHED) else [directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
