# SPDX-License-Identifier: Apache-2.0
"""A grading process as the driver holds it: started, given samples, listened to and ended, with all it has started.

What score functions print is passed on, `SAMPLE_BYTES` of a sample and `MINUTE_BYTES` a minute; the rest is counted.

The start methods of `multiprocessing` would run the user's script again, and the pools that are built on them end a
process alone, not what it has started.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from quadriga.descendants import end_descendants, end_group
from quadriga.errors import RewardError
from quadriga.rewards.grading_process import COMMAND, GRADED, LATE, LOADING, READY, UNUSABLE
from quadriga.rewards.outcome import Outcome, failure
from quadriga.rewards.scoring import ScoreFunction

LOADING_LIMIT_S = 300.0
"""Time for starting a process and for importing the score function's file and libraries."""

SAMPLE_BYTES, MINUTE_BYTES = 4096, 65536
"""How much of what score functions print is shown: of one sample, and of all of the pool in a minute."""

DIED = "the grading process ended with {} while it graded this sample"

_END_LIMIT_S = 15.0

_LOOK_S = 0.05
"""A process that awaits samples gets more of them this often."""


class Printed:
    """What the score functions of a pool print: shown on the standard output up to the limits, then counted."""

    def __init__(self) -> None:
        self._lock, self._since = threading.Lock(), time.monotonic()
        self._room, self._num_left_out = MINUTE_BYTES, 0

    def show(self, data: bytes, room: int) -> int:
        """Show at most `room` bytes; returns how many were."""
        with self._lock:
            if time.monotonic() > self._since + 60:
                self.close()
                self._since, self._room = time.monotonic(), MINUTE_BYTES
            shown = data[: min(room, self._room)]
            self._room -= len(shown)
            self._num_left_out += len(data) - len(shown)
            if shown:
                sys.stdout.write(shown.decode(errors="replace"))
                sys.stdout.flush()
        return len(shown)

    def close(self) -> None:
        """Say how much was left out."""
        if self._num_left_out:
            limits = f"{SAMPLE_BYTES:,} of a sample and {MINUTE_BYTES:,} a minute"
            print(f"\nscore functions printed {self._num_left_out:,} more bytes; {limits} are shown.", flush=True)
        self._num_left_out = 0


class GradingProcess:
    """A grading process, which one thread leads at a time. `kill` may be called by any."""

    def __init__(self, function: ScoreFunction, printed: Printed) -> None:
        ours, theirs = socket.socketpair()
        their_lifeline, self._lifeline = os.pipe()
        self._output, their_output = os.pipe()
        fds = (theirs.fileno(), their_lifeline)
        try:
            # The process is the supervisor of the one that grades. A process group of its own: Ctrl-C reaches the
            # driver alone, which then decides. Unbuffered, so that what a sample prints is shown when it hangs.
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", COMMAND, *map(str, fds), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=their_output,
                pass_fds=fds,
                process_group=0,
            )
        finally:
            theirs.close()
            os.close(their_lifeline)
            os.close(their_output)
        os.set_blocking(self._output, False)
        self._connection, self._printed = Connection(ours.detach()), printed
        self._messages = select.poll()
        self._messages.register(self._connection, select.POLLIN)
        self._messages.register(self._output, select.POLLIN)
        self._lock = threading.Lock()
        self.is_ready = self.is_ended = self.is_async = False
        self.since = time.monotonic()
        self.send(function)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for samples: it has not ended, and sends nothing."""
        return not self._connection.poll()

    def send(self, message: Any) -> None:
        """Send the score function, or a chunk of samples."""
        # A process that has died is found out when its outcomes are read: its pipe has ended.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def receive(self, timeout_s: float, last: str = GRADED) -> Any:
        """Wait for the outcome of the sample in work (or, with `last=READY`, for the score function to be loaded).

        The outcome is a failure where the process was too late or has died; then it is stopped. Loading has a limit of
        its own, `LOADING_LIMIT_S`; a QuadrigaError says that the score function or a grader's library cannot be loaded.
        """
        self._begin_wait(timeout_s)
        while ready := self._wait():
            if self._connection.fileno() not in ready:
                continue
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                is_killed, end = self.is_ended, self.stop(is_ending=True)
                if self.is_ready or is_killed:
                    return failure("died", DIED.format(end))
                expected, fix = "a process that starts and loads the score function", "Its output above may say why."
                raise RewardError("grading process", got=end, expected=expected, fix=fix) from None
            if kind == UNUSABLE:
                raise value
            self.is_ready, self.is_async = kind != LOADING, kind == READY and value
            if kind == last:
                return value
            self._begin_wait(timeout_s)
        self.stop()
        if self.is_ready:
            return failure("timeout", f"{LATE.format(timeout_s)}; the grading process was killed")
        where, got = "grading process", f"no sign of life for {LOADING_LIMIT_S:g} s"
        fix = "Look at what runs at import in custom_reward_function.path."
        raise RewardError(where, got=got, expected="the score function's file and its imports to load", fix=fix)

    def receive_any(self) -> tuple[int, Outcome | list[Outcome]] | None:
        """The next outcome of a process that awaits many, and its number; None: not yet. It died: EOFError, OSError."""
        self._until = time.monotonic() + _LOOK_S
        while ready := self._wait():
            if self._connection.fileno() in ready:
                self.since, self._room = time.monotonic(), SAMPLE_BYTES
                return self._connection.recv()[1]
        return None

    def _begin_wait(self, timeout_s: float) -> None:
        self.since, self._room = time.monotonic(), SAMPLE_BYTES
        self._until = self.since + (timeout_s if self.is_ready else LOADING_LIMIT_S)

    def _wait(self) -> list[int]:
        """Wait for something to read, and pass on what was printed. Returns what is ready; nothing: it is too late."""
        limit_s = self._until - time.monotonic()
        ready = [fd for fd, _ in self._messages.poll(1000 * limit_s)] if limit_s > 0 else []
        if self._output in ready:
            self._pass_on()
        return ready

    def _pass_on(self) -> None:
        # What was printed before an outcome is there before it. One read, since there may be more and more. At its end
        # the pipe is always ready: it is looked at no more, and that may have been found before.
        with suppress(BlockingIOError, KeyError):
            data = os.read(self._output, 1 << 20)
            self._room -= self._printed.show(data, self._room)
            if not data:
                self._messages.unregister(self._output)

    def kill(self) -> None:
        """Kill the process and everything it has started; the thread that leads it sees its pipe end."""
        self.is_ended = True
        # The supervisor may have ended; or its child has stopped it.
        with self._lock, suppress(ProcessLookupError, BrokenPipeError):
            if not self._connection.closed:
                os.write(self._lifeline, b"x")
                self.process.send_signal(signal.SIGCONT)

    def stop(self, *, is_ending: bool = False) -> str:
        """Kill, and free what the driver holds; returns how it ended: by itself within 1 s, if `is_ending`."""
        if not self._connection.closed:
            if is_ending:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=1.0)
            self.kill()
            try:
                self.process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                end_descendants(self.process.pid)
                self.process.kill()
                self.process.wait()
            # Its supervisor has done so, unless it was killed.
            end_group(self.process.pid)
            self._room = SAMPLE_BYTES
            self._pass_on()
            with self._lock:
                self._connection.close()
                os.close(self._lifeline)
                os.close(self._output)
        code = self.process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
