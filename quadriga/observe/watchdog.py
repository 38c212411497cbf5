# SPDX-License-Identifier: Apache-2.0
"""Reports of long waits.

    with waiting("reward of 128 samples", detail=lambda: f"{done} of 128 are graded"):
        ...

prints "waiting 30 s for reward of 128 samples: 96 of 128 are graded" after half a minute, and again every half
minute. A short wait prints nothing. Without a detail the report names the line of code that runs. Of nested waits the
innermost that has lasted long enough reports; a wait that reports less often does not silence those around it.
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
NOTICE_S = 4.0  # during a start-up and an end, which a person watches
# The block's end waits at most so long for a report whose detail function hangs.
LAST_REPORT_S = 1.0
_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARY_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
# The longest first: site-packages lies in the standard library's folder.
LIBRARIES = tuple(
    sorted({sysconfig.get_path(kind) for kind in _LIBRARY_KINDS}, key=len, reverse=True)
)


@dataclass(eq=False, slots=True)
class _WaitingBlock:
    """A block that waits; times by `time.monotonic`, in seconds."""

    subject: str  # what the block waits for
    detail: Callable[[], str] | None
    period_s: float
    emit: Callable[[str], None]
    thread: int
    start: float
    due: float  # time of the next report
    reports: threading.Lock  # held from the start of a report to its end

    def report(self, waits: dict["_WaitingBlock", None]) -> None:
        """Print a report, unless the wait has ended or a wait inside it reports."""
        try:
            open_waits = list(waits)
            now = time.monotonic()
            # After the end of the block its detail function may fail.
            if self not in open_waits:
                return
            for inner in open_waits[open_waits.index(self) + 1 :]:
                reports_as_often = inner.thread == self.thread and inner.period_s <= self.period_s
                if reports_as_often and now - inner.start >= self.period_s:
                    return
            seconds = round(now - self.start)
            duration = f"{seconds} s"
            if seconds >= 120:
                duration = f"{seconds // 60} min {seconds % 60:02d} s"
            try:
                state = (
                    f": {self.detail()}"
                    if self.detail
                    else place_of(sys._current_frames().get(self.thread))
                )
            except Exception as error:
                # The wait matters more than its detail: report it, and why the detail is missing.
                state = f" (its detail failed: {type(error).__name__}: {error})"
            # The wait may have ended during the detail function.
            if self in waits:
                self.emit(f"waiting {duration} for {self.subject}{state}")
        finally:
            self.reports.release()


class _Watch(threading.Thread):
    """Thread that reports the long waits of a process."""

    def __init__(self) -> None:
        super().__init__(name="waits", daemon=True)
        self.waits: dict[_WaitingBlock, None] = {}  # inner ones after outer ones
        self.wake = threading.Event()
        self.wakes_at = math.inf
        self.start()

    def run(self) -> None:
        """Report each wait that is due, then sleep until the next one is."""
        while True:
            # With `wakes_at` at infinity, a wait that begins from here on wakes this thread.
            self.wake.clear()
            self.wakes_at = math.inf
            now = time.monotonic()
            for wait in list(self.waits):
                if wait.due <= now:
                    wait.due = now + wait.period_s
                    self._report(wait)
            self.wakes_at = min([now + EVERY_S, *(wait.due for wait in list(self.waits))])
            self.wake.wait(self.wakes_at - now)

    def _report(self, wait: _WaitingBlock) -> None:
        """Report a wait in a new thread, unless its last report is still in progress."""
        if not wait.reports.acquire(blocking=False):
            return
        name = f"waiting for {wait.subject}"
        report = threading.Thread(target=wait.report, args=(self.waits,), name=name, daemon=True)
        try:
            report.start()
        except RuntimeError:
            # The process cannot start threads. Here a slow detail function delays other reports.
            wait.report(self.waits)


# By process number: a fork does not have the threads of its parent.
_watches: dict[int, _Watch] = {}


@contextmanager
def waiting(
    activity: str,
    detail: Callable[[], str] | None = None,
    every_s: float | None = None,
    emit: Callable[[str], None] = print,
) -> Iterator[None]:
    """Context manager that reports, from a daemon thread, while its block waits.

    Args:
        activity: what the block waits for.
        detail: says what has arrived and what is missing; called in the daemon thread. None: the
            report names the line of code that the block executes.
        every_s: seconds between two reports. None: `EVERY_S`.
        emit: prints a report; `Progress.message` while a progress bar is shown.

    Raises:
        ValueError: `every_s` is not positive.
    """
    period_s = EVERY_S if every_s is None else every_s
    if period_s <= 0:
        raise ValueError(f"waiting(every_s): got {every_s}, expected a positive number of seconds.")
    start = time.monotonic()
    wait = _WaitingBlock(
        subject=activity,
        detail=detail,
        period_s=period_s,
        emit=emit,
        thread=threading.get_ident(),
        start=start,
        due=start + period_s,
        reports=threading.Lock(),
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


def watched(items: Iterable[Item], activity: str) -> Iterator[Item]:
    """Iterate over items, with `waiting(activity)` for each of them."""
    end = object()
    with waiting(activity):
        iterator = iter(items)
    while True:
        with waiting(activity):
            item = next(iterator, end)
        if item is end:
            return
        yield item  # type: ignore[misc]


def place_of(frame: FrameType | None, *, is_users: bool = False) -> str:
    """Innermost line outside the libraries that a thread executes, as the end of a message.

    Args:
        frame: the thread's frame.
        is_users: only a line of users' code counts, not one of Quadriga.

    Returns:
        ", at FILE:LINE in FUNCTION", or "" if there is no such line.
    """
    while frame is not None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(_OURS)
        if is_ours and is_users:
            return ""
        if is_ours or not code.co_filename.startswith((*LIBRARIES, "<frozen")):
            return f", at {code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
