# SPDX-License-Identifier: Apache-2.0
"""Checkpoints while training goes on: begun between two steps, looked after at each, complete some steps later.

    driver                                    workers
      start    -- save_checkpoint ---------->   copy; threads write
      step ...
      poll     -- checkpoint_written ------->   are the threads through?
        | thread: list, sync, read back,
        |         rename, delete older ones
      step ...
      poll     the thread is through: it is said

Consumes: the folder that the workers write. Waits for: nobody, except in `start` for the one before, and in `finish`.
Unblocked by: the threads of the workers, which call no collective. An error of any of them is raised by the next call.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.background import in_background, result_of
from quadriga.errors import QuadrigaError
from quadriga.observe.watchdog import waiting
from quadriga.trainer.checkpoint import Checkpoints, require_parts


@dataclass
class _Pending:
    """A checkpoint in the making; `completion` is there once the workers have written their parts."""

    step: int
    folder: Path
    begun: float
    completion: Future[None] | None = None


class CheckpointSaver:
    """Writes the checkpoints of a run, one at a time.

    Args:
        checkpoints: on disk.
        workers: by the name of their part: worker groups with `save_checkpoint` and `checkpoint_written`.
        tell: is told of each that is complete.

    Attributes:
        longest_s: that one took so far, from its beginning until it was complete.
    """

    def __init__(self, checkpoints: Checkpoints, workers: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        self.checkpoints, self.workers, self.tell = checkpoints, workers, tell
        self.longest_s = 0.0
        self._pending: _Pending | None = None

    def start(self, step: int, write_own_part: Callable[[Path], None]) -> None:
        """Begin the checkpoint of this step, after the one before is complete.

        Args:
            step: that was just finished.
            write_own_part: writes the driver's part into a folder.

        Raises:
            CheckpointError: this one or the one before cannot be written; older ones are untouched.
        """
        self.finish()
        begun = time.monotonic()
        folder = self.checkpoints.begin(step)
        try:
            with self.checkpoints.guarded(step):
                for worker in self.workers.values():
                    worker.save_checkpoint(folder.absolute())
                write_own_part(folder)
        except KeyboardInterrupt:
            self.checkpoints.abandon(step)
            raise
        self._pending = _Pending(step, folder, begun)

    def poll(self, *, wait: bool = False) -> bool:
        """Bring the checkpoint in the making further, if there is one. Returns whether there is none.

        Args:
            wait: until it is complete.

        Raises:
            CheckpointError: it cannot be written.
        """
        pending = self._pending
        if pending is None:
            return True
        try:
            is_complete = self._advance(pending, wait)
        # But not KeyboardInterrupt: the checkpoint goes on being written, and `settle` may still complete it.
        except Exception:
            self._pending = None
            raise
        if is_complete:
            self._pending = None
            self.longest_s = max(self.longest_s, time.monotonic() - pending.begun)
            self.tell(f"checkpoint: {self.checkpoints.path(pending.step)}")
        return is_complete

    def finish(self) -> None:
        """Wait until no checkpoint is in the making.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._pending is not None:
            with waiting(f"the checkpoint of step {self._pending.step} to be written", emit=self.tell):
                self.poll(wait=True)

    def settle(self, *, can_ask: bool) -> None:
        """The run ends before its time: complete what can be, and say what could not.

        Args:
            can_ask: whether the workers will answer.
        """
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

    def _advance(self, pending: _Pending, is_awaited: bool) -> bool:
        if pending.completion is None:
            with self.checkpoints.guarded(pending.step):
                # Each is asked, and not only until one says no: those of several ranks go on together.
                outputs = [worker.checkpoint_written(wait=is_awaited) for worker in self.workers.values()]
                if not all(is_written for ranks in outputs for is_written in ranks):
                    return False
                require_parts(pending.folder, self.workers)
            pending.completion = in_background(lambda: self.checkpoints.complete(pending.step), "checkpoint")
        if not is_awaited and not pending.completion.done():
            return False
        result_of(pending.completion)
        return True
