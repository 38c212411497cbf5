# SPDX-License-Identifier: Apache-2.0
"""A pool of grading processes with a time limit per sample.

A sample that hangs costs its process, a sample that crashes the interpreter costs its process, and in both cases
nothing else: the process is replaced, the samples that waited behind it go to another, and the pool carries on.

    pool.grade     consumes the samples; waits for one outcome each; unblocked by answers, ends of pipes and deadlines
    pool.begin     the same in a thread of its own, which `cancel` ends
    process        consumes chunks of samples, one chunk at a time; answers each sample before it begins the next

So the first unanswered sample of a process is the one in work, its time starts with the answer before it, and a
process that dies or is killed can only be charged with that one.
"""

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from quadriga.errors import RewardError
from quadriga.rewards.begun import Begun
from quadriga.rewards.custom import ScoreFunction
from quadriga.rewards.grading_process import COMMAND, GRADED, LOADING, READY, UNUSABLE, Arguments
from quadriga.rewards.outcome import Outcome, failure

LOADING_LIMIT_S = 300.0
"""Time for starting a process and for importing the score function's file and libraries."""

CHUNK_S = 0.01
"""A chunk holds about this much work: quick samples travel together, slow ones alone."""

MAX_CHUNK = 64


class GradingProcess:
    """The driver's handle of one grading process."""

    def __init__(self, function: ScoreFunction) -> None:
        ours, theirs = socket.socketpair()
        their_lifeline, self._lifeline = os.pipe()
        fds = (theirs.fileno(), their_lifeline)
        try:
            # A process group of its own: Ctrl-C reaches the driver alone, which then decides, and what a score function
            # has started can be killed together with it.
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *map(str, fds), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                process_group=0,
            )
        finally:
            theirs.close()
            os.close(their_lifeline)
        self.connection = Connection(ours.detach())
        self.pending: deque[int] = deque()
        self.is_ready = False
        self.deadline: float | None = time.monotonic() + LOADING_LIMIT_S
        self.since = 0.0
        self._tell(function)

    @property
    def is_idle(self) -> bool:
        """Whether the process can take samples."""
        return self.is_ready and not self.pending

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def hand(self, chunk: Sequence[tuple[int, Arguments]], timeout_s: float) -> None:
        """Send samples; the first one's time begins."""
        self.pending.extend(key for key, _ in chunk)
        self.restart_clock(timeout_s)
        self._tell(chunk)

    def restart_clock(self, limit_s: float) -> None:
        """Give the sample (or the import) that begins here its time."""
        self.since = time.monotonic()
        self.deadline = self.since + limit_s if self.pending or not self.is_ready else None

    def stop(self) -> str:
        """Kill the process, free what the driver holds of it, and say how it ended."""
        self.connection.close()
        os.close(self._lifeline)
        if self._process.returncode is None:
            self.kill()
        self._process.wait()
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def await_end(self) -> None:
        """Let a process whose pipe has ended finish dying, so that it can tell its own exit status."""
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            # It closed its pipe and lives on: `stop` kills it.
            return
        self.kill()

    def kill(self) -> None:
        """Kill the process and everything it has started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            # Nothing of the group is left.
            return

    def _tell(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            # It has died; the end of its pipe is read next and tells the whole story.
            return


class _Round:
    """The samples of one call to `grade`, and what has become of them."""

    def __init__(self, items: Sequence[Arguments], timeout_s: float = 0.0, max_failures: int | None = None) -> None:
        self.items = items
        self.timeout_s = timeout_s
        self.replies: list[Any] = [None] * len(items)
        self.queue = deque(range(len(items)))
        self.num_answered = 0
        self.num_failed = 0
        self.is_given_up = False
        self._max_failures = math.inf if max_failures is None else max_failures

    @property
    def is_open(self) -> bool:
        is_wanted = self.num_failed <= self._max_failures and not self.is_given_up
        return is_wanted and self.num_answered < len(self.items)

    @property
    def num_open(self) -> int:
        return len(self.items) - self.num_answered

    def take(self, count: int) -> list[tuple[int, Arguments]]:
        keys = [self.queue.popleft() for _ in range(min(count, len(self.queue)))]
        return [(key, self.items[key]) for key in keys]

    def record(self, key: int, reply: Any) -> None:
        self.replies[key] = reply
        self.num_answered += 1
        self.num_failed += isinstance(reply, Outcome) and bool(reply.error)


class GradingPool:
    """Grades samples in separate processes, which are started when first needed and kept.

    Args:
        function: the score function.
        num_workers: processes that grade at the same time.
    """

    def __init__(self, function: ScoreFunction, *, num_workers: int) -> None:
        self._function = function
        self._num_workers = num_workers
        self._processes: list[GradingProcess] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._round: _Round | None = None
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
        with self._lock:
            self._attempt(_Round([]), is_start=True)

    def grade(self, items: Sequence[Arguments], *, timeout_s: float, max_failures: int | None = None) -> list[Any]:
        """The outcome of each sample, in order.

        Args:
            items: keyword arguments for the score function, one dict a sample.
            timeout_s: seconds for one item (a sample, or a whole batch if the function grades batches).
            max_failures: stop once more than this many samples have failed; the rest is "skipped". None: never.

        Returns:
            One `Outcome` a sample; a list of outcomes where the function grades batches and did not fail as a whole.
        """
        return self._grade(_Round(items, timeout_s, max_failures))

    def begin(
        self, items: Sequence[Arguments], *, timeout_s: float, max_failures: int | None = None
    ) -> Begun[list[Any]]:
        """As `grade`, while the caller does something else. Once it is cancelled none of the processes is left."""
        round_ = _Round(items, timeout_s, max_failures)
        return Begun(partial(self._grade, round_), partial(self._give_up, round_), name="rewards")

    def progress(self) -> str:
        """What the pool is doing, for a report on a long wait."""
        current = self._round
        if current is None:
            return "nothing is being graded"
        busy = [time.monotonic() - process.since for process in list(self._processes) if process.pending]
        slowest = f", the longest for {max(busy):.0f} s (limit {current.timeout_s:g} s)" if busy else ""
        done = f"{current.num_answered} of {len(current.items)} graded, {current.num_failed} failed"
        return f"{done}, {len(busy)} in work{slowest}"

    def close(self) -> None:
        """Kill all processes; a call to `grade` under way in another thread raises RewardError."""
        self._is_closed = True
        for process in list(self._processes):
            process.kill()
        # A call to `grade` sees the pipes end, raises, and lets go of the lock.
        with self._lock:
            self._stop_processes()

    def __enter__(self) -> "GradingPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grade(self, round_: _Round) -> list[Any]:
        with self._lock:
            return self._attempt(round_)

    def _give_up(self, round_: _Round) -> None:
        """From another thread than the one that grades: that one sees pipes end, and no sample to go on with."""
        round_.is_given_up = True
        if self._round is round_:
            for process in list(self._processes):
                process.kill()

    def _attempt(self, round_: _Round, *, is_start: bool = False) -> list[Any]:
        self._round = round_
        try:
            for process in [process for process in self._processes if process.has_ended]:
                self._remove(process)
            if is_start:
                self._add_processes(1)
            while round_.is_open or (is_start and not any(process.is_ready for process in self._processes)):
                self._fill(round_)
                self._wait(round_)
            if round_.is_given_up:
                raise RewardError("grading pool", got="cancel()", expected="samples to be graded first")
            self._skip_rest(round_)
            return round_.replies
        except BaseException:
            # Ctrl-C above all: what is in work is for nobody any more.
            self._stop_processes()
            raise
        finally:
            self._round = None

    def _add_processes(self, count: int) -> None:
        if self._is_closed:
            raise RewardError("grading pool", got="a sample", expected="none, since the pool is closed")
        while len(self._processes) < count:
            process = GradingProcess(self._function)
            self._processes.append(process)
            self._selector.register(process.connection, selectors.EVENT_READ, process)

    def _fill(self, round_: _Round) -> None:
        self._add_processes(min(self._num_workers, round_.num_open))
        for process in self._processes:
            if process.is_idle and round_.queue:
                process.hand(round_.take(self._chunk_size(len(round_.queue))), round_.timeout_s)

    def _chunk_size(self, num_waiting: int) -> int:
        """Enough samples to make the round trip cheap, few enough for the processes to finish together."""
        fair = math.ceil(num_waiting / (2 * self._num_workers))
        return max(1, min(fair, MAX_CHUNK, int(CHUNK_S / self._item_s)))

    def _wait(self, round_: _Round) -> None:
        # The clock is read before the pipes: an answer that lay there while the driver itself was held up is never
        # late.
        now = time.monotonic()
        deadlines = [process.deadline for process in self._processes if process.deadline is not None]
        events = self._selector.select(max(0.0, min(deadlines) - now) if deadlines else 0.0)
        answering = [key.data for key, _ in events]
        for process in answering:
            self._receive(process, round_)
        for process in list(self._processes):
            if process.deadline is not None and process.deadline <= now and process not in answering:
                self._expire(process, round_)

    def _receive(self, process: GradingProcess, round_: _Round) -> None:
        try:
            kind, key, value = process.connection.recv()
        except (EOFError, OSError):
            self._bury(process, round_)
            return
        if kind == UNUSABLE:
            raise value
        if kind == GRADED:
            self._item_s += 0.1 * (max(time.monotonic() - process.since, 1e-6) - self._item_s)
            process.pending.popleft()
            process.restart_clock(round_.timeout_s)
            round_.record(key, value)
        elif kind == LOADING:
            process.is_ready = False
            process.restart_clock(LOADING_LIMIT_S)
        elif kind == READY:
            process.is_ready = True
            process.restart_clock(round_.timeout_s)

    def _bury(self, process: GradingProcess, round_: _Round) -> None:
        """A process has died by itself."""
        if self._is_closed:
            raise RewardError("grading pool", got="close()", expected="samples to be graded first")
        process.await_end()
        end = self._remove(process)
        if not process.is_ready:
            fix = "Its output above may say why."
            raise RewardError(
                "grading process", got=end, expected="a process that starts and loads the score function", fix=fix
            )
        self._charge(
            process, round_, failure("died", f"the grading process ended with {end} while it graded this sample")
        )

    def _expire(self, process: GradingProcess, round_: _Round) -> None:
        """A process has not answered in time."""
        self._remove(process)
        if not process.is_ready:
            raise RewardError(
                "grading process",
                got=f"no sign of life for {LOADING_LIMIT_S:g} s",
                expected="the score function's file and its imports to load",
                fix="Look at what runs at import in custom_reward_function.path.",
            )
        error = f"no score within {round_.timeout_s:g} s; the grading process was killed (reward_model.timeout_s)"
        self._charge(process, round_, failure("timeout", error))

    def _charge(self, process: GradingProcess, round_: _Round, outcome: Outcome) -> None:
        """Blame the sample in work for the end of its process; the ones behind it go back to the queue."""
        if process.pending:
            round_.record(process.pending.popleft(), outcome)
        round_.queue.extendleft(reversed(process.pending))
        process.pending.clear()

    def _skip_rest(self, round_: _Round) -> None:
        """Give up on what is left after too many failures."""
        for process in [process for process in self._processes if process.pending]:
            self._remove(process)
        for key, reply in enumerate(round_.replies):
            if reply is None:
                round_.replies[key] = failure(
                    "skipped", f"not graded, since {round_.num_failed} other samples had failed"
                )

    def _remove(self, process: GradingProcess) -> str:
        self._processes.remove(process)
        self._selector.unregister(process.connection)
        return process.stop()

    def _stop_processes(self) -> None:
        for process in list(self._processes):
            self._remove(process)


def _stop_all(processes: list[GradingProcess], owner_pid: int) -> None:
    # A forked child of the driver holds a copy of the pool; the processes are not the child's to kill.
    if os.getpid() == owner_pid:
        for process in processes:
            process.stop()
