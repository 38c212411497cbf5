# SPDX-License-Identifier: Apache-2.0
"""The program of one grading process: receives samples over a pipe, sends one outcome each.

It is started as a fresh interpreter (`COMMAND`), not through `multiprocessing`: so it neither inherits the
trainer's threads and memory, nor runs the user's script again, and it never loads torch unless the user's score
function does.

    driver                          grading process
      | -- settings ------------------> |  loads the score function
      | <------------------ READY ----- |  or UNUSABLE, error
      | -- [arguments, ...] ----------> |
      | <---------------- LOADING ----- |  only before a grader's library is imported; READY follows
      | <----------- GRADED, outcome -- |  one at a time, each sent before the next sample is begun
      | -- [arguments, ...] ----------> |  the next samples, once all are graded

Of a coroutine function (READY comes with true) many samples are awaited at a time, and more may come at any time:

      | -- [(number, timeout_s, arguments), ...] -> |  each has a time limit of its own
      | <------------ GRADED, (number, outcome) --- |  in any order

It ends when the driver does: between samples it sees the end of the pipe; in the middle of a sample its supervisor
ends it (`quadriga.descendants`), with everything that score functions have started.
"""

import asyncio
import inspect
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from quadriga.errors import QuadrigaError
from quadriga.observe.watchdog import waiting
from quadriga.rewards.outcome import Outcome, failure, raised, read_outcome, read_outcomes
from quadriga.rewards.scoring import ScoreFunction, grader_name, load_grader

READY, LOADING, UNUSABLE, GRADED = "ready", "loading", "unusable", "graded"

LATE = "no score within {:g} s (reward_model.timeout_s)"

COMMAND = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from quadriga.descendants import supervise; supervise(int(sys.argv[2])); "
    "from quadriga.rewards.grading_process import main; main(int(sys.argv[1]))"
)
"""Program text for `python -c`: arguments are the two file descriptors and the driver's import path."""

Arguments = dict[str, Any]


def main(connection_fd: int) -> None:
    """Serve until the driver closes the pipe."""
    # Programs that a score function starts must not keep the pipe open after this process has died.
    os.set_inheritable(connection_fd, False)
    connection = Connection(connection_fd)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver is gone or is done with this process
        _serve(connection)


def _serve(connection: Connection) -> None:
    function: ScoreFunction = connection.recv()
    loaded: set[str] = set()
    try:
        compute_score = function.load()
        is_async = inspect.iscoroutinefunction(compute_score)
        connection.send((READY, is_async))
        if is_async:
            asyncio.run(_serve_many(connection, function, compute_score))
        while not is_async:
            chunk = connection.recv()
            with waiting("the score of a sample"):
                for arguments in chunk:
                    name = "" if function.path is not None else grader_name(arguments["data_source"])
                    if name and name not in loaded:
                        # Outside of any sample's time: libraries such as sympy take seconds to import.
                        connection.send((LOADING, None))
                        load_grader(name)
                        loaded.add(name)
                        connection.send((READY, None))
                    outcome = _grade(function, compute_score, arguments)
                    connection.send_bytes(pickle.dumps((GRADED, outcome), pickle.HIGHEST_PROTOCOL))
    except QuadrigaError as error:
        # Only loading raises these here: a score function's own errors are outcomes.
        connection.send((UNUSABLE, error))


def _grade(function: ScoreFunction, compute_score: Callable[..., Any], arguments: Arguments) -> Outcome | list[Outcome]:
    """The outcome of one sample, or of each of a list of samples when the function grades batches."""
    num_samples, own_pid = len(arguments["solution_strs"]) if function.is_batch else 1, os.getpid()
    try:
        returned = compute_score(**arguments)
        if inspect.iscoroutine(returned):  # of a function that is none itself, such as a lambda around one
            returned = asyncio.run(returned)
        return read_outcomes(returned, num_samples) if function.is_batch else read_outcome(returned)
    except BaseException as error:
        # A score function may call sys.exit, and libraries have limits that are not Exceptions.
        return raised(error)
    finally:
        if os.getpid() != own_pid:
            # A forked copy that came back: the outcome is its parent's to send.
            os._exit(0)


async def _serve_many(connection: Connection, function: ScoreFunction, compute_score: Callable[..., Any]) -> None:
    """Await the outcomes of samples as they come, until the driver closes the pipe."""
    loop, own_pid, tasks = asyncio.get_running_loop(), os.getpid(), set[asyncio.Task[None]]()
    ended = loop.create_future()

    async def grade(number: int, timeout_s: float, arguments: Arguments) -> None:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                returned = await compute_score(**arguments)
            num_samples = len(arguments["solution_strs"]) if function.is_batch else 1
            outcome = read_outcomes(returned, num_samples) if function.is_batch else read_outcome(returned)
        except BaseException as error:
            is_late = isinstance(error, TimeoutError) and limit.expired()
            outcome = failure("timeout", LATE.format(timeout_s)) if is_late else raised(error)
        if os.getpid() != own_pid:
            os._exit(0)
        connection.send_bytes(pickle.dumps((GRADED, (number, outcome)), pickle.HIGHEST_PROTOCOL))

    def begin(samples: list[tuple[int, float, Arguments]]) -> None:
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
