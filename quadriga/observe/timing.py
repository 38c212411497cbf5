# SPDX-License-Identifier: Apache-2.0
"""Where the time goes: the phases of a training step, and the parts of a start-up."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]

BAR_WIDTH = 32
# A gap between two parts is shown when it is long enough for a person to wonder about.
SHOWN_GAP_S = 0.5


class PhaseTimer:
    """Seconds spent in each named phase; phases may nest, and an outer phase includes its inner ones.

    A phase that is entered again adds to its sum. A phase open inside itself is counted once. One timer belongs to
    one thread; `current` may be read from another (a watchdog, a progress bar).
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self.seconds: dict[str, float] = {}

    @property
    def current(self) -> str:
        """Name of the innermost open phase, or an empty string outside of all phases."""
        open_phases = self._open[-1:]
        return open_phases[0] if open_phases else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`, also when the block raises."""
        is_outermost = name not in self._open
        self._open.append(name)
        start = self._clock()
        try:
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

    Time counts from the creation of the timeline, or from the first of the earlier parts. Parts of several threads
    stand beside each other.

    Args:
        title: of the chart.
        clock: seconds, for tests.
        earlier: what another process did before, part after part, each with the time of the wall clock at which it
            began; the last ends now.
    """

    def __init__(
        self, title: str = "start-up", clock: Clock = time.perf_counter, earlier: Sequence[tuple[str, float]] = ()
    ) -> None:
        self._title = title
        self._clock = clock
        # Clocks of two machines may differ a little; no part is shorter than nothing.
        now_s = time.time()
        ages_s = [max(0.0, now_s - began_s) for _, began_s in earlier]
        before_s = max(ages_s, default=0.0)
        self._origin = clock() - before_s
        ends_s = [before_s - age_s for age_s in [*ages_s[1:], 0.0]]
        self._parts = [
            _Part(name, 0, before_s - age_s, end_s)
            for (name, _), age_s, end_s in zip(earlier, ages_s, ends_s, strict=False)
        ]
        self._open = threading.local()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record the block as one part; parts may nest, and a nested one is drawn indented."""
        depth = getattr(self._open, "depth", 0)
        part = _Part(name, depth, self._clock() - self._origin)
        self._parts.append(part)
        self._open.depth = depth + 1
        try:
            yield
        finally:
            self._open.depth = depth
            part.end_s = self._clock() - self._origin

    @property
    def total_s(self) -> float:
        """Seconds from the beginning to the end of the last part (until now if one is open)."""
        if any(part.end_s is None for part in self._parts):
            return self._clock() - self._origin
        return max((part.end_s or 0.0 for part in self._parts), default=0.0)

    def render(self) -> str:
        """Aligned text: one line per part with its seconds and a bar that stands where the part happened."""
        total_s = self.total_s
        rows = self._rows(total_s)
        names = [f"{'  ' * (part.depth + 1)}{part.name}" for part in rows]
        width = max([len(self._title), *map(len, names)])
        lines = [f"{self._title:<{width}}  {total_s:6.1f} s"]
        for name, part in zip(names, rows, strict=True):
            end_s = total_s if part.end_s is None else part.end_s
            bar = _bar(part.start_s, end_s, total_s)
            lines.append(f"{name:<{width}}  {end_s - part.start_s:6.1f} s  {bar}".rstrip())
        return "\n".join(lines)

    def _rows(self, total_s: float) -> list[_Part]:
        """The parts, with a row for each longer time between them that nothing accounts for."""
        rows: list[_Part] = []
        reached_s = 0.0
        for part in self._parts:
            if part.depth == 0:
                if part.start_s - reached_s >= SHOWN_GAP_S:
                    rows.append(_Part("(other)", 0, reached_s, part.start_s))
                reached_s = max(reached_s, total_s if part.end_s is None else part.end_s)
            rows.append(part)
        return rows


def _bar(start_s: float, end_s: float, total_s: float) -> str:
    if total_s <= 0:
        return ""
    first = min(round(start_s / total_s * BAR_WIDTH), BAR_WIDTH - 1)
    last = max(round(end_s / total_s * BAR_WIDTH), first + 1)
    return " " * first + "━" * (last - first)
