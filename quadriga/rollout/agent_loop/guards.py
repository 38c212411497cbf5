# SPDX-License-Identifier: Apache-2.0
"""What users' code that runs in this process may not do to the rest: print without end, move it elsewhere, block it.

a thread        looks whether the event loop responds; where a user's loop blocks it for too long, a signal
main thread     takes the signal in the middle of that call, and raises there: one conversation ends, others go on
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

CONVERSATION_CHARS, BATCH_CHARS = 4096, 65536
"""How much of what loops, tools and user simulators print is shown: of one conversation, and of a batch."""

_SIGNAL = signal.SIGVTALRM
printed: ContextVar[list[int] | None] = ContextVar("printed", default=None)
"""How much the conversation of the running task, and of all that it starts, has printed; None: it is none."""


class BoundedOutput(io.TextIOBase):
    """A stream that shows what conversations print up to the limits, and passes on everything else.
    `num_left_out`: characters that were not shown."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.num_left_out, self._room = stream, 0, BATCH_CHARS

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """As any stream; what a conversation has printed so far is in its context."""
        if (so_far := printed.get()) is not None:
            shown = text[: max(0, min(self._room, CONVERSATION_CHARS - so_far[0]))]
            so_far[0] += len(text)
            self._room -= len(shown)
            self.num_left_out += len(text) - (len(shown) if relay(shown, self.stream) else 0)
        elif self.stream is not None:
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        if printed.get() is not None:
            relay("", self.stream, flush=True)
        elif self.stream is not None:
            self.stream.flush()

    def close(self) -> None:
        """Nothing: the stream is not the conversations' to close."""


@contextmanager
def guarded(limit_s: float) -> Iterator[None]:
    """Around a batch of conversations, in the event loop that leads them: prints are bounded, a changed working
    directory or standard output is put back, and a loop that blocks all others for `limit_s` gets a TimeoutError.
    The latter is only possible in the main thread."""
    folder, before, is_over = os.open(".", os.O_RDONLY), (sys.stdout, sys.stderr), threading.Event()
    sys.stdout, sys.stderr = outputs = (BoundedOutput(sys.stdout), BoundedOutput(sys.stderr))
    if threading.current_thread() is threading.main_thread():
        signal.signal(_SIGNAL, lambda _, frame: _raise_in_users_code(frame, limit_s))
        watch = threading.Thread(
            target=_watch, args=(asyncio.get_running_loop(), is_over, limit_s), daemon=True
        )
        watch.start()
    try:
        yield
    finally:
        is_over.set()
        sys.stdout, sys.stderr = before
        if num_left_out := sum(output.num_left_out for output in outputs):
            limits = f"{CONVERSATION_CHARS:,} of a conversation and {BATCH_CHARS:,} of a batch"
            logger.warning(
                "conversations printed %s more characters; %s are shown.",
                f"{num_left_out:,}",
                limits,
            )
        if not os.path.samestat(os.fstat(folder), os.stat(".")):
            os.fchdir(folder)
            logger.warning(
                "a loop, tool or user simulator left the working directory; it is %s again.",
                os.getcwd(),
            )
        os.close(folder)


def _watch(loop: asyncio.AbstractEventLoop, is_over: threading.Event, limit_s: float) -> None:
    while not is_over.wait(limit_s / 4):
        responds = threading.Event()
        loop.call_soon_threadsafe(responds.set)
        if not responds.wait(limit_s) and not is_over.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)


def _raise_in_users_code(frame: FrameType | None, limit_s: float) -> None:
    """Where a user's code runs; an engine may compute for as long as it needs."""
    if place := place_of(frame, is_users=True):
        raise TimeoutError(
            f"the loop blocks all conversations for {limit_s:g} s{place}; it should `await`"
        )
