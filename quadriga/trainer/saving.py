# SPDX-License-Identifier: Apache-2.0
"""Checkpoints while training goes on: begun between two steps, looked after at each, complete some steps later.

What the driver must remember for a resumed run to be the same run stands below: position, controller, random states.

    driver                                    workers
      start    -- save_checkpoint ---------->   copy; threads write
      step ...
      poll     -- checkpoint_written ------->   are the threads through?
        | thread: list, sync, read back,
        |         rename, delete older ones
      step ...
      poll     the thread is through: it is said

Consumes: the folder that the workers write. Waits for: nothing, except in `start` for the one before, and in `finish`.
Unblocked by: the threads of the workers, which call no collective. An error of any of them is raised by the next call.
"""

import io
import pickle
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quadriga.background import in_background
from quadriga.errors import CheckpointError, DamagedCheckpointError, QuadrigaError
from quadriga.observe.watchdog import waiting
from quadriga.trainer.checkpoint import Checkpoints

RUN_STATE = "state.pt"
_FIX = "Resume from another checkpoint."


@dataclass
class _Pending:
    """A checkpoint in the making; `completion` is there once the workers have written their parts."""

    step: int
    folder: Path
    begun: float
    completion: Future[None] | None = None


class CheckpointSaver:
    """Writes the checkpoints of a run, one at a time.
    `workers`: worker groups with `save_checkpoint` and `checkpoint_written`, by the name of their part.
    `report`: called with a sentence when a checkpoint is complete.
    `longest_s`: seconds from beginning to completion, the longest so far."""

    def __init__(
        self, checkpoints: Checkpoints, workers: Mapping[str, Any], report: Callable[[str], None]
    ) -> None:
        self.checkpoints, self.workers, self.report = checkpoints, workers, report
        self.longest_s = 0.0
        self._pending: _Pending | None = None

    def start(self, step: int, write_own_part: Callable[[Path], None]) -> None:
        """Begin the checkpoint of this step, after the one before is complete.

        `write_own_part` writes the driver's part into a folder.

        Raises CheckpointError: this one or the one before cannot be written; older ones are untouched.
        """
        self.finish()
        begun = time.monotonic()
        folder = self.checkpoints.begin(step)
        try:
            wait = waiting(f"the checkpoint of step {step} to be begun", emit=self.report)
            with self.checkpoints.guarded(step), wait:
                for worker in self.workers.values():
                    worker.save_checkpoint(folder.absolute())
                write_own_part(folder)
        except KeyboardInterrupt:
            self.checkpoints.abandon(step)
            raise
        self._pending = _Pending(step, folder, begun)

    def poll(self, *, wait: bool = False) -> bool:
        """Advance the checkpoint that is being written, to its end with `wait`. Returns whether none is left.
        Raises CheckpointError: it cannot be written."""
        pending = self._pending
        if pending is None:
            return True
        try:
            if pending.completion is None:
                with self.checkpoints.guarded(pending.step):
                    # All are called, not only until one is not through: those of several ranks go on together.
                    outputs = [
                        worker.checkpoint_written(wait=wait) for worker in self.workers.values()
                    ]
                    if not all(is_written for ranks in outputs for is_written in ranks):
                        return False
                    if missing := [
                        part for part in self.workers if not (pending.folder / part).is_dir()
                    ]:
                        got = "nothing here, though the worker has written it"
                        expected = "the same folder on every node"
                        fix = "Set trainer.default_local_dir to a disk that all nodes share."
                        raise CheckpointError(
                            str(pending.folder / missing[0]), got=got, expected=expected, fix=fix
                        )
                pending.completion = in_background(
                    lambda: self.checkpoints.complete(pending.step), "checkpoint"
                )
            if not wait and not pending.completion.done():
                return False
            pending.completion.result()
        # But not KeyboardInterrupt: the checkpoint goes on being written, and `settle` may still complete it.
        except Exception:
            self._pending = None
            raise
        self._pending = None
        self.longest_s = max(self.longest_s, time.monotonic() - pending.begun)
        self.report(f"checkpoint: {self.checkpoints.path(pending.step)}")
        return True

    def finish(self) -> None:
        """Wait until no checkpoint is in the making. Raises CheckpointError: it cannot be written."""
        if self._pending is not None:
            with waiting(
                f"the checkpoint of step {self._pending.step} to be written", emit=self.report
            ):
                self.poll(wait=True)

    def settle(self, *, can_ask: bool) -> None:
        """The run ends before its last step: complete the checkpoint if the workers can still be called (`can_ask`) or
        have written their parts, else remove it."""
        pending = self._pending
        if pending is None:
            return
        try:
            if can_ask or pending.completion is not None:
                self.finish()
                return
            self.checkpoints.abandon(pending.step)
            print(f"The checkpoint of step {pending.step} was not yet written, and is none.")
        except QuadrigaError as error:
            print(error)
        finally:
            self._pending = None


def save_run_state(
    directory: Path, state: dict[str, Any], *, with_random_states: bool = True
) -> None:
    """Write the driver's part of a checkpoint into `directory/trainer`, with this process's random states if wanted.
    Raises CheckpointError: a user's data set or sampler has a state that could not be read again."""
    target = directory / "trainer"
    target.mkdir(parents=True, exist_ok=True)
    # Through memory: torch reports a full disk in its own words, Python as what it is.
    content = io.BytesIO()
    torch.save(state | ({"random": random_states()} if with_random_states else {}), content)
    _parse_state(content.getvalue(), target / RUN_STATE)
    (target / RUN_STATE).write_bytes(content.getvalue())


def load_run_state(directory: Path, step: int) -> dict[str, Any]:
    """Read what `save_run_state` wrote after a step; "random" are the random states, where they were wanted.
    Raises DamagedCheckpointError: the file cannot be read, or is that of another step."""
    path = directory / "trainer" / RUN_STATE
    try:
        content = path.read_bytes()
    except OSError as error:
        got = error.strerror or str(error)
        raise DamagedCheckpointError(
            str(path), got=got, expected="the state of a run", fix=_FIX
        ) from error
    state = _parse_state(content, path)
    found = state.get("step") if isinstance(state, dict) else None
    if found != step:
        # Whole folders were swapped: each agrees with its own manifest.
        got = f"the state after step {found}"
        raise DamagedCheckpointError(
            str(path), got=got, expected=f"that after step {step}", fix=_FIX
        )
    return state


def random_states() -> dict[str, Any]:
    """Those of Python, numpy and torch in this process."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        # Of the device that computes here, if one does: a driver of workers must not take hold of theirs.
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
    }


def restore_random_states(saved: dict[str, Any]) -> None:
    """Put back what `random_states` gave."""
    random.setstate(saved["python"])
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(saved["cuda"][0])


def _parse_state(content: bytes, path: Path) -> dict[str, Any]:
    """Without running code from the file, so of plain values and tensors only."""
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except (EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        got = str(error).strip().partition("\n")[0] or type(error).__name__
        expected = "the state of a run, in numbers, texts, lists, dictionaries and tensors"
        fix = f"{_FIX} If the error comes at a save, it is the state_dict of your own data set or sampler."
        raise DamagedCheckpointError(str(path), got=got, expected=expected, fix=fix) from error
