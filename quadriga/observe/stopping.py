# SPDX-License-Identifier: Apache-2.0
"""A request to stop, and the end of a machine that is known beforehand.

A first SIGTERM is a request: the step in work is finished and saved, and the run ends as an interrupted one. The second
ends the process at once.
"""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from quadriga.errors import ConfigError
from quadriga.streams import write_error

EXPIRY_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Each holds, where a provider sets it, the second since 1970 at which it takes the machine back."""

STOP_NOTICE = "SIGTERM: the run ends after this step, with a checkpoint if it writes any; once more ends it at once."
stop_requested = (
    threading.Event()
)  # where it is set, the training of this process ends after the step in work


@contextmanager
def heeding_sigterm(fallback: Callable[[], str] = str) -> Iterator[None]:
    """Inside, SIGTERM is a request. In a thread that is not the main one, which gets no signals, nothing changes.
    `fallback`: says what stands if the process is killed before the step ends; a step may take longer than the grace.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    process = os.getpid()

    def request(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            # A fork of this process, say one that loads data: it is to end as if this handler were not there.
            os.kill(os.getpid(), number)
            return
        stop_requested.set()
        # Not print: the signal may have come in the midst of one.
        notice = f"{STOP_NOTICE} {fallback()}".rstrip()
        write_error(f"{notice}\n")

    before = signal.signal(signal.SIGTERM, request)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        stop_requested.clear()


def expiry() -> float:
    """The second since 1970 at which this machine is taken back, the earliest of several; infinity if none is known.
    Raises ConfigError: a variable holds something else."""
    seconds = [math.inf]
    for name in EXPIRY_VARIABLES:
        if text := os.environ.get(name):
            try:
                seconds.append(float(int(text)))
            except ValueError as error:
                found = f"{name}: got {text!r}, expected a whole number of seconds since 1970"
                raise ConfigError(
                    found, fix="Take the variable away where no provider sets it."
                ) from error
    return min(seconds)
