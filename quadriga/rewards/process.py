# SPDX-License-Identifier: Apache-2.0
"""A grading process: its program, and the process as the driver holds it.

It is a `quadriga.programs.SupervisedProgram`, a fresh interpreter, and never loads torch unless the user's score
function does.

    driver                          grading process
      | -- settings ------------------> |  loads the score function
      | <------------------ READY ----- |  or UNUSABLE, error
      | -- [(number, timeout_s, arguments), ...] -> |
      | <------------------ BEGUN ----- |  it has them
      | <---------------- LOADING ----- |  only before a grader's library is imported; READY follows
      | <- GRADED, (number, outcome) -- |  one at a time, each sent before the next sample is begun
      | -- [...] ---------------------> |  the next samples, once all are graded

Of a coroutine function (READY comes with true) many samples are awaited at a time, each with a time limit of its own:
outcomes come in any order, and more samples may come at any time. It ends when the driver does: between samples it sees
the end of the pipe; in the middle of one its supervisor ends it (`quadriga.descendants`), with everything that score
functions have started. What score functions print is passed on, `SAMPLE_BYTES` of a sample and `MINUTE_BYTES` a minute;
the rest is counted.
"""

import asyncio
import inspect
import logging
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from quadriga.errors import QuadrigaError, RewardError
from quadriga.observe.watchdog import waiting
from quadriga.programs import SupervisedProgram
from quadriga.rewards import cpu_limit
from quadriga.rewards.outcome import Outcome, failure, raised, read_outcome, read_outcomes
from quadriga.rewards.scoring import ScoreFunction, grader_name, load_grader
from quadriga.streams import relay

logger = logging.getLogger(__name__)
LOADING_LIMIT_S = (
    300.0  # time for starting a process and for importing the score function's file and libraries
)
SAMPLE_BYTES, MINUTE_BYTES = 4096, 65536
"""How much of what score functions print is shown: of one sample, and of all of the pool in a minute."""

OVER_CPU_LIMIT = (
    f"signal {signal.SIGPROF.name}"  # how a process ends whose sample lets no signal through
)
DIED = "the grading process ended with {} while it graded this sample"
_LOOK_S = 0.05  # a process that awaits samples gets more of them this often
READY, LOADING, UNUSABLE, BEGUN, GRADED = "ready", "loading", "unusable", "begun", "graded"
LATE = "no score within {:g} s (reward_model.timeout_s)"

Arguments = dict[str, Any]
Function = Callable[..., Any]
Send = Callable[[int, Outcome | list[Outcome]], None]


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
            if shown and not relay(shown.decode(errors="replace"), sys.stdout, flush=True):
                self._num_left_out += len(shown)
        return len(shown)

    def close(self) -> None:
        """Say how much was left out."""
        if self._num_left_out:
            limits = f"{SAMPLE_BYTES:,} of a sample and {MINUTE_BYTES:,} a minute"
            print(
                f"\nscore functions printed {self._num_left_out:,} more bytes; {limits} are shown.",
                flush=True,
            )
        self._num_left_out = 0


class GradingProcess:
    """A grading process, which one thread leads at a time. `kill` may be called by any."""

    def __init__(self, function: ScoreFunction, printed: Printed) -> None:
        self._output, their_output = os.pipe()
        try:
            self._program = SupervisedProgram(__name__, their_output)
        finally:
            os.close(their_output)
        os.set_blocking(self._output, False)
        self.process = self._program.process  # the supervisor of the one that grades
        self._connection = self._program.connection
        self._printed = printed
        self._messages = select.poll()
        self._messages.register(self._connection, select.POLLIN)
        self._messages.register(self._output, select.POLLIN)
        self._is_built_in = function.path is None
        self.accepted = frozenset[
            str
        ]()  # names of the arguments of each call, known once it is ready
        self.is_ready = self.is_ended = self.is_async = self._has_graded = self._may_be_gone = False
        self.since = time.monotonic()
        self.send(function)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for samples: it has not ended, and sends nothing."""
        return not self._connection.poll()

    def send(
        self, message: Any, *, is_idle: bool = False, timeout_s: float = LOADING_LIMIT_S
    ) -> None:
        """Send the score function, or a chunk of samples; a process that takes nothing for `timeout_s` is killed.
        `is_idle`: there are no others with it."""
        # One that was killed since its last sample ends without having begun: no sample is to blame.
        self._may_be_gone = is_idle and self._has_graded
        # A process that has died is found out when its outcomes are read: its pipe has ended.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same_socket:
            same_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._connection.send(message)
        except BlockingIOError:
            # It was frozen, and no sample is to blame: others grade these.
            self.kill()
        except (BrokenPipeError, ConnectionResetError):
            logger.debug("a grading process ended before it had its samples")

    def receive(self, timeout_s: float, last: str = GRADED) -> Any:
        """The next outcome with the number of its sample (or, with `last=READY`, wait for the score function). An
        outcome alone: the process was too late or has died, and is stopped; "skipped": it was killed, or had no sample
        yet. None: one that awaits many samples has none yet. Loading has a limit of its own, `LOADING_LIMIT_S`; a
        QuadrigaError says that the score function or a grader's library cannot be loaded."""
        if self.is_async:
            self._until = time.monotonic() + _LOOK_S
        else:
            self._begin_wait(timeout_s)
        while ready := self._wait():
            if self._connection.fileno() not in ready:
                continue
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                return self._ended()
            if kind == UNUSABLE:
                raise value
            if kind == BEGUN:
                self._may_be_gone = False
                continue
            self._has_graded |= kind == GRADED
            self.is_ready = kind != LOADING
            if kind == READY and value is not None:
                self.is_async, self.accepted = value
            if self.is_async:
                self.since, self._room = time.monotonic(), SAMPLE_BYTES
            if kind == last:
                return value
            self._begin_wait(timeout_s)
        if self.is_async:
            return None
        self.stop()
        if self.is_ready:
            return failure("timeout", f"{LATE.format(timeout_s)}; the grading process was killed")
        where, got = "grading process", f"no sign of life for {LOADING_LIMIT_S:g} s"
        fix = "Look at what runs at import in custom_reward_function.path."
        raise RewardError(
            where, got=got, expected="the score function's file and its imports to load", fix=fix
        )

    def _ended(self) -> Outcome:
        """What the end of the process means for the sample that it had; RewardError where it never got so far."""
        is_killed = self.is_ended
        end = self.stop(is_ending=True)
        if self._is_built_in and end == OVER_CPU_LIMIT:
            return failure("ungradable", "a single operation went beyond the limit of CPU time")
        if self.is_ready or is_killed:
            return failure(
                "skipped" if is_killed or self._may_be_gone else "died", DIED.format(end)
            )
        expected = "a process that starts and loads the score function"
        raise RewardError(
            "grading process", got=end, expected=expected, fix="Its output above may say why."
        )

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
        self._program.kill()

    def stop(self, *, is_ending: bool = False) -> str:
        """Kill, and free what the driver holds; returns how it ended: by itself within 1 s, if `is_ending`."""
        was_closed = self._connection.closed
        self.is_ended = True
        end = self._program.close(patience_s=1.0 if is_ending else 0.0)
        if not was_closed:
            self._room = SAMPLE_BYTES
            self._pass_on()
            os.close(self._output)
        return end


