# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by the clock, of runs that were not told when to write them: `trainer.save_minutes`.

Nobody asked for these checkpoints, so they must not cost a run much, and never end it. One is put
off while the disk has no room for it, or while checkpoints would take more than a small share of
the time so far (`MAX_SHARE_OF_TIME`). One that cannot be written is reported, and the run goes on.

    begun ──── workers write ──── last file       complete: list, sync, read back, rename ──── done
          <─────── counted ──────>          ....  <─────────────────── counted ──────────────>

The time between them does not count: the workers have finished, and the driver is in a step.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quadriga.errors import CheckpointError
from quadriga.trainer.checkpoint import MANIFEST, Checkpoints
from quadriga.trainer.saving import CheckpointSaver, PendingCheckpoint

NUM_KEPT = 2  # newest checkpoints that stay on disk, unless `trainer.max_ckpt_to_keep` is set
MAX_SHARE_OF_TIME = 0.05
ASSUMED_BYTES_PER_S = 500e6  # speed of the first checkpoint, before one was measured
# Free space beyond the tensors: tokenizer, manifests, and files that the run writes meanwhile.
SPARE_BYTES = 64 << 20
_GB = 1e9


class TimedSaver(CheckpointSaver):
    """Writes checkpoints by the clock, where disk and time allow. Their failure is not raised.

    Args:
        checkpoints: where they are written.
        workers: worker groups as for `CheckpointSaver`, with `checkpoint_bytes`.
        report: called with a sentence when a checkpoint is complete, put off or failed.
        period_s: seconds between the starts of two checkpoints.
        clock: returns seconds, from any origin.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        workers: Mapping[str, Any],
        report: Callable[[str], None],
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(checkpoints, workers, report)
        self.period_s = period_s
        self._clock = clock
        self._run_start_s = clock()
        self._last_start_s = self._run_start_s
        self._spent_s = 0.0  # sum over the checkpoints so far
        self._longest_work_s = 0.0
        self._num_bytes: int | None = None
        self._reported: set[str] = set()

    def start_where_due(
        self, step: int, write_own_part: Callable[[Path], None], *, is_due: bool, is_last: bool
    ) -> None:
        """Start the checkpoint of a step if it is time for one and the disk has room for it.

        With `is_last` the time does not matter.
        """
        if is_last:
            # What is lost now is not made up for by a later checkpoint.
            self._reported.clear()
        else:
            is_early = self._clock() - self._last_start_s < self.period_s
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
        self.start(step, write_own_part)

    def _obstacle(self, *, is_last: bool) -> tuple[str, str]:
        """Why no checkpoint can be started now: its kind, and in words; empty if one can."""
        directory = self.checkpoints.directory
        if self._num_bytes is None:
            sizes: dict[tuple[str, str], int] = {}
            for part, worker in self.workers.items():
                # Ranks report tensors that they share under the same name.
                for sizes_of_rank in worker.checkpoint_bytes():
                    sizes |= {(part, name): size for name, size in sizes_of_rank.items()}
            self._num_bytes = sum(sizes.values())
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

    def _report_once(self, kind: str, sentence: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self.report(sentence)

    def start(self, step: int, write_own_part: Callable[[Path], None]) -> None:
        with self._tolerated():
            super().start(step, write_own_part)

    def poll(self, *, wait: bool = False) -> bool:
        with self._tolerated():
            return super().poll(wait=wait)
        # It has failed.
        return True

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Context manager: report a checkpoint that cannot be written, instead of raising."""
        try:
            yield
        except CheckpointError as error:
            self._report_once(error.got, f"{error} The run goes on without this checkpoint.")

    def complete(self, pending: PendingCheckpoint) -> None:
        start_s = time.monotonic()
        super().complete(pending)
        written_at = 0.0
        for path in self.checkpoints.path(pending.step).rglob("*"):
            if path.is_file() and path.name != MANIFEST:
                written_at = max(written_at, path.stat().st_mtime)
        # Another machine, whose clock may differ, sets the times of files on a network disk.
        until_start_s = start_s - pending.begun
        writing_s = min(max(written_at - pending.begun_at, 0.0), until_start_s)
        work_s = writing_s + time.monotonic() - start_s
        self._spent_s += work_s
        self._longest_work_s = max(self._longest_work_s, work_s)
