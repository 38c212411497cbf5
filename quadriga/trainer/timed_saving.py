# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints by the clock for runs without `trainer.save_freq`: `trainer.save_minutes`.

The user has not asked for these checkpoints, so they must cost little and never end a run. One is
put off while the disk has no room for it, or while checkpoints would take more than a small share
of the time so far (`MAX_SHARE_OF_TIME`). One that cannot be written is reported, and the run goes on.

    begun ──── workers write ──── last file       complete: list, sync, read back, rename ──── done
          <─────── counted ──────>          ....  <─────────────────── counted ──────────────>

The time in between does not count: the workers have finished, and the driver is in a step.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quadriga.config import Config, saves_by_time
from quadriga.errors import CheckpointError
from quadriga.trainer.checkpoint import MANIFEST, Checkpoints
from quadriga.trainer.saving import CheckpointSaver, PendingCheckpoint

NUM_KEPT = 2  # newest checkpoints that stay on disk, unless `trainer.max_ckpt_to_keep` is set
MAX_SHARE_OF_TIME = 0.05
ASSUMED_BYTES_PER_S = 500e6  # assumed speed until a checkpoint has been measured
# Space for what is not in the tensors: tokenizer, manifests, and other files of the run.
SPARE_BYTES = 64 << 20
_GB = 1e9


def run_checkpoints(config: Config) -> Checkpoints:
    """Checkpoints of a run, written by steps or, if `saves_by_time`, by the clock."""
    trainer = config.trainer
    if saves_by_time(config):
        num_kept = trainer.max_ckpt_to_keep or NUM_KEPT
        return Checkpoints(trainer.directory, num_kept, is_by_time=True)
    return Checkpoints(trainer.directory, trainer.max_ckpt_to_keep)


class TimedSaver(CheckpointSaver):
    """Writes checkpoints by the clock if disk and time allow; failures are reported, not raised.

    Args:
        checkpoints: where they are written.
        workers: worker groups as for `CheckpointSaver`, with `checkpoint_bytes`.
        write_own_part: writes the driver's part into a folder.
        report: called with a sentence when a checkpoint is complete, is put off or has failed.
        period_s: seconds between the starts of two checkpoints, at least.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        workers: Mapping[str, Any],
        write_own_part: Callable[[Path], None],
        report: Callable[[str], None],
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(checkpoints, workers, write_own_part, report)
        self.period_s = period_s
        self._clock = clock
        self._run_start_s = clock()
        self._last_start_s = self._run_start_s
        self._spent_s = 0.0  # counted time of all checkpoints so far
        self._longest_work_s = 0.0  # counted time of the slowest checkpoint
        self._num_bytes: int | None = None  # size of a checkpoint; None until it is first needed
        self._reported: set[str] = set()  # kinds of messages that are not reported again

    def start_where_due(self, step: int, *, is_due: bool, is_last: bool) -> None:
        """Start the checkpoint of a step if it is time for one and the disk has room for it.

        Args:
            step: number of the step.
            is_due: whether `trainer.save_freq` asks for a checkpoint. Not used: the clock decides.
            is_last: whether the run may end with this step. Then the time does not matter.
        """
        if is_last:
            # No later checkpoint makes up for this one. So its failure is reported even if one of the
            # same kind was.
            self._reported.clear()
        else:
            is_early = self._clock() - self._last_start_s < self.period_s
            # `poll` returns False while the previous checkpoint is being written.
            if is_early or not self.poll():
                return
        kind, obstacle = self._obstacle(is_last=is_last)
        if obstacle:
            verb = "not written" if is_last else "put off"
            self._report_once(
                f"{verb}: {kind}", f"The checkpoint of step {step} is {verb}: {obstacle}"
            )
            return
        self._last_start_s = self._clock()
        self.start(step)

    def _obstacle(self, *, is_last: bool) -> tuple[str, str]:
        """Why no checkpoint can be started now.

        Returns:
            The kind of the obstacle, and a description; both are "" if there is none.
        """
        directory = self.checkpoints.directory
        if self._num_bytes is None:
            self._num_bytes = self._checkpoint_bytes()
        try:
            free_bytes = shutil.disk_usage(directory).free
        except OSError as error:
            return "disk", f"{directory}: {error.strerror or error}."
        needed_bytes = self._num_bytes + SPARE_BYTES
        if free_bytes < needed_bytes:
            return "room", (
                f"it takes {needed_bytes / _GB:.2f} GB, and the disk of {directory} has "
                f"{free_bytes / _GB:.2f} GB left. Free space."
            )

        expected_s = self._longest_work_s or self._num_bytes / ASSUMED_BYTES_PER_S
        run_s = self._clock() - self._run_start_s
        if not is_last and self._spent_s + expected_s > MAX_SHARE_OF_TIME * run_s:
            return "time", (
                f"it takes about {expected_s:.1f} s, and checkpoints may take "
                f"{MAX_SHARE_OF_TIME:.0%} of the run, which is {run_s:.0f} s old. "
                "trainer.save_freq=N writes one every N steps regardless."
            )
        return "", ""

    def _checkpoint_bytes(self) -> int:
        """Size of the tensors of a checkpoint."""
        num_bytes = 0
        for worker in self.workers.values():
            # Ranks report tensors that they share under the same name.
            sizes = {}
            for sizes_of_rank in worker.checkpoint_bytes():
                sizes |= sizes_of_rank
            num_bytes += sum(sizes.values())
        return num_bytes

    def _report_once(self, kind: str, sentence: str) -> None:
        """Report a sentence, unless one of the same kind has been reported."""
        if kind not in self._reported:
            self._reported.add(kind)
            self.report(sentence)

    def start(self, step: int) -> None:
        """Start a checkpoint. An error is reported instead of raised."""
        with self._tolerated():
            super().start(step)

    def poll(self, *, wait: bool = False) -> bool:
        """Check how far the checkpoint is. An error is reported instead of raised."""
        with self._tolerated():
            return super().poll(wait=wait)
        # The checkpoint has failed, so none is being written any more.
        return True

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Context manager: report a checkpoint that cannot be written, instead of raising."""
        try:
            yield
        except CheckpointError as error:
            # The cause is the kind: a disk that stays full is reported once.
            self._report_once(error.got, f"{error} The run goes on without this checkpoint.")

    def complete(self, pending: PendingCheckpoint) -> None:
        """Complete a checkpoint, and count the time that it took."""
        start_s = time.monotonic()
        super().complete(pending)
        # When the workers had written their last file, in seconds since 1970.
        written_at = 0.0
        for path in self.checkpoints.path(pending.step).rglob("*"):
            if path.is_file() and path.name != MANIFEST:
                written_at = max(written_at, path.stat().st_mtime)
        # Files on a network disk have the times of another machine, whose clock may differ. So the
        # time of writing is limited to what is possible.
        until_start_s = start_s - pending.begun
        writing_s = min(max(written_at - pending.begun_at, 0.0), until_start_s)
        work_s = writing_s + time.monotonic() - start_s
        self._spent_s += work_s
        self._longest_work_s = max(self._longest_work_s, work_s)