def main(connection_fd: int) -> None:
    """Serve until the driver closes the pipe."""
    connection = Connection(connection_fd)
    cpu_limit.may_end_process = True
    with suppress(
        EOFError, BrokenPipeError, ConnectionResetError
    ):  # the driver is gone or is done with this process
        _serve(connection)


def _serve(connection: Connection) -> None:
    function: ScoreFunction = connection.recv()
    own_pid = os.getpid()

    def send(number: int, outcome: Outcome | list[Outcome]) -> None:
        if os.getpid() != own_pid:
            # A forked copy that came back: the outcome is its parent's to send.
            os._exit(0)
        connection.send_bytes(pickle.dumps((GRADED, (number, outcome)), pickle.HIGHEST_PROTOCOL))

    try:
        compute_score = function.load()
        is_async = inspect.iscoroutinefunction(compute_score)
        accepted = function.accepted_by(compute_score)
        connection.send((READY, (is_async, accepted)))
        if is_async:
            asyncio.run(_serve_many(connection, function, compute_score, accepted, send))
        else:
            _serve_in_turn(connection, function, compute_score, accepted, send)
    except QuadrigaError as error:
        # Only loading raises these here: a score function's own errors are outcomes.
        connection.send((UNUSABLE, error))


def _serve_in_turn(
    connection: Connection,
    function: ScoreFunction,
    compute_score: Function,
    accepted: frozenset[str],
    send: Send,
) -> None:
    loaded: set[str] = set()
    while True:
        chunk = connection.recv()
        connection.send((BEGUN, None))
        with waiting("the score of a sample"):
            for number, _, arguments in chunk:
                name = "" if function.path is not None else grader_name(arguments["data_source"])
                if name and name not in loaded:
                    # Outside of any sample's time: libraries such as sympy take seconds to import.
                    connection.send((LOADING, None))
                    load_grader(name)
                    loaded.add(name)
                    connection.send((READY, None))
                arguments = {key: value for key, value in arguments.items() if key in accepted}
                try:
                    returned = compute_score(**arguments)
                    if inspect.iscoroutine(
                        returned
                    ):  # of a function that is none itself, such as a lambda around one
                        returned = asyncio.run(returned)
                    outcome = _read(returned, function, arguments)
                except BaseException as error:
                    # A score function may call sys.exit, and libraries have limits that are not Exceptions.
                    outcome = raised(error)
                send(number, outcome)


def _read(returned: Any, function: ScoreFunction, arguments: Arguments) -> Outcome | list[Outcome]:
    return (
        read_outcomes(returned, len(arguments["solution_strs"]))
        if function.is_batch
        else read_outcome(returned)
    )


async def _serve_many(
    connection: Connection,
    function: ScoreFunction,
    compute_score: Function,
    accepted: frozenset[str],
    send: Send,
) -> None:
    """Await the outcomes of samples as they come, until the driver closes the pipe."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    ended = loop.create_future()

    async def grade(number: int, timeout_s: float, arguments: Arguments) -> None:
        arguments = {key: value for key, value in arguments.items() if key in accepted}
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                returned = await compute_score(**arguments)
            outcome = _read(returned, function, arguments)
        except BaseException as error:
            is_late = isinstance(error, TimeoutError) and limit.expired()
            outcome = failure("timeout", LATE.format(timeout_s)) if is_late else raised(error)
        send(number, outcome)

    def begin(samples: list[tuple[int, float, Arguments]]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the driver is gone
            connection.send((BEGUN, None))
        for sample in samples:
            tasks.add(task := loop.create_task(grade(*sample)))
            task.add_done_callback(tasks.discard)

    def receive() -> None:
        # In a thread, so that the driver can send while a score function blocks the event loop.
        with suppress(RuntimeError):  # the loop has ended
            try:
                while True:
                    loop.call_soon_threadsafe(begin, connection.recv())
            except (EOFError, ConnectionResetError):
                loop.call_soon_threadsafe(ended.set_result, None)

    threading.Thread(target=receive, daemon=True).start()
    await ended
