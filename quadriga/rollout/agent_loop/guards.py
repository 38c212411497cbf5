# SPDX-License-Identifier: Apache-2.0
"""Guards around users' code in this process: against endless output, a changed working directory, and blocking.

watch thread    checks that the event loop responds; sends a signal when a user's code blocks it for too long
main thread     handles the signal inside the blocking call, and raises there: one conversation ends, others go on
"""

import asyncio
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from quadriga.observe.watchdog import place_of
from quadriga.streams import relay

logger = logging.getLogger(__name__)

# Limits on the output of loops, tools and user simulators that is shown, in characters.
CONVERSATION_CHARS = 4096
BATCH_CHARS = 65536

# Characters that the conversation of the running task has printed, with the tasks and threads that
# it has started, in a list of one number that they share. None: no conversation runs.
printed: ContextVar[list[int] | None] = ContextVar("printed", default=None)

_SIGNAL = signal.SIGVTALRM


class BoundedOutput(io.TextIOBase):
    """Stream that shows the output of conversations up to the limits, and all other output.

    Attributes:
        stream: the stream on which the output is shown.
        num_left_out: characters that were not shown.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.num_left_out = 0
        self._room = BATCH_CHARS

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text, or of a conversation's text the part within its limits."""
        counter = printed.get()
        if counter is not None:
            limit = min(self._room, CONVERSATION_CHARS - counter[0])
            shown = text[: max(0, limit)]
            counter[0] += len(text)
            self._room -= len(shown)
            self.num_left_out += len(text)
            if relay(shown, self.stream):
                self.num_left_out -= len(shown)
        elif self.stream is not None:
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream. An error of the stream does not end a conversation."""
        if printed.get() is not None:
            relay("", self.stream, flush=True)
        elif self.stream is not None:
            self.stream.flush()

    def close(self) -> None:
        """Do nothing: users' code must not close the stream."""


@contextmanager
def guarded(limit_s: float) -> Iterator[None]:
    """Context manager for a batch of conversations, in the event loop that leads them.

    It limits their output, restores the working directory and the standard streams, and raises a
    TimeoutError in a user's loop that blocks all others for `limit_s` seconds. The last is possible
    only in the main thread.
    """
    folder = os.open(".", os.O_RDONLY)
    streams = (sys.stdout, sys.stderr)
    outputs = (BoundedOutput(sys.stdout), BoundedOutput(sys.stderr))
    sys.stdout, sys.stderr = outputs
    is_over = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(_SIGNAL, lambda _, frame: _raise_in_users_code(frame, limit_s))
        arguments = (asyncio.get_running_loop(), is_over, limit_s)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        sys.stdout, sys.stderr = streams
        num_left_out = sum(output.num_left_out for output in outputs)
        if num_left_out:
            logger.warning(
                "conversations printed %s more characters; %s are shown.",
                f"{num_left_out:,}",
                f"{CONVERSATION_CHARS:,} of a conversation and {BATCH_CHARS:,} of a batch",
            )
        if not os.path.samestat(os.fstat(folder), os.stat(".")):
            os.fchdir(folder)
            logger.warning(
                "a loop, tool or user simulator left the working directory; it is %s again.",
                os.getcwd(),
            )
        os.close(folder)


def _watch(loop: asyncio.AbstractEventLoop, is_over: threading.Event, limit_s: float) -> None:
    """Send a signal to the main thread whenever the loop does not respond for `limit_s` seconds."""
    while not is_over.wait(limit_s / 4):
        responds = threading.Event()
        loop.call_soon_threadsafe(responds.set)
        if not responds.wait(limit_s) and not is_over.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)


def _raise_in_users_code(frame: FrameType | None, limit_s: float) -> None:
    """Raise a TimeoutError if users' code runs. An engine may compute for as long as it needs."""
    place = place_of(frame, is_users=True)
    if place:
        raise TimeoutError(
            f"the loop blocks all conversations for {limit_s:g} s{place}; it should `await`"
        )
