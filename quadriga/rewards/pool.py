# SPDX-License-Identifier: Apache-2.0
"""Grading in separate processes, with a time limit for each sample and an end for all that a grader starts.

    caller     begin(samples) ──> Round ── does something else ── result(), or await wait()
    a thread       └── leads one process: hands it a chunk of samples, waits for one outcome after the other
    a process          └── grades the samples of a chunk in turn (grading_process.py)

    Round.result   waits for the threads of the round; unblocked by their ends, or by `cancel`
    a thread       waits for the next outcome; unblocked by it, by the end of its pipe, or by the time limit of a sample

The first sample of a chunk without an outcome is the one in work, and its time began with the outcome before it. So a
process that hangs, dies or is killed costs that one sample; those behind it go back to the queue.

The start methods of `multiprocessing` would run the user's script again, and the pools that are built on them end a
process alone, not what it has started.
"""

import asyncio
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from quadriga.errors import RewardError
from quadriga.rewards.grading_process import COMMAND, GRADED, LOADING, READY, UNUSABLE, Arguments
from quadriga.rewards.outcome import Outcome, failure
from quadriga.rewards.scoring import ScoreFunction

LOADING_LIMIT_S = 300.0
"""Time for starting a process and for importing the score function's file and libraries."""

CHUNK_S = 0.01
"""A chunk holds about this much work: quick samples travel together, slow ones alone."""

MAX_CHUNK = 64


