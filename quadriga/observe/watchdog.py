# SPDX-License-Identifier: Apache-2.0
"""A long wait says what it waits for.

    with waiting("reward of 128 samples", detail=lambda: f"{done} of 128 are graded"):
        ...

prints "waiting 30 s for reward of 128 samples: 96 of 128 are graded" after half a minute, and again every half
minute. A short wait prints nothing. Without a detail it says where the code is that is waited for; of waits in one
another, the innermost speaks that has been going on for so long.
"""

import math
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeVar

Item = TypeVar("Item")
EVERY_S = 30.0
_OURS = str(Path(__file__).resolve().parents[1])
# The longest first: site-packages lies in the standard library's folder.
LIBRARIES = tuple(
    sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, key=len, reverse=True)
)
_open_waits = threading.local()
LAST_REPORT_S = 1.0  # the block's end does not wait longer than this for a detail function that is itself stuck


@contextmanager
def waiting(
    what: str,
    detail: Callable[[], str] | None = None,
    every_s: float | None = None,
    emit: Callable[[str], None] = print,
) -> Iterator[None]:
    """Report every `every_s` seconds (None: `EVERY_S`), from a daemon thread, that the block is still waiting.
    `detail`: says what is there and what is missing; called from the watching thread. None: where this thread is.
    `emit`: where a report goes (`Progress.message` while a progress bar is shown)."""
    period_s = EVERY_S if every_s is None else every_s
    if period_s <= 0:
        raise ValueError(f"waiting(every_s): got {every_s}, expected a positive number of seconds.")
    is_over = threading.Event()
    start, thread = time.monotonic(), threading.get_ident()
    waits: dict[threading.Event, float] = _open_waits.__dict__.setdefault("starts", {})
    waits[is_over] = start

    def watch() -> None:
        while not is_over.wait(period_s):
            inner = list(waits)[list(waits).index(is_over) + 1 :] if is_over in waits else []
            if any(time.monotonic() - waits.get(one, math.inf) >= period_s for one in inner):
                continue
            seconds = round(time.monotonic() - start)
            duration = f"{seconds} s" if seconds < 120 else f"{seconds // 60} min {seconds % 60:02d} s"
            try:
                state = f": {detail()}" if detail else place_of(sys._current_frames().get(thread))
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
        del waits[is_over]
        is_over.set()
        watcher.join(LAST_REPORT_S)


def watched(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, each of which is waited for as by `waiting(what)`."""
    end = object()
    with waiting(what):
        iterator = iter(items)
    while True:
        with waiting(what):
            item = next(iterator, end)
        if item is end:
            return
        yield item  # type: ignore[misc]


def place_of(frame: FrameType | None, *, is_users: bool = False) -> str:
    """The line of users' code that is running, to append; else Quadriga's innermost, or with `is_users` nothing."""
    while frame is not None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(_OURS)
        if is_ours and is_users:
            return ""
        if is_ours or not code.co_filename.startswith((*LIBRARIES, "<frozen")):
            return f", at {code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
