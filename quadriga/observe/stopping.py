# SPDX-License-Identifier: Apache-2.0
"""Being asked to stop, and the end of a machine that is known beforehand.

A first SIGTERM asks: the step in work is finished and saved, and the run ends as an interrupted one. The second finds
nothing in its way, and ends the process at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from quadriga.errors import ConfigError

EXPIRY_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Each holds, where a provider sets it, the second since 1970 at which it takes the machine back."""

STOP_NOTICE = "SIGTERM: the run ends after this step, with a checkpoint if it writes any; once more ends it at once."
_requested = threading.Event()


def request_stop() -> None:
    """Ask the run of this process to end after the step in work."""
    _requested.set()


def is_stop_requested() -> bool:
    """Whether it was asked."""
    return _requested.is_set()


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """Inside, SIGTERM is a request. In a thread that is not the main one, which gets no signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    process = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            # A fork of this process, say one that loads data: it is to end as if this handler were not there.
            os.kill(os.getpid(), number)
            return
        request_stop()
        # Not print: the signal may have come in the midst of one.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{STOP_NOTICE}\n".encode())

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _requested.clear()


def expiry(environment: Mapping[str, str] | None = None) -> float | None:
    """The second since 1970 at which this machine is taken back, if the environment says so; the earliest of several.

    Raises:
        ConfigError: a variable holds something else.
    """
    environment = os.environ if environment is None else environment
    found = {name: environment[name] for name in EXPIRY_VARIABLES if environment.get(name)}
    return min((_seconds(name, value) for name, value in found.items()), default=None)


def expires_within(at_s: float | None, duration_s: float) -> bool:
    """Whether the machine is taken back in so many seconds or less. What is past was said of an earlier machine.

    Args:
        at_s: what `expiry` said.
        duration_s: from now.
    """
    return at_s is not None and 0 < at_s - time.time() <= duration_s


def _seconds(name: str, value: str) -> float:
    try:
        return float(int(value))
    except ValueError as error:
        raise ConfigError(
            name,
            got=repr(value),
            expected="a whole number of seconds since 1970",
            fix="Take the variable away where no provider sets it.",
        ) from error
