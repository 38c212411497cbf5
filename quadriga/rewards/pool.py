# SPDX-License-Identifier: Apache-2.0
"""Grading in separate processes, with a time limit for each sample and an end for all that a grader starts.

    caller     begin(samples) ──> Round ── does something else ── result()
    a thread       └── leads one process: hands it a chunk of samples, waits for one outcome after the other
    a process          └── grades the samples of a chunk in turn (process.py)

    Round.result   waits for the end of the round; unblocked by the last outcome, too many failures, or `cancel`
    a thread       waits for the next outcome; unblocked by it, by the end of its pipe, or by the time limit of a sample

The first sample of a chunk without an outcome is the one in work, and its time began with the outcome before it. So a
process that hangs, dies or is killed costs that one sample; those behind it go back to the queue. A process that awaits
many samples at a time does not say which of them it was: they are graded again, few at a time and at last alone.
"""

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import count
from typing import NamedTuple

from quadriga.errors import RewardError
from quadriga.rewards.outcome import UNGRADABLE, Outcome, failure
from quadriga.rewards.process import (
    LATE,
    LOADING_LIMIT_S,
    READY,
    Arguments,
    GradingProcess,
    Printed,
)
from quadriga.rewards.scoring import ScoreFunction

CHUNK_S = 0.01  # a chunk holds about this much work: quick samples travel together, slow ones alone
MAX_CHUNK = 64
_BLOCKED_S = 5.0  # a process that awaits samples is blocked when it is this late with an outcome


class Round:
    """Samples that are being graded, and what has become of them. Threads may share it; `done` tells its end.
    `num_samples`: how many.
    `max_failures`: end once more than this many samples have failed; the rest is "skipped". None: never.
    `timeout_s`: limit of one call in a process; None where it is not processes that grade."""

    def __init__(
        self, num_samples: int, max_failures: int | None = None, timeout_s: float | None = None
    ) -> None:
        self._outcomes: list[Outcome | None] = [None] * num_samples
        self.done: Future[None] = Future()
        # So that an event loop does not cancel it: it is resolved here.
        self.done.set_running_or_notify_cancel()
        # The lock guards all of it, and which processes have samples of the round.
        self.lock, self.processes, self.timeout_s = (
            threading.RLock(),
            set[GradingProcess](),
            timeout_s,
        )
        self._max_failures = math.inf if max_failures is None else max_failures
        self._num_left, self._num_failed = num_samples, 0
        if not num_samples:
            self.end()

    def record(self, key: int, outcome: Outcome) -> None:
        """What has become of the sample at place `key`; the last one ends the round, and so do too many failures."""
        with self.lock:
            if self.done.done():
                return
            self._outcomes[key] = outcome
            self._num_left -= 1
            self._num_failed += bool(outcome.error)
            if not self._num_left:
                self.done.set_result(None)
            elif self._num_failed > self._max_failures:
                self.end()

    def leave(self, process: GradingProcess) -> None:
        """The process has no samples of the round any more."""
        with self.lock:
            self.processes.discard(process)

    def end(self, error: BaseException | None = None) -> None:
        """Grade no more, and kill the processes that have samples. The error is raised where one waits for outcomes."""
        with self.lock:
            if self.done.done():
                return
            for process in self.processes:
                process.kill()
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)

    def cancel(self) -> None:
        """End the round: when this returns, its processes have ended. Waiting for its outcomes is an error then."""
        self.end(RewardError("grading", got="cancel()", expected="samples to be graded first"))
        while self.processes:
            time.sleep(0.001)

    def result(self) -> list[Outcome]:
        """Wait for the outcomes, in order: those of samples that were not graded any more are "skipped".
        Raises QuadrigaError: the score function cannot be loaded, the pool was closed, or the round cancelled."""
        try:
            self.done.result()
        except BaseException:
            # Ctrl-C above all: what is in work then is of no use.
            self.cancel()
            raise
        skipped = failure(
            "skipped", f"not graded, since {self._num_failed} other samples had failed"
        )
        return [outcome or skipped for outcome in self._outcomes]

    def progress(self) -> str:
        """What is done, for a report on a long wait."""
        with self.lock:
            busy = (
                []
                if self.done.done()
                else [time.monotonic() - process.since for process in self.processes]
            )
        slowest = (
            f", the longest for {max(busy):.0f} s (limit {self.timeout_s:g} s)" if busy else ""
        )
        in_work = "" if self.timeout_s is None else f", {len(busy)} in work{slowest}"
        num_samples = len(self._outcomes)
        return f"{num_samples - self._num_left} of {num_samples} graded, {self._num_failed} failed{in_work}"


