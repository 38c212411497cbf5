# SPDX-License-Identifier: Apache-2.0
"""A long wait says what it waits for.

    with waiting("reward of 128 samples", detail=lambda: f"{done} of 128 are graded"):
        ...

prints "waiting 30 s for reward of 128 samples: 96 of 128 are graded" after half a minute, and again every half
minute. A short wait prints nothing. Without a detail it says where the code is that is waited for; of waits in one
another, the innermost speaks that has been going on for so long. One that speaks less often does not silence others.
"""

import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

Item = TypeVar("Item")
EVERY_S = 30.0
NOTICE_S = 4.0  # of a start-up and an end, where a person looks on
_OURS = str(Path(__file__).resolve().parents[1])
# The longest first: site-packages lies in the standard library's folder.
LIBRARIES = tuple(
    sorted(
        {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
        key=len,
        reverse=True,
    )
)
LAST_REPORT_S = (
    1.0  # the block's end does not wait longer than this for a detail function that is itself stuck
)


@dataclass(eq=False, slots=True)
class _Wait:
    """A block that waits: for what, in which thread, since when; when that is to be reported."""

    what: str
    detail: Callable[[], str] | None
    period_s: float
    emit: Callable[[str], None]
    thread: int
    start: float
    due: float
    reports: threading.Lock  # held from the start of a report to its end

    def report(self, waits: dict["_Wait", None]) -> None:
        try:
            opened, now = list(waits), time.monotonic()
            if self not in opened:  # it has ended, and what its detail looks at with it
                return
            inner = opened[opened.index(self) + 1 :]
            speaks_as_often = [
                one for one in inner if one.thread == self.thread and one.period_s <= self.period_s
            ]
            if any(now - one.start >= self.period_s for one in speaks_as_often):
                return
            seconds = round(now - self.start)
            duration = (
                f"{seconds} s" if seconds < 120 else f"{seconds // 60} min {seconds % 60:02d} s"
            )
            try:
                state = (
                    f": {self.detail()}"
                    if self.detail
                    else place_of(sys._current_frames().get(self.thread))
                )
            except Exception as error:
                # The wait matters more than its description: the report goes on and says why it is short.
                state = f" (its detail failed: {type(error).__name__}: {error})"
            # What was waited for may have come while the detail was made.
            if self in waits:
                self.emit(f"waiting {duration} for {self.what}{state}")
        finally:
            self.reports.release()


class _Watch(threading.Thread):
    """The waits of a process, inner ones after outer ones; has those reported that last."""

    def __init__(self) -> None:
        super().__init__(name="waits", daemon=True)
        self.waits: dict[_Wait, None] = {}
        self.wake, self.wakes_at = threading.Event(), math.inf
        self.start()

    def run(self) -> None:
        while True:
            # Whoever waits from here on wakes this thread, until it is known when it wakes by itself.
            self.wake.clear()
            self.wakes_at, now = math.inf, time.monotonic()
            for wait in [wait for wait in list(self.waits) if wait.due <= now]:
                wait.due = now + wait.period_s
                if wait.reports.acquire(blocking=False):
                    name = f"waiting for {wait.what}"
                    report = threading.Thread(
                        target=wait.report, args=(self.waits,), name=name, daemon=True
                    )
                    try:
                        report.start()
                    except (
                        RuntimeError
                    ):  # there may be no more threads: a slow detail then holds up other reports
                        wait.report(self.waits)
            self.wakes_at = min([now + EVERY_S, *(wait.due for wait in list(self.waits))])
            self.wake.wait(self.wakes_at - now)


_watches: dict[int, _Watch] = {}
"""By process: a fork has none of its parent's threads."""


@contextmanager
def waiting(
    what: str,
    detail: Callable[[], str] | None = None,
    every_s: float | None = None,
    emit: Callable[[str], None] = print,
) -> Iterator[None]:
    """Report every `every_s` seconds (None: `EVERY_S`), from a daemon thread, that the block is still waiting.
    `detail`: says what is there and what is missing; called from that thread. None: where this thread is.
    `emit`: where a report goes (`Progress.message` while a progress bar is shown)."""
    period_s = EVERY_S if every_s is None else every_s
    if period_s <= 0:
        raise ValueError(f"waiting(every_s): got {every_s}, expected a positive number of seconds.")
    start = time.monotonic()
    wait = _Wait(
        what,
        detail,
        period_s,
        emit,
        threading.get_ident(),
        start,
        start + period_s,
        threading.Lock(),
    )
    watch = _watches.get(os.getpid()) or _watches.setdefault(os.getpid(), _Watch())
    watch.waits[wait] = None
    if wait.due < watch.wakes_at:
        watch.wake.set()
    try:
        yield
    finally:
        watch.waits.pop(wait, None)
        if wait.reports.acquire(timeout=LAST_REPORT_S):
            wait.reports.release()


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
