# SPDX-License-Identifier: Apache-2.0
"""Samples that are graded one by one, each as soon as it is written, while the engine writes the others.

    conversation ── await grade(row) ──> a thread takes a free pool of one process ── grades ──> the conversation ends
    conversation ── await grade(row) ──> the next thread ...                    at most `num_workers` at the same time

Consumes: rows, from tasks of one event loop or several. Waits for: a free process, and at most `timeout_s` for it to
answer. Unblocked by: its answer, its end, or the time limit; a sample that hangs or crashes costs its own process only.
"""

from asyncio import get_running_loop
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from quadriga.rewards.custom import ScoreFunction
from quadriga.rewards.outcome import Outcome
from quadriga.rewards.sandbox import GradingPool


class SingleGrader:
    """Grades samples that come at any time, several side by side.

    Its processes start with the first samples.

    Args:
        function: the score function, which grades one sample a call.
        num_workers: samples that are graded at the same time.
        timeout_s: seconds for one.
    """

    def __init__(self, function: ScoreFunction, *, num_workers: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pools = [GradingPool(function, num_workers=1) for _ in range(num_workers)]
        self._free: SimpleQueue[GradingPool] = SimpleQueue()
        for pool in reversed(self._pools):
            self._free.put(pool)
        # As many threads as pools: whoever runs finds one that is free.
        self._threads = ThreadPoolExecutor(num_workers, "grading")

    async def grade(self, row: dict[str, Any]) -> Outcome:
        """The outcome of one sample; see `GradingPool.grade`."""
        return await get_running_loop().run_in_executor(self._threads, self._grade, row)

    def close(self) -> None:
        """Kill all processes; samples in work raise RewardError where they are awaited."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools:
            pool.close()

    def _grade(self, row: dict[str, Any]) -> Outcome:
        pool = self._free.get()
        try:
            (outcome,) = pool.grade([row], timeout_s=self._timeout_s)
            return outcome
        finally:
            self._free.put(pool)