class GradingProcess:
    """A grading process, which one thread leads at a time. `kill` may be called by any."""

    def __init__(self, function: ScoreFunction) -> None:
        ours, theirs = socket.socketpair()
        their_lifeline, self._lifeline = os.pipe()
        fds = (theirs.fileno(), their_lifeline)
        try:
            # A process group of its own: Ctrl-C reaches the driver alone, which then decides, and what a score function
            # has started can be killed together with it.
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *map(str, fds), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                process_group=0,
            )
        finally:
            theirs.close()
            os.close(their_lifeline)
        self._connection = Connection(ours.detach())
        self._messages = select.poll()
        self._messages.register(self._connection, select.POLLIN)
        self.is_ready = self.is_stopped = False
        self.since = time.monotonic()
        self.send(function)

    def send(self, message: Any) -> None:
        """Send the score function, or a chunk of samples."""
        # A process that has died is found out when its outcomes are read: its pipe has ended.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def receive(self, timeout_s: float, last: str = GRADED) -> Any:
        """Wait for the outcome of the sample in work (or, with `last=READY`, for the score function to be loaded).

        Args:
            timeout_s: seconds for the sample; loading has `LOADING_LIMIT_S`.
            last: kind of the message that is waited for.

        Returns:
            what the process sent; a failure where it was too late or has died, and is stopped.

        Raises:
            QuadrigaError: the score function, or a grader's library, cannot be loaded.
        """
        self.since = time.monotonic()
        while self._messages.poll(1000 * (timeout_s if self.is_ready else LOADING_LIMIT_S)):
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                end = self.stop(is_ending=True)
                if self.is_ready:
                    return failure("died", f"the grading process ended with {end} while it graded this sample")
                expected = "a process that starts and loads the score function"
                raise RewardError(
                    "grading process", got=end, expected=expected, fix="Its output above may say why."
                ) from None
            if kind == UNUSABLE:
                raise value
            self.is_ready = kind != LOADING
            if kind == last:
                return value
        self.stop()
        if self.is_ready:
            error = f"no score within {timeout_s:g} s; the grading process was killed (reward_model.timeout_s)"
            return failure("timeout", error)
        raise RewardError(
            "grading process",
            got=f"no sign of life for {LOADING_LIMIT_S:g} s",
            expected="the score function's file and its imports to load",
            fix="Look at what runs at import in custom_reward_function.path.",
        )

    def kill(self) -> None:
        """Kill the process and everything it has started; the thread that leads it sees its pipe end."""
        # Where nothing of the group is left, there is nothing to kill.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self, *, is_ending: bool = False) -> str:
        """Kill, and free what the driver holds of the process. Returns how it ended.

        Args:
            is_ending: the process has closed its pipe; it may first end by itself, with its own exit status.
        """
        if not self.is_stopped:
            self.is_stopped = True
            if is_ending:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=1.0)
            self.kill()
            self.process.wait()
            self._connection.close()
            os.close(self._lifeline)
        code = self.process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class Round:
    """Samples that are being graded, and what has become of them. `GradingPool.begin` makes it."""

    def __init__(
        self, rows: Sequence[Arguments], timeout_s: float, max_failures: int | None, *, is_batch: bool = False
    ) -> None:
        items = rows
        if is_batch and rows:
            items, timeout_s = [{f"{name}s": [row[name] for row in rows] for name in rows[0]}], timeout_s * len(rows)
        self.items, self.timeout_s = items, timeout_s
        self._rows_of_call = len(rows) if is_batch else 0
        self.outcomes: list[Any] = [None] * len(items)
        self.num_failed = 0
        self.is_ended = self._is_cancelled = False
        self.threads: list[Future[None]] = []
        self.processes: set[GradingProcess] = set()
        self._max_failures = math.inf if max_failures is None else max_failures
        self._queue = deque(range(len(items)))
        self._lock = threading.Lock()

    def result(self) -> list[Outcome]:
        """Wait for the outcomes, in order: those of samples that were not graded any more are "skipped".

        Raises:
            QuadrigaError: the score function cannot be loaded, the pool was closed, or the round cancelled.
        """
        try:
            for thread in self.threads:
                thread.result()
        except BaseException:
            # Ctrl-C above all: what is in work then is of no use.
            self.cancel()
            raise
        return self._outcomes()

    async def wait(self) -> list[Outcome]:
        """As `result`, in an event loop."""
        try:
            for thread in self.threads:
                await asyncio.wrap_future(thread)
        except BaseException:
            self.end()
            raise
        return self._outcomes()

    def cancel(self) -> None:
        """End the round: when this returns, no process grades its samples."""
        self._is_cancelled = True
        self.end()
        wait(self.threads)

    def progress(self) -> str:
        """What is done, for a report on a long wait."""
        busy = [time.monotonic() - process.since for process in list(self.processes)]
        slowest = f", the longest for {max(busy):.0f} s (limit {self.timeout_s:g} s)" if busy else ""
        num_graded = sum(outcome is not None for outcome in self.outcomes)
        return f"{num_graded} of {len(self.items)} graded, {self.num_failed} failed, {len(busy)} in work{slowest}"

    def end(self) -> None:
        """Hand out no more samples, and kill the processes that have some."""
        with self._lock:
            self.is_ended = True
            self._queue.clear()
        for process in list(self.processes):
            process.kill()

    def take(self, num_workers: int, item_s: float) -> list[int]:
        """The next chunk: enough samples to make the round trip cheap, few enough for processes to end together."""
        with self._lock:
            fair = math.ceil(len(self._queue) / (2 * num_workers))
            size = max(1, min(fair, MAX_CHUNK, int(CHUNK_S / item_s)))
            return [self._queue.popleft() for _ in range(min(size, len(self._queue)))]

    def record(self, key: int, outcome: Any, left: Sequence[int] = ()) -> None:
        """What has become of a sample; after too many failures the round ends.

        Args:
            key: place of the sample.
            outcome: its grade.
            left: places of samples of the chunk that its process did not come to.
        """
        with self._lock:
            if not self.is_ended:
                self._queue.extendleft(reversed(left))
            self.outcomes[key] = outcome
            self.num_failed += isinstance(outcome, Outcome) and bool(outcome.error)
        if self.num_failed > self._max_failures and None in self.outcomes:
            self.end()

    def _outcomes(self) -> list[Outcome]:
        if self._is_cancelled:
            raise RewardError("grading pool", got="cancel()", expected="samples to be graded first")
        if self._rows_of_call:
            # One call for all: where it hung or crashed its process, that is the outcome of each.
            (outcome,) = self.outcomes
            return [outcome] * self._rows_of_call if isinstance(outcome, Outcome) else outcome
        skipped = failure("skipped", f"not graded, since {self.num_failed} other samples had failed")
        return [skipped if outcome is None else outcome for outcome in self.outcomes]


