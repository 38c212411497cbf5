# SPDX-License-Identifier: Apache-2.0
"""Timers for the phases of a training step and the parts of a start-up."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from quadriga.observe.watchdog import NOTICE_S, waiting

BAR_WIDTH = 32
# A shorter gap between two parts of a start-up is not shown.
SHOWN_GAP_S = 0.5
# Phases of a training step as the progress display names them; other phases keep their names.
ACTIVITIES = {
    "step": "",  # between two phases
    "data": "reading prompts",
    "gen": "generating",
    "gen_max": "generating baselines",
    "reward": "grading",
    "prepare": "computing log-probs",
    "adv": "computing advantages",
    "update_critic": "updating the critic",
    "update_actor": "updating the actor",
    "publish_weights": "publishing weights",
    "testing": "validating",
    "save_checkpoint": "saving",
    "update": "updating",
    "validation": "validating",
}
COUNTED = ("gen", "gen_max", "testing")  # phases whose responses are counted


class PhaseTimer:
    """Seconds spent in each named phase. Phases may nest; an outer phase includes its inner ones.

    A phase that is entered again adds to its sum; a phase inside itself is counted once. A timer
    belongs to one thread. Other threads (a watchdog, a progress bar) may read `current`.

    Attributes:
        seconds: seconds of each phase that has ended, by name.
    """

    # Returns a context manager that names its block in the profile of this process. While no
    # profile is recorded, the context manager does nothing.
    mark: ClassVar[Callable[[str], AbstractContextManager[Any]]] = nullcontext

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []  # open phases, the innermost last
        self.seconds: dict[str, float] = {}

    @property
    def current(self) -> str:
        """Name of the innermost open phase, or an empty string outside of all phases."""
        # Unlike an index, a slice cannot fail if the timer's thread closes the phase meanwhile.
        return "".join(self._open[-1:])

    @property
    def activity(self) -> str:
        """The innermost open phase in words; for a phase in `COUNTED` with the ended responses."""
        phase = self.current
        text = ACTIVITIES.get(phase, phase)
        if phase in COUNTED and Tally.current is not None:
            text += str(Tally.current)
        return text

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`, also when the block raises."""
        is_outermost = name not in self._open
        self._open.append(name)
        start = self._clock()
        try:
            with PhaseTimer.mark(name):
                yield
        finally:
            self._open.pop()
            if is_outermost:
                self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start


class Tally:
    """Number of responses of the running phase that have ended, for the progress display.

    The driver opens a tally. Engines in the driver's process add to it. In other processes no tally
    is open, and `add` does nothing.

    Args:
        total: number of responses of the phase.
    """

    current: ClassVar["Tally | None"] = None

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_ended = 0

    def __str__(self) -> str:
        # A count of 0 is not shown: engines in other processes add nothing.
        return f" {self.num_ended}/{self.total}" if self.num_ended else ""

    @classmethod
    @contextmanager
    def opened(cls, total: int) -> Iterator["Tally"]:
        """Context manager: the open tally if there is one, else a new one for the block."""
        if cls.current is not None:
            yield cls.current
            return
        cls.current = cls(total)
        try:
            yield cls.current
        finally:
            cls.current = None

    @classmethod
    def add(cls, count: int) -> None:
        """Add responses to the open tally; called from any thread."""
        tally = cls.current
        if tally is not None:
            # Without a lock, threads may lose a count. The end of the batch sets the exact number.
            tally.num_ended = min(tally.num_ended + count, tally.total)


@dataclass(slots=True)
class _StartupPart:
    """A part of a start-up. Times are in seconds since the start-up began."""

    name: str
    depth: int  # number of parts of the same thread around this one
    start_s: float
    end_s: float | None = None  # None: the part is in progress


class Timeline:
    """Chart of the parts of a start-up, in the order in which they began.

    Parts of different threads may overlap.

    Args:
        title: title of the chart.
        clock: returns seconds, from any origin.
        begun_s: time at which the start-up began, in seconds since 1970. None: now.
    """

    def __init__(
        self,
        title: str = "start-up",
        clock: Callable[[], float] = time.perf_counter,
        begun_s: float | None = None,
    ) -> None:
        self._title = title
        self._clock = clock
        # Time by `clock` at which the start-up began.
        self._origin = clock()
        if begun_s is not None:
            self._origin -= max(0.0, time.time() - begun_s)
        self._parts: list[_StartupPart] = []
        self._open = threading.local()  # `depth`: number of open parts of the thread
        self._reports = ExitStack()

    def report(self) -> None:
        """Print every few seconds, until `close`, which parts are in progress."""
        wait = waiting(
            f"the {self._title}",
            lambda: (
                ", ".join(part.name for part in self._parts if part.end_s is None)
                or "its next part"
            ),
            NOTICE_S,
        )
        self._reports.enter_context(wait)

    def close(self) -> None:
        """End the reports; may be called twice."""
        self._reports.close()

    @contextmanager
    def part(self, name: str, *, since_origin: bool = False) -> Iterator[None]:
        """Context manager that records its block as a part. A nested part is drawn indented.

        Args:
            name: name of the part.
            since_origin: whether the part began with the start-up, and not with the block.
        """
        depth = getattr(self._open, "depth", 0)
        start_s = 0.0 if since_origin else self._clock() - self._origin
        part = _StartupPart(name, depth, start_s)
        self._parts.append(part)
        self._open.depth = depth + 1
        try:
            with waiting(f"{name}, a part of the {self._title}"):
                yield
        finally:
            self._open.depth = depth
            part.end_s = self._clock() - self._origin

    def render(self) -> str:
        """The chart as text: a line for each part, with its seconds and a bar on a common axis."""
        now_s = self._clock() - self._origin
        rows = []  # name, start and end
        total_s = 0.0
        covered_s = 0.0  # end of the last part so far
        for part in self._parts:
            end_s = now_s if part.end_s is None else part.end_s
            total_s = max(total_s, end_s)
            if part.depth == 0:
                # A long time before this part that belongs to no part gets a row, too.
                if part.start_s - covered_s >= SHOWN_GAP_S:
                    rows.append(("  (other)", covered_s, part.start_s))
                covered_s = max(covered_s, end_s)
            rows.append((f"{'  ' * (part.depth + 1)}{part.name}", part.start_s, end_s))
        width = max([len(self._title), *(len(name) for name, _, _ in rows)])
        lines = [f"{self._title:<{width}}  {total_s:6.1f} s"]
        for name, start_s, end_s in rows:
            bar = ""
            if total_s > 0:
                # First and last column of the bar. A short part has one column.
                first = min(round(start_s / total_s * BAR_WIDTH), BAR_WIDTH - 1)
                last = max(round(end_s / total_s * BAR_WIDTH), first + 1)
                bar = " " * first + "━" * (last - first)
            lines.append(f"{name:<{width}}  {end_s - start_s:6.1f} s  {bar}".rstrip())
        return "\n".join(lines)
