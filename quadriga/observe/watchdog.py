# SPDX-License-Identifier: Apache-2.0
"""A long wait says what it waits for.

    with waiting("reward of 128 samples", detail=lambda: f"{done} of 128 are graded"):
        ...

prints "waiting 30 s for reward of 128 samples: 96 of 128 are graded" after half a minute, and again every half
minute. A short wait prints nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The block's end does not wait longer than this for a detail function that is itself stuck.
LAST_REPORT_S = 1.0


@contextmanager
def waiting(
    what: str,
    detail: Callable[[], str] | None = None,
    every_s: float = 30.0,
    emit: Callable[[str], None] = print,
) -> Iterator[None]:
    """Report every `every_s` seconds, from a daemon thread, that the block is still waiting.

    Args:
        detail: says what is there and what is missing; called from the watching thread.
        emit: where a report goes (`Progress.message` while a progress bar is shown).
    """
    if every_s <= 0:
        raise ValueError(f"waiting(every_s): got {every_s}, expected a positive number of seconds.")
    is_over = threading.Event()
    start = time.monotonic()

    def watch() -> None:
        while not is_over.wait(every_s):
            seconds = round(time.monotonic() - start)
            duration = f"{seconds} s" if seconds < 120 else f"{seconds // 60} min {seconds % 60:02d} s"
            try:
                state = f": {detail()}" if detail else ""
            except Exception as error:
                # The wait matters more than its description: the report goes on and says why it is short.
                state = f" (its detail failed: {type(error).__name__}: {error})"
            # What was waited for may have come while the detail was made.
            if not is_over.is_set():
                emit(f"waiting {duration} for {what}{state}")

    watcher = threading.Thread(target=watch, name=f"waiting for {what}", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join(LAST_REPORT_S)
