# SPDX-License-Identifier: Apache-2.0
"""Requests to stop a run, and the time at which a provider takes its machine back.

The first SIGTERM is a request: the current step is finished and saved, and the run ends as an
interrupted one. The second SIGTERM ends the process at once. Ctrl-C ends a Python script without a
traceback.
"""

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from quadriga.errors import ConfigError
from quadriga.streams import write_error

# Variables of providers: the time at which they take the machine back, in seconds since 1970.
EXPIRY_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)

STOP_NOTICE = "SIGTERM: the run ends after this step, with a checkpoint if it writes any; once more ends it at once."
# While it is set, the training of this process ends after the current step.
stop_requested = threading.Event()

# Handlers of SIGTERM: the original one, then one for each open context. A list, because the garbage
# collector may close contexts of abandoned trainers in any order. Without a context it is empty.
_handlers: list[Any] = []


@contextmanager
def stop_on_sigterm(fallback: Callable[[], str] = str) -> Iterator[None]:
    """Context manager in which SIGTERM is a request to stop.

    Outside the main thread, which alone handles signals, it changes nothing.

    Args:
        fallback: returns a sentence for the notice that SIGTERM prints: which checkpoint remains if
            the step takes longer than the grace period, and the process is killed. By default "".
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    process = os.getpid()

    def request(number: int, frame: FrameType | None) -> None:
        """Handle a SIGTERM: ask the run of this process to stop."""
        # The next SIGTERM has its default effect: it ends the process.
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            # A fork of this process, such as a data loader, has inherited the handler. It ends now.
            os.kill(os.getpid(), number)
            return
        stop_requested.set()
        # print() is not reentrant, and the signal may have interrupted a call of it.
        write_error(f"{STOP_NOTICE} {fallback()}".rstrip() + "\n")

    if not _handlers:
        _handlers.append(signal.getsignal(signal.SIGTERM))
    _handlers.append(request)
    signal.signal(signal.SIGTERM, request)
    try:
        yield
    finally:
        _handlers.remove(request)
        signal.signal(signal.SIGTERM, _handlers[-1])
        # Only the original handler is left, and is in effect again.
        if len(_handlers) == 1:
            _handlers.clear()
        # The request was for this run, even if the context of an abandoned run is still open.
        stop_requested.clear()


def expiry() -> float:
    """The time at which this machine is taken back, in seconds since 1970; infinity if unknown.

    Raises:
        ConfigError: a variable of a provider is not a whole number.
    """
    earliest_s = math.inf
    for name in EXPIRY_VARIABLES:
        text = os.environ.get(name)
        if not text:
            continue
        try:
            earliest_s = min(earliest_s, float(int(text)))
        except ValueError as error:
            raise ConfigError(
                name,
                got=repr(text),
                expected="a whole number of seconds since 1970",
                fix="Unset the variable if no provider sets it.",
            ) from error
    return earliest_s


class Interrupted(KeyboardInterrupt, SystemExit):
    """A KeyboardInterrupt that ends the interpreter like `sys.exit(130)` if nothing catches it."""

    code = 130


@contextmanager
def quiet_interrupt(*, is_reported: bool = False) -> Iterator[None]:
    """Context manager: Ctrl-C ends a script with status 130 and a sentence, not with a traceback.

    Interactive sessions get the usual KeyboardInterrupt.

    Args:
        is_reported: whether another part of the program prints a sentence about the interrupt.

    Raises:
        Interrupted: in place of a KeyboardInterrupt, except in an interactive session.
    """
    try:
        yield
    except Interrupted:
        # A `quiet_interrupt` inside this one has handled the interrupt.
        raise
    except KeyboardInterrupt:
        # Only an interactive session has a prompt.
        if hasattr(sys, "ps1"):
            raise
        if not is_reported:
            print("quadriga: interrupted", file=sys.stderr)
        raise Interrupted from None
