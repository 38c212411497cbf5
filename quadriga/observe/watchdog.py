# SPDX-License-Identifier: Apache-2.0
"""Reports of long waits.

    with waiting("reward of 128 samples", detail=lambda: f"{done} of 128 are graded"):
        ...

prints "waiting 30 s for reward of 128 samples: 96 of 128 are graded" after half a minute, and again
every half minute. A short wait prints nothing. Without a detail the report names the line of code
that runs. Of nested waits in a thread, only the innermost one that has lasted long enough reports,
unless it reports less often than the waits around it.
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
# Seconds that the end of a block waits for a report in progress, whose detail function may hang.
LAST_REPORT_S = 1.0
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
_LIBRARY_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
# Folders of libraries, the longest path first: site-packages lies in the standard library's folder.
LIBRARIES = tuple(
    sorted({sysconfig.get_path(kind) for kind in _LIBRARY_KINDS}, key=len, reverse=True)
)


@dataclass(eq=False, slots=True)
class _WaitingBlock:
    """A block of `waiting`. Times are by `time.monotonic`, in seconds."""

    subject: str  # what the block waits for
    detail: Callable[[], str] | None
    period_s: float
    emit: Callable[[str], None]
    thread: int  # identity of the thread that executes the block
    start: float
    due: float  # time of the next report
    reporting: threading.Lock  # held while a report is in progress

    def report(self, waits: dict["_WaitingBlock", None]) -> None:
        """Print a report, unless the wait has ended or a wait inside it reports.

        Args:
            waits: all open waits of the process, as an ordered set; an inner wait comes after the
                waits around it. The caller has acquired `reporting`, which is released here.
        """
        try:
            open_waits = list(waits)
            now = time.monotonic()
            # The block has ended since the report was due. Its detail function may fail now.
            if self not in open_waits:
                return
            # Leave the report to a wait inside this one that is long enough itself.
            for inner in open_waits[open_waits.index(self) + 1 :]:
                reports_as_often = inner.thread == self.thread and inner.period_s <= self.period_s
                if reports_as_often and now - inner.start >= self.period_s:
                    return
            seconds = round(now - self.start)
            duration = f"{seconds} s"
            if seconds >= 120:
                duration = f"{seconds // 60} min {seconds % 60:02d} s"
            try:
                frame = sys._current_frames().get(self.thread)
                state = f": {self.detail()}" if self.detail else place_of(frame)
            except Exception as error:
                # The wait matters more than its detail: report it, and why the detail is missing.
                state = f" (its detail failed: {type(error).__name__}: {error})"
            # Print nothing if the wait has ended during the detail function.
            if self in waits:
                self.emit(f"waiting {duration} for {self.subject}{state}")
        finally:
            self.reporting.release()


class _Watch(threading.Thread):
    """Thread that reports the long waits of a process.

    Attributes:
        waits: the open waits as an ordered set; an inner one comes after those around it.
        wake: wakes the thread before `wakes_at`.
        wakes_at: time at which the thread looks at the waits again.
    """

    def __init__(self) -> None:
        super().__init__(name="waits", daemon=True)
        self.waits: dict[_WaitingBlock, None] = {}
        self.wake = threading.Event()
        self.wakes_at = math.inf
        self.start()

    def run(self) -> None:
        """Report each wait that is due, then sleep until the next one is."""
        while True:
            # While `wakes_at` is infinite, each wait that begins sets `wake`. So a wait that begins
            # between the loop below and the sleep ends the sleep.
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
        if not wait.reporting.acquire(blocking=False):
            return
        name = f"waiting for {wait.subject}"
        report = threading.Thread(target=wait.report, args=(self.waits,), name=name, daemon=True)
        try:
            report.start()
        except RuntimeError:
            # The process cannot start more threads. Report in this one, although a slow detail
            # function then delays the reports of other waits.
            wait.report(self.waits)


# The watch of each process, by process number. A fork inherits this table, but not the thread in
# it.
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
        reporting=threading.Lock(),
    )
    # `setdefault` lets two threads that get here at once agree on one watch.
    watch = _watches.get(os.getpid()) or _watches.setdefault(os.getpid(), _Watch())
    watch.waits[wait] = None
    if wait.due < watch.wakes_at:
        watch.wake.set()
    try:
        yield
    finally:
        watch.waits.pop(wait, None)
        # Wait for a report in progress, so that it is not printed after the block's end.
        if wait.reporting.acquire(timeout=LAST_REPORT_S):
            wait.reporting.release()


def watched(items: Iterable[Item], activity: str) -> Iterator[Item]:
    """Iterate over items, with `waiting(activity)` around the start and each request of an item."""
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
    """Name the line that a thread executes, as the end of a message.

    Lines of libraries are skipped, so the line is the innermost one of Quadriga or of the user.

    Args:
        frame: the thread's innermost frame. None: the thread has ended.
        is_users: whether to name a line of the user's code only.

    Returns:
        ", at FILE:LINE in FUNCTION", or "" if there is no such line. With `is_users` it is also ""
        if the innermost line is one of Quadriga.
    """
    while frame is not None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(_PACKAGE_FOLDER)
        if is_ours and is_users:
            return ""
        if is_ours or not code.co_filename.startswith((*LIBRARIES, "<frozen")):
            return f", at {code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