class _Call(NamedTuple):
    """One call of the score function, for one sample, or for all where it grades batches; and of a coroutine function,
    how many may be under way in its process, and since when it is. `ungradable`: why the response is graded as an empty
    one."""

    round: Round
    keys: Sequence[int]
    arguments: Arguments
    at_most: int = MAX_CHUNK
    since: float = 0.0
    ungradable: str = ""

    def record(self, outcome: Outcome | list[Outcome]) -> None:
        """What has become of it; where one call for all hung or crashed its process, that is the outcome of each."""
        outcomes = outcome if isinstance(outcome, list) else [outcome] * len(self.keys)
        for key, one in zip(self.keys, outcomes, strict=True):
            if self.ungradable and not one.error:
                one = one._replace(extra={**one.extra, UNGRADABLE: self.ungradable})
            self.round.record(key, one)


class GradingPool(AbstractContextManager["GradingPool"]):
    """Grades samples in `num_workers` separate processes, which are started when first needed and kept."""

    def __init__(self, function: ScoreFunction, *, num_workers: int) -> None:
        self._function, self._num_workers = function, num_workers
        self._threads = ThreadPoolExecutor(num_workers, "grading")
        self._lock = threading.Lock()
        self._queue: deque[_Call] = deque()
        self._processes: set[GradingProcess] = set()
        self._printed = Printed()
        self._idle: list[GradingProcess] = []
        self._numbers = count()
        self._item_s = CHUNK_S
        self._is_closed = False
        self.accepted = frozenset[
            str
        ]()  # names of arguments of the score function, once it was started
        # Without close(), the processes end with the pool or with the interpreter, whichever is first.
        self._finalizer = weakref.finalize(self, _stop_all, self._processes, os.getpid())

    def start(self) -> None:
        """Start one process, to learn early that it can load the score function; ConfigError where it cannot."""
        process = self._process()
        self.accepted = process.accepted
        self._idle.append(process)

    def begin(
        self, rows: Sequence[Arguments], *, timeout_s: float, max_failures: int | None = None
    ) -> Round:
        """Begin to grade while the caller does something else.
        Raises RewardError: the pool is closed.
        `rows`: keyword arguments for the score function, one dict a sample; a function that grades batches gets all in
        one call.
        `timeout_s`: seconds for each sample; one call for all has so many for each of them together.
        `max_failures`: end once more than this many samples have failed. None: never."""
        if self._is_closed:
            raise RewardError(
                "grading pool", got="a sample", expected="none, since the pool is closed"
            )
        keys = range(len(rows))
        if self._function.is_batch and rows:
            round_ = Round(len(rows), max_failures, timeout_s * len(rows))
            calls = [_Call(round_, keys, self._function.batch_of(rows))]
        else:
            round_ = Round(len(rows), max_failures, timeout_s)
            calls = [_Call(round_, (key,), rows[key]) for key in keys]
        with self._lock:
            self._queue.extend(calls)
        for _ in calls[: self._num_workers]:
            self._threads.submit(self._lead)
        return round_

    def grade(
        self, rows: Sequence[Arguments], *, timeout_s: float, max_failures: int | None = None
    ) -> list[Outcome]:
        """The outcome of each sample, in order; arguments and errors as for `begin`."""
        return self.begin(rows, timeout_s=timeout_s, max_failures=max_failures).result()

    def close(self) -> None:
        """Kill all processes; rounds under way in other threads raise RewardError."""
        with self._lock:
            self._is_closed = True
        for process in list(self._processes):
            process.kill()
        self._threads.shutdown()
        for process in list(self._processes):
            self._remove(process)
        self._printed.close()
        self._fail(
            RewardError("grading pool", got="close()", expected="samples to be graded first")
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lead(self) -> None:
        """One thread: has a process grade samples until there are no more."""
        process: GradingProcess | None = None
        try:
            while self._has_calls():
                process = process or self._process()
                self._grade(process)
                process = None if process.is_ended else process
        except Exception as error:
            # The score function cannot be loaded, or a sample cannot be sent: no other will fare better.
            if process is not None:
                self._remove(process)
            self._fail(error)
            raise
        if process is not None:
            self._idle.append(process)

    def _has_calls(self) -> bool:
        with self._lock:
            while self._queue and self._queue[0].round.done.done():
                self._queue.popleft()
            return bool(self._queue) and not self._is_closed

    def _grade(self, process: GradingProcess) -> None:
        """Have a process grade samples of any rounds, until the queue is empty or the process has ended."""
        under_way: dict[int, _Call] = {}
        end: Outcome | None = None
        try:
            while not self._is_closed and self._send_more(process, under_way):
                oldest = next(iter(under_way.values()))
                found = process.receive(oldest.round.timeout_s)
                if isinstance(found, Outcome):
                    end = None if found.kind == "skipped" else found
                    break
                if found is not None:
                    call = under_way.pop(found[0])
                    call.record(found[1])
                    if all(other.round is not call.round for other in under_way.values()):
                        call.round.leave(process)
                    self._item_s += 0.1 * (
                        max(time.monotonic() - process.since, 1e-6) - self._item_s
                    )
                elif (
                    time.monotonic()
                    > max(process.since, oldest.since) + oldest.round.timeout_s + _BLOCKED_S
                ):
                    process.stop()
                    end = failure(
                        "timeout",
                        f"{LATE.format(oldest.round.timeout_s)}: it blocks its event loop",
                    )
                    break
        finally:
            if process.is_ended:
                self._remove(process)
            left = list(under_way.values())
            at_most = MAX_CHUNK
            if end is not None and (len(left) == 1 or not process.is_async):
                call = left.pop(0)
                if end.kind == "ungradable" and not call.ungradable:
                    # An empty response gets what a wrong one gets, whatever the grader's options are.
                    arguments = {**call.arguments, "solution_str": ""}
                    left.insert(0, call._replace(arguments=arguments, ungradable=end.error))
                else:
                    call.record(end)
            elif end is not None:
                at_most = max(1, len(left) // 8)
            with self._lock:
                self._queue.extendleft(
                    call._replace(at_most=min(call.at_most, at_most)) for call in reversed(left)
                )
            for call in under_way.values():
                call.round.leave(process)

    def _send_more(self, process: GradingProcess, under_way: dict[int, _Call]) -> int:
        """Send a share of the queue, as far as there is room; returns how many calls are under way."""
        more: dict[int, _Call] = {}
        with self._lock:
            share = len(self._queue) / self._num_workers
            size = math.ceil(share)
            if not process.is_async:
                # Enough to make the round trip cheap, few enough for processes to end together.
                size = (
                    0
                    if under_way
                    else min(size, max(1, min(math.ceil(share / 2), int(CHUNK_S / self._item_s))))
                )
            for _ in range(size):
                calls = [*under_way.values(), *more.values(), self._queue[0]]
                if len(calls) > min(call.at_most for call in calls):
                    break
                call = self._queue.popleft()
                with call.round.lock:
                    # Here, and not later: the end of a round kills the processes that have its samples.
                    if not call.round.done.done():
                        call.round.processes.add(process)
                        more[next(self._numbers)] = call._replace(since=time.monotonic())
        if more:
            chunk = [
                (number, call.round.timeout_s, call.arguments) for number, call in more.items()
            ]
            timeout_s = min(call.round.timeout_s or LOADING_LIMIT_S for call in more.values())
            process.send(chunk, is_idle=not under_way, timeout_s=timeout_s)
            under_way |= more
        return len(under_way)

    def _process(self) -> GradingProcess:
        """An idle process, or a new one that has loaded the score function."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_idle:
                    return process
                # It was killed between two rounds.
                self._remove(process)
            process = GradingProcess(self._function, self._printed)
            self._processes.add(process)
        try:
            process.receive(LOADING_LIMIT_S, last=READY)
        except BaseException:
            self._remove(process)
            raise
        return process

    def _remove(self, process: GradingProcess) -> None:
        process.stop()
        self._processes.discard(process)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            rounds = {call.round for call in self._queue}
            self._queue.clear()
        for round_ in rounds:
            round_.end(error)


def _stop_all(processes: set[GradingProcess], owner_pid: int) -> None:
    # A forked child of the driver holds a copy of the pool; the processes are not the child's to kill.
    if os.getpid() == owner_pid:
        for process in list(processes):
            process.stop()
