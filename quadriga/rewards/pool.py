# SPDX-License-Identifier: Apache-2.0
"""Grading in separate processes, with a time limit for each sample.

    caller     begin(samples) ──> GradingRound ── does something else ── result()
    a thread       └── drives one process: sends it a chunk of samples, waits for each outcome
    a process          └── grades the samples of a chunk in turn (process.py)

    GradingRound.result   waits for the end of the round; unblocked by the last outcome, by too
                          many failures, or by `cancel`
    a thread              waits for the next outcome; unblocked by the outcome, by the end of the
                          process's pipe, or by the time limit of a sample

A process grades its samples in turn, so it works on the oldest one without an outcome, whose time
began with the previous outcome. If a process hangs, dies or is killed, only this sample fails; the
later ones go back to the queue. If a process awaits many samples concurrently, it is not known
which one is to blame: all of them are graded again, in smaller and smaller groups, in the end each
alone.
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
    LATE_MESSAGE,
    LOADING_LIMIT_S,
    READY,
    Arguments,
    GradingProcess,
    OutputPrinter,
)
from quadriga.rewards.scoring import ScoreFunction

CHUNK_S = 0.01  # approximate work in a chunk: quick samples are sent together, slow ones alone
MAX_CHUNK = 64
_BLOCKED_S = 5.0  # if an outcome is this late, the event loop of its process must be blocked


class GradingRound:
    """Samples that are graded together, and their outcomes so far. Threads may share it.

    Args:
        num_samples: number of samples.
        max_failures: end the round once more samples than this have failed; the others are
            "skipped". None: never.
        timeout_s: time limit of one call in a process. None: not graded in processes.

    Attributes:
        graded_at: when each sample was graded, in seconds since 1970; NaN if it was not.
        done: resolved when the round ends. It has an exception if the round ends with an error.
        lock: guards the state of the round. One thread may acquire it several times.
        processes: the processes that have samples of the round.
        timeout_s: the argument.
    """

    def __init__(
        self, num_samples: int, max_failures: int | None, timeout_s: float | None = None
    ) -> None:
        self._outcomes: list[Outcome | None] = [None] * num_samples
        self.graded_at = [math.nan] * num_samples
        self.done: Future[None] = Future()
        # A future that is marked as running cannot be cancelled by an event loop that awaits it.
        self.done.set_running_or_notify_cancel()
        self.lock = threading.RLock()
        self.processes = set[GradingProcess]()
        self.timeout_s = timeout_s
        self._max_failures = math.inf if max_failures is None else max_failures
        self._num_remaining = num_samples
        self._num_failed = 0
        if not num_samples:
            self.end()

    def record(self, key: int, outcome: Outcome) -> None:
        """Record the outcome of a sample. End the round if it was the last, or if too many failed.

        Nothing is recorded after the end of the round.

        Args:
            key: position of the sample in the round.
            outcome: outcome of the sample.
        """
        with self.lock:
            if self.done.done():
                return
            self._outcomes[key] = outcome
            self.graded_at[key] = time.time()
            self._num_remaining -= 1
            self._num_failed += bool(outcome.error)
            if not self._num_remaining:
                self.done.set_result(None)
            elif self._num_failed > self._max_failures:
                self.end()

    def remove_process(self, process: GradingProcess) -> None:
        """Forget a process that has no samples of the round any more."""
        with self.lock:
            self.processes.discard(process)

    def end(self, error: BaseException | None = None) -> None:
        """End the round, and kill the processes that have its samples.

        Args:
            error: the error that `result` raises. None: the remaining samples are "skipped".
        """
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
        """End the round with an error, and wait until its processes have ended."""
        self.end(RewardError("grading", got="cancel()", expected="samples to be graded first"))
        # A thread of the pool removes each process once it has ended.
        while self.processes:
            time.sleep(0.001)

    def result(self) -> list[Outcome]:
        """Wait for the outcomes.

        Returns:
            The outcome of each sample, in order. Samples that were not graded are "skipped".

        Raises:
            QuadrigaError: the score function cannot be loaded, the pool was closed, or the round
                was cancelled.
        """
        try:
            self.done.result()
        except BaseException:
            # Also after Ctrl-C in this thread: nobody will read the outcomes any more.
            self.cancel()
            raise
        skipped = failure(
            "skipped", f"not graded, since {self._num_failed} other samples had failed"
        )
        return [outcome or skipped for outcome in self._outcomes]

    def progress(self) -> str:
        """Describe the state of the round, for the report of a long wait."""
        # For each process at work, the time since it began its current sample.
        busy_s: list[float] = []
        with self.lock:
            if not self.done.done():
                busy_s = [time.monotonic() - process.begun_at for process in self.processes]
        num_samples = len(self._outcomes)
        text = f"{num_samples - self._num_remaining} of {num_samples} graded, {self._num_failed} failed"
        if self.timeout_s is not None:
            text += f", {len(busy_s)} in progress"
            if busy_s:
                text += f", the longest for {max(busy_s):.0f} s (limit {self.timeout_s:g} s)"
        return text


class _GradingCall(NamedTuple):
    """A call of the score function, for one sample or for a whole batch.

    Attributes:
        round: the round of the samples.
        keys: positions of the samples in the round.
        arguments: arguments of the call.
        max_concurrent: most calls, including this one, that a process with this call may await at
            the same time. It is lowered when such a process has died.
        sent_at: when the call was sent to a process, by `time.monotonic`; 0 before that.
        ungradable: why the response could not be graded, and an empty response is graded in its
            place; "" for the response itself.
    """

    round: GradingRound
    keys: Sequence[int]
    arguments: Arguments
    max_concurrent: int = MAX_CHUNK
    sent_at: float = 0.0
    ungradable: str = ""

    def record(self, outcome: Outcome | list[Outcome]) -> None:
        """Record the outcomes of the samples.

        Args:
            outcome: one outcome for each sample, or a single one that applies to all samples.
        """
        outcomes = outcome if isinstance(outcome, list) else [outcome] * len(self.keys)
        for key, sample_outcome in zip(self.keys, outcomes, strict=True):
            if self.ungradable and not sample_outcome.error:
                extra = {**sample_outcome.extra, UNGRADABLE: self.ungradable}
                sample_outcome = sample_outcome._replace(extra=extra)
            self.round.record(key, sample_outcome)


class GradingPool(AbstractContextManager["GradingPool"]):
    """Grades samples in separate processes, which are started when first needed and then reused.

    Args:
        function: the score function.
        num_workers: number of processes.

    Attributes:
        accepted: names of the arguments of the score function, known after `start`.
    """

    def __init__(self, function: ScoreFunction, *, num_workers: int) -> None:
        self._function = function
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, "grading")
        self._lock = threading.Lock()
        self._queue: deque[_GradingCall] = deque()
        self._processes: set[GradingProcess] = set()
        self._printer = OutputPrinter()
        self._idle: list[GradingProcess] = []
        self._numbers = count()
        # Moving average of the seconds that a call takes, to choose the size of chunks.
        self._call_s = CHUNK_S
        self._is_closed = False
        self.accepted = frozenset[str]()
        # If nobody calls `close`, the processes end with the pool or with the interpreter.
        self._finalizer = weakref.finalize(self, _stop_all, self._processes, os.getpid())

    def start(self) -> None:
        """Start one process now, so that an error in loading the score function is raised early.

        Raises:
            QuadrigaError: the score function cannot be loaded.
        """
        process = self._take_process()
        self.accepted = process.accepted
        self._idle.append(process)

    def begin(
        self, rows: Sequence[Arguments], *, timeout_s: float, max_failures: int | None = None
    ) -> GradingRound:
        """Begin to grade samples while the caller does something else.

        Args:
            rows: keyword arguments for the score function, one dict per sample. A function that
                grades batches gets all of them in one call.
            timeout_s: seconds per sample. One call for a batch has this time for each sample.
            max_failures: end the round once more samples than this have failed. None: never.

        Returns:
            The round, whose outcomes are in the order of the rows.

        Raises:
            RewardError: the pool is closed.
        """
        if self._is_closed:
            raise RewardError(
                "grading pool", got="a sample", expected="none, since the pool is closed"
            )
        # A function of batches gets one call for all samples, other functions one for each sample.
        if self._function.is_batch and rows:
            round_ = GradingRound(len(rows), max_failures, timeout_s * len(rows))
            calls = [
                _GradingCall(round_, range(len(rows)), self._function.batch_arguments_of(rows))
            ]
        else:
            round_ = GradingRound(len(rows), max_failures, timeout_s)
            calls = [_GradingCall(round_, (key,), row) for key, row in enumerate(rows)]
        with self._lock:
            self._queue.extend(calls)
        # There may be more threads than needed: one that finds the queue empty ends at once.
        for _ in calls[: self._num_workers]:
            self._threads.submit(self._drive_processes)
        return round_

    def grade(
        self, rows: Sequence[Arguments], *, timeout_s: float, max_failures: int | None = None
    ) -> list[Outcome]:
        """Grade samples and wait for their outcomes.

        Args:
            rows: as for `begin`.
            timeout_s: as for `begin`.
            max_failures: as for `begin`.

        Returns:
            The outcome of each sample, in order.

        Raises:
            QuadrigaError: the pool is closed, or the score function cannot be loaded.
        """
        return self.begin(rows, timeout_s=timeout_s, max_failures=max_failures).result()

    def close(self) -> None:
        """Kill all processes. Rounds that have not ended raise a RewardError in `result`."""
        with self._lock:
            self._is_closed = True
        for process in list(self._processes):
            process.kill()
        self._threads.shutdown()
        for process in list(self._processes):
            self._remove(process)
        self._printer.close()
        self._end_rounds(
            RewardError("grading pool", got="close()", expected="samples to be graded first")
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drive_processes(self) -> None:
        """Make a process grade calls until the queue is empty; runs in a thread of the pool.

        A process that has ended is replaced by another one.
        """
        process: GradingProcess | None = None
        try:
            while self._has_calls():
                if process is None:
                    process = self._take_process()
                self._grade_calls(process)
                if process.is_ended:
                    process = None
        except Exception as error:
            # The score function cannot be loaded, or a sample cannot be pickled. Every process would
            # fail in the same way, so all rounds end.
            if process is not None:
                self._remove(process)
            self._end_rounds(error)
            raise
        if process is not None:
            self._idle.append(process)

    def _has_calls(self) -> bool:
        """Whether there is a call to make. Calls of rounds that have ended are dropped."""
        with self._lock:
            while self._queue and self._queue[0].round.done.done():
                self._queue.popleft()
            return bool(self._queue) and not self._is_closed

    def _grade_calls(self, process: GradingProcess) -> None:
        """Make a process grade calls of any rounds, until the queue is empty or the process ends.

        Args:
            process: the process, which has no calls.
        """
        # Calls that were sent and have no outcome yet, by number, oldest first.
        under_way: dict[int, _GradingCall] = {}
        # Outcome of the call that ended the process, if one did.
        fatal: Outcome | None = None
        try:
            while not self._is_closed and self._send_more(process, under_way):
                oldest = next(iter(under_way.values()))
                timeout_s = oldest.round.timeout_s
                message = process.receive(timeout_s)
                if isinstance(message, Outcome):
                    # The process has ended. The kind "skipped" means that no call is to blame.
                    if message.kind != "skipped":
                        fatal = message
                    break
                # None: a coroutine function has no outcome yet.
                if message is not None:
                    number, outcome = message
                    call = under_way.pop(number)
                    call.record(outcome)
                    if all(other.round is not call.round for other in under_way.values()):
                        call.round.remove_process(process)
                    call_s = max(time.monotonic() - process.begun_at, 1e-6)
                    self._call_s += 0.1 * (call_s - self._call_s)
                    continue
                # For a coroutine function, the process itself applies the time limits. If an
                # outcome is late all the same, the function does not yield to the process's event
                # loop.
                begun_at = max(process.begun_at, oldest.sent_at)
                if time.monotonic() > begun_at + timeout_s + _BLOCKED_S:
                    process.stop()
                    fatal = failure(
                        "timeout", f"{LATE_MESSAGE.format(timeout_s)}: it blocks its event loop"
                    )
                    break
        finally:
            self._requeue_calls(process, under_way, fatal)

    def _requeue_calls(
        self, process: GradingProcess, under_way: dict[int, _GradingCall], fatal: Outcome | None
    ) -> None:
        """Put calls without an outcome back in the queue, except a call that has ended the process.

        The outcome of that call, `fatal`, is recorded. There are two exceptions, in which the call
        is repeated: it may have been any of several concurrent calls; or a built-in grader exceeded
        the CPU limit, and then grades an empty response instead.

        Args:
            process: the process, which may have ended.
            under_way: calls of the process without an outcome, by number, oldest first.
            fatal: outcome of the call that ended the process. None: no call has ended it.
        """
        if process.is_ended:
            self._remove(process)
        calls = list(under_way.values())
        max_concurrent = MAX_CHUNK
        if fatal is not None:
            if process.is_async and len(calls) != 1:
                # Any of the concurrent calls may be the fatal one. All are repeated in smaller and
                # smaller groups, until the fatal one is alone in a process.
                max_concurrent = max(1, len(calls) // 8)
            elif fatal.kind == "ungradable" and not calls[0].ungradable:
                # Grade an empty response instead: it gets the score of a wrong response, which
                # depends on the grader and its options.
                arguments = {**calls[0].arguments, "solution_str": ""}
                calls[0] = calls[0]._replace(arguments=arguments, ungradable=fatal.error)
            else:
                # Calls run one after the other, so the oldest one is the fatal one.
                calls.pop(0).record(fatal)
        # Put back in front, and in the same order.
        with self._lock:
            for call in reversed(calls):
                limit = min(call.max_concurrent, max_concurrent)
                self._queue.appendleft(call._replace(max_concurrent=limit))
        for call in under_way.values():
            call.round.remove_process(process)

    def _send_more(self, process: GradingProcess, under_way: dict[int, _GradingCall]) -> int:
        """Send the process a share of the queue, if it has room for more calls.

        Args:
            process: the process.
            under_way: calls of the process without an outcome, by number. The new ones are added.

        Returns:
            Number of calls under way. At 0 there is nothing left to do for the process.
        """
        new_calls: dict[int, _GradingCall] = {}
        chunk = []
        with self._lock:
            for _ in range(self._num_to_send(process, len(under_way))):
                # With the next call, the process must not have more calls than any of them allows.
                calls = [*under_way.values(), *new_calls.values(), self._queue[0]]
                if len(calls) > min(call.max_concurrent for call in calls):
                    break
                call = self._queue.popleft()
                # `GradingRound.end` kills the processes of the round. Because of the round's lock,
                # either `end` finds this process there, or the call is dropped here.
                with call.round.lock:
                    if not call.round.done.done():
                        call.round.processes.add(process)
                        number = next(self._numbers)
                        new_calls[number] = call._replace(sent_at=time.monotonic())
                        chunk.append((number, call.round.timeout_s, call.arguments))
        if chunk:
            # The type allows None, but rounds that are graded in processes have a time limit.
            timeout_s = min(timeout_s or LOADING_LIMIT_S for _, timeout_s, _ in chunk)
            process.send(chunk, is_idle=not under_way, timeout_s=timeout_s)
            under_way |= new_calls
        return len(under_way)

    def _num_to_send(self, process: GradingProcess, num_under_way: int) -> int:
        """Number of calls that a process should get next; 0 if the queue is empty.

        The caller holds the lock.

        Args:
            process: the process.
            num_under_way: number of its calls without an outcome.
        """
        share = len(self._queue) / self._num_workers
        # All of a process's share is awaited concurrently.
        if process.is_async:
            return math.ceil(share)
        # A process that grades in turn gets its next calls when it has none.
        if num_under_way:
            return 0
        # As many calls as take about `CHUNK_S`, so that sending them costs little in comparison. At
        # most half a share, so that all processes finish at about the same time.
        num_quick = int(CHUNK_S / self._call_s)
        num_calls = max(1, min(math.ceil(share / 2), num_quick))
        # 0 if the queue is empty.
        return min(math.ceil(share), num_calls)

    def _take_process(self) -> GradingProcess:
        """Take an idle process, or start one and wait until it has loaded the score function.

        Raises:
            QuadrigaError: the score function cannot be loaded.
        """
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_idle:
                    return process
                # The process ended while it was idle.
                self._remove(process)
            process = GradingProcess(self._function, self._printer)
            self._processes.add(process)
        try:
            process.receive(LOADING_LIMIT_S, last=READY)
        except BaseException:
            self._remove(process)
            raise
        return process

    def _remove(self, process: GradingProcess) -> None:
        """Stop a process and forget it."""
        process.stop()
        self._processes.discard(process)

    def _end_rounds(self, error: Exception) -> None:
        """Empty the queue, and end the rounds of the calls in it with an error."""
        with self._lock:
            rounds = {call.round for call in self._queue}
            self._queue.clear()
        for round_ in rounds:
            round_.end(error)


def _stop_all(processes: set[GradingProcess], owner_pid: int) -> None:
    """Stop the processes of a pool that is freed without being closed.

    Args:
        processes: the processes.
        owner_pid: id of the process that made the pool.
    """
    # A forked child of the driver has a copy of the pool, but must not end the driver's processes.
    if os.getpid() == owner_pid:
        for process in list(processes):
            process.stop()
