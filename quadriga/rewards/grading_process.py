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

It ends when the driver does: between samples it sees the end of the pipe; in the middle of a sample its supervisor
ends it (`quadriga.descendants`), with everything that score functions have started.
"""

import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from quadriga.errors import QuadrigaError
from quadriga.observe.watchdog import waiting
from quadriga.rewards.outcome import Outcome, raised, read_outcome, read_outcomes
from quadriga.rewards.scoring import ScoreFunction, grader_name, load_grader

READY, LOADING, UNUSABLE, GRADED = "ready", "loading", "unusable", "graded"

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
    try:
        _serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The driver is gone or is done with this process.
        return


def _serve(connection: Connection) -> None:
    function: ScoreFunction = connection.recv()
    loaded: set[str] = set()
    try:
        compute_score = function.load()
        connection.send((READY, None))
        while True:
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
        return read_outcomes(returned, num_samples) if function.is_batch else read_outcome(returned)
    except BaseException as error:
        # A score function may call sys.exit, and libraries have limits that are not Exceptions.
        return [raised(error)] * num_samples if function.is_batch else raised(error)
    finally:
        if os.getpid() != own_pid:
            # A forked copy that came back: the outcome is its parent's to send.
            os._exit(0)