class GradingPool:
    """Grades samples in separate processes, which are started when first needed and kept.

    Args:
        function: the score function.
        num_workers: processes that grade at the same time, in whatever number of rounds.
    """

    def __init__(self, function: ScoreFunction, *, num_workers: int) -> None:
        self._function, self._num_workers = function, num_workers
        self._threads = ThreadPoolExecutor(num_workers, "grading")
        self._processes: set[GradingProcess] = set()
        self._idle: list[GradingProcess] = []
        self._lock = threading.Lock()
        self._item_s = CHUNK_S
        self._is_closed = False
        # Without close(), the processes end with the pool or with the interpreter, whichever is first.
        self._finalizer = weakref.finalize(self, _stop_all, self._processes, os.getpid())

    def start(self) -> None:
        """Start one process and wait until it has loaded the score function, to learn early that it can.

        Raises:
            ConfigError: if the score function cannot be loaded.
            RewardError: if the process does not start.
        """
        process = self._process()
        try:
            if not process.is_ready:
                process.receive(LOADING_LIMIT_S, last=READY)
        except BaseException:
            self._remove(process)
            raise
        self._idle.append(process)

    def begin(self, rows: Sequence[Arguments], *, timeout_s: float, max_failures: int | None = None) -> Round:
        """Begin to grade while the caller does something else.

        Args:
            rows: keyword arguments for the score function, one dict a sample; a function that grades batches gets
                them all in one call.
            timeout_s: seconds for each sample; one call for all has so many for each of them together.
            max_failures: stop once more than this many samples have failed; the rest is "skipped". None: never.

        Raises:
            RewardError: the pool is closed.
        """
        if self._is_closed:
            raise RewardError("grading pool", got="a sample", expected="none, since the pool is closed")
        round_ = Round(rows, timeout_s, max_failures, is_batch=self._function.is_batch)
        round_.threads += [
            self._threads.submit(self._lead, round_) for _ in range(min(self._num_workers, len(round_.items)))
        ]
        return round_

    def grade(self, rows: Sequence[Arguments], *, timeout_s: float, max_failures: int | None = None) -> list[Outcome]:
        """The outcome of each sample, in order; see `begin`."""
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

    def __enter__(self) -> "GradingPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lead(self, round_: Round) -> None:
        """One thread: has a process grade samples of the round until there are no more."""
        process: GradingProcess | None = None
        try:
            while not round_.is_ended:
                if process is None:
                    process = self._process()
                # Before samples are taken: the end of the round kills the process that has them.
                round_.processes.add(process)
                keys = round_.take(self._num_workers, self._item_s)
                if not keys:
                    break
                if not self._grade(process, round_, keys):
                    round_.processes.discard(process)
                    self._remove(process)
                    process = None
        except Exception as error:
            if self._is_closed:
                raise _closed() from error
            # Where the round has ended, its processes were killed, and what ended it says why.
            if not round_.is_ended:
                round_.end()
                raise
        finally:
            if process is not None:
                round_.processes.discard(process)
                if round_.is_ended:
                    self._remove(process)
                else:
                    self._idle.append(process)

    def _grade(self, process: GradingProcess, round_: Round, keys: list[int]) -> bool:
        """Have a process grade a chunk. Returns whether the process can go on."""
        process.send([round_.items[key] for key in keys])
        for position, key in enumerate(keys):
            outcome = process.receive(round_.timeout_s)
            if self._is_closed:
                raise _closed()
            if round_.is_ended:
                break
            round_.record(key, outcome, keys[position + 1 :] if process.is_stopped else ())
            if process.is_stopped:
                return False
            self._item_s += 0.1 * (max(time.monotonic() - process.since, 1e-6) - self._item_s)
        return True

    def _process(self) -> GradingProcess:
        """An idle process, or a new one."""
        with self._lock:
            if self._is_closed:
                raise _closed()
            while self._idle:
                process = self._idle.pop()
                if process.process.poll() is None:
                    return process
                # It was killed between two rounds.
                self._remove(process)
            process = GradingProcess(self._function)
            self._processes.add(process)
            return process

    def _remove(self, process: GradingProcess) -> None:
        process.stop()
        self._processes.discard(process)


def _closed() -> RewardError:
    return RewardError("grading pool", got="close()", expected="samples to be graded first")


def _stop_all(processes: set[GradingProcess], owner_pid: int) -> None:
    # A forked child of the driver holds a copy of the pool; the processes are not the child's to kill.
    if os.getpid() == owner_pid:
        for process in list(processes):
            process.stop()
