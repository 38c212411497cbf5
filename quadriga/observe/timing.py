# SPDX-License-Identifier: Apache-2.0
"""Where the time goes: the phases of a training step, and the parts of a start-up."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from quadriga.observe.watchdog import NOTICE_S, waiting

BAR_WIDTH = 32
SHOWN_GAP_S = (
    0.5  # a gap between two parts is shown when it is long enough for a person to wonder about
)


class PhaseTimer:
    """Seconds spent in each named phase; phases may nest, and an outer phase includes its inner ones.

    A phase that is entered again adds to its sum. A phase open inside itself is counted once. One timer belongs to
    one thread; `current` may be read from another (a watchdog, a progress bar)."""

    # Makes a block visible in a profile of this process, while there is one.
    mark: ClassVar[Callable[[str], AbstractContextManager[Any]]] = nullcontext

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self.seconds: dict[str, float] = {}

    @property
    def current(self) -> str:
        """Name of the innermost open phase, or an empty string outside of all phases."""
        # A copy: the other thread may close the phase between a test and a look.
        return "".join(self._open[-1:])

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


@dataclass(slots=True)
class _Part:
    name: str
    depth: int
    start_s: float
    end_s: float | None = None


class Timeline:
    """The parts of a start-up in the order in which they began, drawn as a small chart.

    Parts of several threads stand beside each other.

    Args:
        title: of the chart.
        clock: seconds, from any origin.
        begun_s: seconds since 1970 from which time counts; None: now.
    """

    def __init__(
        self,
        title: str = "start-up",
        clock: Callable[[], float] = time.perf_counter,
        begun_s: float | None = None,
    ) -> None:
        self._title, self._clock = title, clock
        self._origin = clock()
        if begun_s is not None:
            self._origin -= max(0.0, time.time() - begun_s)
        self._parts: list[_Part] = []
        self._open = threading.local()
        self._reports = ExitStack()

    def report(self) -> None:
        """Say every few seconds, until `close`, which parts are waited for."""
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
        """Record the block as one part; parts may nest, and a nested one is drawn indented. With `since_origin` it
        began where time counts from, before the block."""
        depth = getattr(self._open, "depth", 0)
        part = _Part(name, depth, 0.0 if since_origin else self._clock() - self._origin)
        self._parts.append(part)
        self._open.depth = depth + 1
        try:
            with waiting(f"{name}, a part of the {self._title}"):
                yield
        finally:
            self._open.depth = depth
            part.end_s = self._clock() - self._origin

    def render(self) -> str:
        """Aligned text: one line per part with its seconds and a bar that stands where the part happened."""
        now_s = self._clock() - self._origin
        spans = [(part, now_s if part.end_s is None else part.end_s) for part in self._parts]
        total_s = max((end_s for _, end_s in spans), default=0.0)
        rows: list[tuple[str, float, float]] = []
        reached_s = 0.0
        for part, end_s in spans:
            if part.depth == 0:
                # Longer times that no part accounts for have a row of their own.
                if part.start_s - reached_s >= SHOWN_GAP_S:
                    rows.append(("  (other)", reached_s, part.start_s))
                reached_s = max(reached_s, end_s)
            rows.append((f"{'  ' * (part.depth + 1)}{part.name}", part.start_s, end_s))
        width = max([len(self._title), *(len(name) for name, _, _ in rows)])
        lines = [f"{self._title:<{width}}  {total_s:6.1f} s"]
        for name, start_s, end_s in rows:
            bar = ""
            if total_s > 0:
                first = min(round(start_s / total_s * BAR_WIDTH), BAR_WIDTH - 1)
                last = max(round(end_s / total_s * BAR_WIDTH), first + 1)
                bar = " " * first + "━" * (last - first)
            lines.append(f"{name:<{width}}  {end_s - start_s:6.1f} s  {bar}".rstrip())
        return "\n".join(lines)
