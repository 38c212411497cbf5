# SPDX-License-Identifier: Apache-2.0
"""A grading process: the program that runs in it, and the driver's handle of it.

The process is a fresh interpreter (`quadriga.programs.SupervisedProgram`), which does not load
torch unless the user's score function does.

    driver                          grading process
      | -- ScoreFunction -------------> |  loads the score function
      | <------------------ READY ----- |  or UNUSABLE with the error
      | -- [(number, timeout_s, arguments), ...] -> |
      | <------------------ BEGUN ----- |  it has received them
      | <---------------- LOADING ----- |  only before it imports a grader's library; then READY again
      | <- GRADED, (number, outcome) -- |  for each sample, sent before the next one is begun
      | -- [...] ---------------------> |  the next samples, once all are graded

If the score function is a coroutine function, which the content of READY says, many samples are
awaited concurrently, each with its own time limit. Then outcomes come in any order, and the driver
may send further samples at any time.

The process ends when the driver does. Between samples it notices the end of the pipe; during a
sample its supervisor ends it (`quadriga.descendants`), with everything that score functions have
started.

What score functions print is shown, up to `SAMPLE_BYTES` per sample and `MINUTE_BYTES` per minute.
Bytes beyond these limits are counted.
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
from quadriga.rewards.outcome import Outcome, error_outcome, failure, read_outcome, read_outcomes
from quadriga.rewards.scoring import ScoreFunction, grader_name, load_grader
from quadriga.streams import relay

logger = logging.getLogger(__name__)
# Time to start a process and to import the score function's file and its libraries.
LOADING_LIMIT_S = 300.0
SAMPLE_BYTES = 4096
"""Most bytes of output that are shown for one sample."""
MINUTE_BYTES = 65536
"""Most bytes of output that are shown in a minute, for all processes of a pool together."""

# How a process ends if a single operation exceeds the CPU limit, as `SupervisedProgram.close` says
# it (see `cpu_limit`).
OVER_CPU_LIMIT = f"signal {signal.SIGPROF.name}"
DIED_MESSAGE = "the grading process ended with {} while it graded this sample"
LATE_MESSAGE = "no score within {:g} s (reward_model.timeout_s)"
# Interval at which a process with a coroutine function is offered more samples.
_OFFER_INTERVAL_S = 0.05

# Kinds of messages from a grading process.
READY = "ready"
LOADING = "loading"
UNUSABLE = "unusable"
BEGUN = "begun"
GRADED = "graded"

Arguments = dict[str, Any]
"""Arguments of one call of the score function, by name."""
Function = Callable[..., Any]
Send = Callable[[int, Outcome | list[Outcome]], None]
"""Sends the driver the outcome of a sample, or those of a batch, under the number of the call."""


class OutputPrinter:
    """Prints the output of score functions to the driver's standard output, up to the limits.

    All processes of a pool share one printer. Bytes beyond the limits are counted.

    Args:
        source: name of the code that prints, for the notice of omitted bytes.
    """

    def __init__(self, source: str = "score functions") -> None:
        self._source = source
        self._lock = threading.Lock()
        self._minute_begun_at = time.monotonic()
        self._num_bytes_left = MINUTE_BYTES
        self._num_omitted_bytes = 0

    def show(self, data: bytes, limit: int) -> int:
        """Print output up to the limits.

        Args:
            data: the output.
            limit: most bytes that may be shown; `MINUTE_BYTES` may allow fewer.

        Returns:
            Number of bytes that count as shown, even if the standard output did not take them.
        """
        with self._lock:
            if time.monotonic() > self._minute_begun_at + 60:
                self.close()
                self._minute_begun_at = time.monotonic()
                self._num_bytes_left = MINUTE_BYTES
            shown = data[: min(limit, self._num_bytes_left)]
            self._num_bytes_left -= len(shown)
            self._num_omitted_bytes += len(data) - len(shown)
            if shown and not relay(shown.decode(errors="replace"), sys.stdout, flush=True):
                self._num_omitted_bytes += len(shown)
        return len(shown)

    def close(self) -> None:
        """Print how many bytes were omitted, if any, and begin to count anew."""
        if self._num_omitted_bytes:
            print(
                f"\n{self._source} printed {self._num_omitted_bytes:,} more bytes; "
                f"{SAMPLE_BYTES:,} of a call and {MINUTE_BYTES:,} a minute are shown.",
                flush=True,
            )
        self._num_omitted_bytes = 0


class OutputPipe:
    """The read end of the pipe to which a grading process prints.

    Args:
        fd: descriptor of the read end.
        printer: shows the output.

    Attributes:
        fd: the argument.
        num_bytes_left: number of further bytes that may be shown for the current sample.
    """

    def __init__(self, fd: int, printer: OutputPrinter) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._printer = printer
        self.num_bytes_left = SAMPLE_BYTES

    def pass_on(self) -> bool:
        """Show what can be read from the pipe without blocking.

        Returns:
            Whether the pipe has ended.
        """
        try:
            # A single read: a process may print faster than a loop could read.
            data = os.read(self.fd, 1 << 20)
        except BlockingIOError:
            return False
        self.num_bytes_left -= self._printer.show(data, self.num_bytes_left)
        return not data


class GradingProcess:
    """The driver's handle of a grading process.

    One thread at a time uses it, except for `kill`, which any thread may call.

    Args:
        function: the score function.
        printer: shows what the process prints.

    Attributes:
        accepted: names of the arguments that each call passes (`ScoreFunction.accepted_names`);
            known once the process is ready.
        is_ready: whether the process has loaded the score function and is not importing a library.
            The time limit of a sample applies only then.
        is_ended: whether the process was killed or has ended.
        is_async: whether the score function is a coroutine function.
        begun_at: when the current sample was begun, by `time.monotonic`; with a coroutine function,
            when the last message arrived.
    """

    def __init__(self, function: ScoreFunction, printer: OutputPrinter) -> None:
        # The process writes to one end of the pipe, of which it gets a copy.
        output_fd, their_output_fd = os.pipe()
        try:
            self._program = SupervisedProgram(__name__, their_output_fd)
        finally:
            os.close(their_output_fd)
        self._connection = self._program.connection
        self._output = OutputPipe(output_fd, printer)
        self._messages = select.poll()
        self._messages.register(self._connection, select.POLLIN)
        self._messages.register(output_fd, select.POLLIN)
        self._is_built_in = function.path is None
        self.accepted = frozenset[str]()
        self.is_ready = False
        self.is_ended = False
        self.is_async = False
        self._has_graded = False
        # Whether the process may have ended, while it was idle, before it got the samples that were
        # sent last. Then no sample is to blame for the end.
        self._may_be_gone = False
        self.begun_at = time.monotonic()
        self.send(function)

    @property
    def is_idle(self) -> bool:
        """Whether the process waits for samples. False if it has ended."""
        # An idle process sends nothing. The end of the pipe of an ended one counts as readable.
        return not self._connection.poll()

    def send(
        self, message: Any, *, is_idle: bool = False, timeout_s: float = LOADING_LIMIT_S
    ) -> None:
        """Send the score function or a chunk of samples.

        If the process has died, `receive` reports it.

        Args:
            message: the `ScoreFunction`, or a list of `(number, timeout_s, arguments)`.
            is_idle: whether the process has no other samples.
            timeout_s: a process that reads nothing from its pipe for so long is killed.
        """
        self._may_be_gone = is_idle and self._has_graded
        # `Connection` has no time limit, so it is set on the socket, through another descriptor.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same_socket:
            same_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._connection.send(message)
        except BlockingIOError:
            # The process is frozen. No sample is to blame, so other processes grade these samples.
            self.kill()
        except (BrokenPipeError, ConnectionResetError):
            logger.debug("a grading process ended before it had its samples")

    def receive(self, timeout_s: float, last: str = GRADED) -> Any:
        """Wait for the next outcome, or until the process has loaded the score function.

        Args:
            timeout_s: limit for one sample. Loading has its own limit, `LOADING_LIMIT_S`.
            last: kind of message to wait for, GRADED or READY.

        Returns:
            The content of the message: `(number, outcome)` for GRADED, `(is_async, accepted)` for
            READY. An `Outcome` if the process was too late or has ended, and has been stopped: the
            outcome of the sample that is to blame, or of the kind "skipped" if none is. None if a
            coroutine function has no outcome yet.

        Raises:
            QuadrigaError: the score function or a grader's library cannot be loaded.
        """
        if self.is_async:
            # Return soon, so that the caller can send more samples.
            self._wait_until = time.monotonic() + _OFFER_INTERVAL_S
        else:
            self._begin_wait(timeout_s)
        # `_wait` returns an empty list when the time is up.
        while ready_fds := self._wait():
            if self._connection.fileno() not in ready_fds:
                continue  # something was printed, and `_wait` has shown it
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                return self._outcome_of_end()
            if kind == UNUSABLE:
                raise value  # the error that was raised there
            if kind == BEGUN:
                # The samples have arrived: from here on, one of them is to blame for an end.
                self._may_be_gone = False
                continue

            self._has_graded |= kind == GRADED
            self.is_ready = kind != LOADING
            # After LOADING, READY comes without a value.
            if kind == READY and value is not None:
                self.is_async, self.accepted = value
            if self.is_async:
                self._begin_sample()
            if kind == last:
                return value
            # The process has begun or finished loading, so another time limit applies.
            self._begin_wait(timeout_s)

        # The time is up.
        if self.is_async:
            return None
        self.stop()
        if self.is_ready:
            return failure(
                "timeout", f"{LATE_MESSAGE.format(timeout_s)}; the grading process was killed"
            )
        raise RewardError(
            "grading process",
            got=f"no sign of life for {LOADING_LIMIT_S:g} s",
            expected="the score function's file and its imports to load",
            fix="Look at what runs at import in custom_reward_function.path.",
        )

    def _outcome_of_end(self) -> Outcome:
        """Stop a process that has ended, and make the outcome of the sample that it was grading.

        The outcome is "skipped" if no sample is to blame for the end.

        Raises:
            RewardError: the process ended before it had loaded the score function.
        """
        # `kill` was called, in another thread or when the process was frozen.
        was_killed = self.is_ended
        # How the process ended, such as "signal SIGKILL".
        end = self.stop(is_ending=True)
        if self._is_built_in and end == OVER_CPU_LIMIT:
            return failure("ungradable", "a single operation went beyond the limit of CPU time")
        if was_killed or (self.is_ready and self._may_be_gone):
            return failure("skipped", DIED_MESSAGE.format(end))
        if self.is_ready:
            return failure("died", DIED_MESSAGE.format(end))
        raise RewardError(
            "grading process",
            got=end,
            expected="a process that starts and loads the score function",
            fix="Its output above may say why.",
        )

    def _begin_sample(self) -> None:
        """Restart the clock and the limit on output, for the next sample."""
        self.begun_at = time.monotonic()
        self._output.num_bytes_left = SAMPLE_BYTES

    def _begin_wait(self, timeout_s: float) -> None:
        """Restart the clock, and set the end of the wait: the limit of a sample, or of loading."""
        self._begin_sample()
        self._wait_until = self.begun_at + (timeout_s if self.is_ready else LOADING_LIMIT_S)

    def _wait(self) -> list[int]:
        """Wait until there is something to read, and show what was printed.

        Returns:
            The descriptors that can be read; empty if the time is up.
        """
        remaining_s = self._wait_until - time.monotonic()
        if remaining_s <= 0:
            return []
        ready_fds = [fd for fd, _ in self._messages.poll(1000 * remaining_s)]
        # Show output before the caller reads a message, so that it counts for the sample that
        # printed it.
        if self._output.fd in ready_fds:
            self._show_output()
        return ready_fds

    def _show_output(self) -> None:
        """Show what was printed. At the end of the pipe, which is always ready, stop polling it."""
        if self._output.pass_on():
            # KeyError: the end was found before, and `stop` finds it a second time.
            with suppress(KeyError):
                self._messages.unregister(self._output.fd)

    def kill(self) -> None:
        """Kill the process and everything that it has started.

        A thread that waits in `receive` notices the end of the pipe.
        """
        self.is_ended = True
        self._program.kill()

    def stop(self, *, is_ending: bool = False) -> str:
        """Kill the process, and close the driver's descriptors. May be called again.

        Args:
            is_ending: whether the process seems to be ending by itself. It then gets 1 s to do so.

        Returns:
            How the process ended, as in "exit status 1" or "signal SIGKILL".
        """
        was_closed = self._connection.closed
        self.is_ended = True
        end = self._program.close(patience_s=1.0 if is_ending else 0.0)
        if not was_closed:
            # Show what was printed last, such as a traceback.
            self._output.num_bytes_left = SAMPLE_BYTES
            self._show_output()
            os.close(self._output.fd)
        return end


def main(connection_fd: int) -> None:
    """Grade the driver's samples until the driver closes the pipe.

    Args:
        connection_fd: file descriptor of this process's end of the pipe.
    """
    connection = Connection(connection_fd)
    cpu_limit.may_end_process = True
    # These errors mean that the driver has closed the pipe.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(connection)


def _serve(connection: Connection) -> None:
    """Load the score function, and grade samples until the driver closes the pipe."""
    function: ScoreFunction = connection.recv()
    pid = os.getpid()

    def send(number: int, outcome: Outcome | list[Outcome]) -> None:
        """Send the driver the outcome of a call."""
        if os.getpid() != pid:
            # The score function has forked, and the child has returned from it too. The parent
            # sends the outcome.
            os._exit(0)
        connection.send_bytes(pickle.dumps((GRADED, (number, outcome)), pickle.HIGHEST_PROTOCOL))

    try:
        compute_score = function.load()
        is_async = inspect.iscoroutinefunction(compute_score)
        accepted = function.accepted_names(compute_score)
        connection.send((READY, (is_async, accepted)))
        if is_async:
            asyncio.run(_grade_concurrently(connection, function, compute_score, accepted, send))
        else:
            _grade_in_turn(connection, function, compute_score, accepted, send)
    except QuadrigaError as error:
        # Raised while loading: errors of calls of the score function are outcomes.
        connection.send((UNUSABLE, error))


def _grade_in_turn(
    connection: Connection,
    function: ScoreFunction,
    compute_score: Function,
    accepted: frozenset[str],
    send: Send,
) -> None:
    """Grade one sample after the other, until the driver closes the pipe.

    Args:
        connection: the pipe to the driver.
        function: describes the score function.
        compute_score: the loaded score function.
        accepted: names of the arguments that the score function takes.
        send: sends an outcome to the driver.

    Raises:
        RewardError: a built-in grader's library is missing.
    """
    loaded_graders = set()
    while True:
        chunk = connection.recv()
        connection.send((BEGUN, None))
        with waiting("the score of a sample"):
            for number, _, arguments in chunk:
                if function.path is None:
                    grader = grader_name(arguments["data_source"])
                    if grader not in loaded_graders:
                        # Libraries such as sympy take seconds to import. Between LOADING and READY,
                        # the sample's time limit is not applied.
                        connection.send((LOADING, None))
                        load_grader(grader)
                        loaded_graders.add(grader)
                        connection.send((READY, None))
                arguments = select_arguments(arguments, accepted)
                try:
                    returned = compute_score(**arguments)
                    if inspect.iscoroutine(returned):
                        # From a plain function that returns a coroutine, such as a lambda.
                        returned = asyncio.run(returned)
                    outcome = _read_returned(returned, function, arguments)
                except BaseException as error:
                    # Also SystemExit of a score function, and errors such as CPULimitError.
                    outcome = error_outcome(error)
                send(number, outcome)


def select_arguments(arguments: Arguments, accepted: frozenset[str]) -> Arguments:
    """Select the arguments of a call that the score function takes.

    Args:
        arguments: arguments of a call, by name.
        accepted: names of the arguments that the score function takes.
    """
    return {name: value for name, value in arguments.items() if name in accepted}


def _read_returned(
    returned: Any, function: ScoreFunction, arguments: Arguments
) -> Outcome | list[Outcome]:
    """Convert what a score function returned to an outcome, or to a list of one for each sample."""
    if function.is_batch:
        return read_outcomes(returned, len(arguments["solution_strs"]))
    return read_outcome(returned)


async def _grade_concurrently(
    connection: Connection,
    function: ScoreFunction,
    compute_score: Function,
    accepted: frozenset[str],
    send: Send,
) -> None:
    """Grade many samples concurrently, until the driver closes the pipe.

    Args:
        connection: the pipe to the driver.
        function: describes the score function.
        compute_score: the loaded score function, a coroutine function.
        accepted: names of the arguments that the score function takes.
        send: sends an outcome to the driver.
    """
    loop = asyncio.get_running_loop()
    # Keeps the tasks alive: the event loop itself has only weak references to them.
    tasks = set[asyncio.Task[None]]()
    pipe_ended = loop.create_future()

    async def grade(number: int, timeout_s: float, arguments: Arguments) -> None:
        """Grade one sample within its time limit, and send its outcome."""
        arguments = select_arguments(arguments, accepted)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                returned = await compute_score(**arguments)
            outcome = _read_returned(returned, function, arguments)
        except BaseException as error:
            # Also SystemExit of a score function, which would end the event loop for all samples.
            # The score function may raise a TimeoutError itself, too.
            if isinstance(error, TimeoutError) and limit.expired():
                outcome = failure("timeout", LATE_MESSAGE.format(timeout_s))
            else:
                outcome = error_outcome(error)
        send(number, outcome)

    def begin(samples: list[tuple[int, float, Arguments]]) -> None:
        """Confirm that samples have arrived, and begin to grade them."""
        # These errors mean that the driver has closed the pipe, which `receive` notices too.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send((BEGUN, None))
        for number, timeout_s, arguments in samples:
            task = loop.create_task(grade(number, timeout_s, arguments))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def receive() -> None:
        """Pass samples from the driver to the event loop; runs in a thread.

        The end of the pipe resolves `pipe_ended`, which ends the event loop.
        """
        # RuntimeError: the event loop is closed already.
        with suppress(RuntimeError):
            try:
                while True:
                    loop.call_soon_threadsafe(begin, connection.recv())
            except (EOFError, ConnectionResetError):
                loop.call_soon_threadsafe(pipe_ended.set_result, None)

    # In a thread, so that samples are read from the pipe even while a score function blocks the
    # event loop: the driver's `send` must not block.
    threading.Thread(target=receive, daemon=True).start()
    await pipe_ended
