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

# Limits on the shown output of loops, tools and user simulators, in characters.
CONVERSATION_CHARS = 4096
BATCH_CHARS = 65536

# A list whose only entry is the number of characters that the conversation of the running task has
# printed. All tasks and threads of the conversation share the list. None: no conversation runs.
num_printed: ContextVar[list[int] | None] = ContextVar("num_printed", default=None)

_SIGNAL = signal.SIGVTALRM


class BoundedOutput(io.TextIOBase):
    """Stream that limits the output of conversations, and passes all other output on.

    Attributes:
        stream: the stream on which the output is shown. None: the process has none.
        num_left_out: characters that were not shown.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.num_left_out = 0
        self._room = BATCH_CHARS  # characters that the batch may still show

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text up to the limits of the conversation, and leave out the rest.

        Returns:
            The length of the whole text, as if all of it were written.
        """
        counter = num_printed.get()
        if counter is None:
            # No conversation runs, so the output is not limited.
            if self.stream is not None:
                self.stream.write(text)
            return len(text)
        # What is left of the limits of the batch and the conversation; negative if it is exceeded.
        num_left = min(self._room, CONVERSATION_CHARS - counter[0])
        shown_text = text[: max(0, num_left)]
        counter[0] += len(text)
        self._room -= len(shown_text)
        # All of the text counts as left out until `relay` has shown a part of it. `relay` returns
        # False if the stream is missing or refuses the text.
        self.num_left_out += len(text)
        if relay(shown_text, self.stream):
            self.num_left_out -= len(shown_text)
        return len(text)

    def take_num_left_out(self) -> int:
        """Return and reset `num_left_out`, and allow another `BATCH_CHARS` characters."""
        num_left_out = self.num_left_out
        self.num_left_out = 0
        self._room = BATCH_CHARS
        return num_left_out

    def flush(self) -> None:
        """Flush the stream. In a conversation, an error of the stream is ignored."""
        if num_printed.get() is not None:
            relay("", self.stream, flush=True)
        elif self.stream is not None:
            self.stream.flush()

    def close(self) -> None:
        """Do nothing: users' code must not close the stream."""


class _ProcessState:
    """Standard streams and working directory of the process, which users' code may change.

    Batches of conversations may overlap: a stream of rollouts leads several at the same time. The
    first batch replaces the standard streams by bounded ones, and the last one restores the
    originals.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_batches = 0

    def enter(self) -> None:
        """Begin a batch: note what is to be restored, and bound the output of conversations."""
        with self._lock:
            if self._num_batches == 0:
                # A file descriptor leads back to the folder even if the folder is renamed.
                self._folder = os.open(".", os.O_RDONLY)
                self._streams = (sys.stdout, sys.stderr)
                self._outputs = (BoundedOutput(sys.stdout), BoundedOutput(sys.stderr))
                sys.stdout, sys.stderr = self._outputs
            self._num_batches += 1

    def leave(self) -> None:
        """End a batch: undo what users' code has changed, and log how much was not shown."""
        with self._lock:
            self._num_batches -= 1
            is_last = self._num_batches == 0
            # Set again after every batch, because users' code may have replaced the streams.
            sys.stdout, sys.stderr = self._streams if is_last else self._outputs
            num_left_out = sum(output.take_num_left_out() for output in self._outputs)
            if num_left_out:
                logger.warning(
                    "conversations printed %s more characters than are shown: %s.",
                    f"{num_left_out:,}",
                    f"at most {CONVERSATION_CHARS:,} of each, and {BATCH_CHARS:,} of a batch",
                )
            if not os.path.samestat(os.fstat(self._folder), os.stat(".")):
                os.fchdir(self._folder)
                logger.warning(
                    "a loop, tool or user simulator left the working directory; it is %s again.",
                    os.getcwd(),
                )
            if is_last:
                os.close(self._folder)


_process_state = _ProcessState()


@contextmanager
def guard_users_code(limit_s: float) -> Iterator[None]:
    """Context manager for a batch of conversations, entered in the event loop that leads them.

    It limits their output, and restores the working directory and the standard streams afterwards.
    In the main thread it also raises a TimeoutError in users' code that blocks the event loop.

    Args:
        limit_s: time for which users' code may block the event loop, in seconds.
    """
    _process_state.enter()
    is_over = threading.Event()

    def interrupt(_: int, frame: FrameType | None) -> None:
        """Handle the signal: raise an error in users' code, but let our own code go on."""
        # Such as ", at loop.py:12 in run"; "" if our own code is running.
        place = place_of(frame, is_users=True)
        if place:
            raise TimeoutError(
                f"the loop blocks all conversations for {limit_s:g} s{place}; `await` the slow call"
            )

    def watch(loop: asyncio.AbstractEventLoop) -> None:
        """Send the signal to the main thread whenever its loop does not respond in time."""
        while not is_over.wait(limit_s / 4):
            # A loop that is not blocked calls the function at once.
            has_responded = threading.Event()
            loop.call_soon_threadsafe(has_responded.set)
            if not has_responded.wait(limit_s) and not is_over.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    if threading.current_thread() is threading.main_thread():
        # The handler stays after the batch. Without one, a signal that comes late would end the
        # process.
        signal.signal(_SIGNAL, interrupt)
        loop = asyncio.get_running_loop()
        threading.Thread(target=watch, args=(loop,), daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        _process_state.leave()
