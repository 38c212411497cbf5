# SPDX-License-Identifier: Apache-2.0
"""What a person watches of a long piece of work: a few numbers of each step, as a bar on a terminal or lines in a log.

    step 12/30 ━━━━━━━━━╸────────────── reward 0.430  1 214 tok/s  8.1 s/step  2:24 left · gen

A run logs about a hundred metrics a step; these are the few that are shown, the files of the trackers have them all.

Who prints what: a `Progress` is the only printer of steps while it is open. The console tracker, given the same
`Progress`, leaves the steps to it and adds what a bar cannot show (validation results, samples) through `message`,
above the bar. Without a `Progress` the tracker prints the steps itself, in the same form.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, RenderableColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

# Time left follows the mean of so many last steps: long enough to be calm, short enough to notice a change of pace.
PACE_STEPS = 10
# A terminal has room for these beside the bar; a log line shows every field. Work that has none of them shows its own.
BAR_FIELDS = ("reward", "tok/s", "s/step")
GAP = "  "
VALIDATION_PREFIX = "val-core/"
COMPONENT_PREFIX = "reward/extra/"
# Of what a grader returns beside the score, so many numbers are shown.
NUM_COMPONENTS = 4
COLORS = ("#3b6fd4", "#d9480f", "#2b8a6e", "#6d5bd0", "#a61e4d", "#e67700")
WIDTH, HEIGHT, LEFT, BELOW, ABOVE = 640, 220, 56, 22, 24
INK = 'fill="#7a8191" font-family="sans-serif" font-size="11"'
Points = Sequence[tuple[float, float]]


class Headline(NamedTuple):
    """A metric that is shown: its label, the metrics it may come from (the first that was measured), how it is written:
    a format for numbers, or two of them and the size below which the first one holds."""

    label: str
    sources: tuple[str, ...]
    form: str | tuple[str, float, str]


# The sources are the names of the trainer's metrics; a test of the trainer holds the two together.
HEADLINES = (
    Headline(
        "reward", ("critic/rewards/mean", "critic/score/mean", "reward/mean"), (".3f", 1000, ".3g")
    ),
    Headline("loss", ("actor/pg_loss", "train/loss"), "+.4f"),
    Headline(
        "kl", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), (".1e", 0.001, ".4f")
    ),
    Headline("entropy", ("actor/entropy",), (".3f", 1000, ".3g")),
    Headline("grad", ("actor/grad_norm", "train/grad_norm"), (".3f", 1000, ".3g")),
    Headline("lr", ("actor/lr", "train/lr"), ".1e"),
    Headline("len", ("response_length/mean",), (".1f", 100, ".0f")),
    Headline("mfu", ("perf/mfu/actor", "perf/mfu"), ".0%"),
    Headline("tok/s", ("perf/throughput",), ",.0f"),
    Headline("s/step", ("perf/time_per_step", "timing_s/step"), (".1f", 100, ".0f")),
)


def step_fields(metrics: Mapping[str, float]) -> dict[str, str]:
    """The fields of a step for `Progress.update`: label -> text, in a fixed order, for what was measured in it."""
    fields: dict[str, str] = {}
    for label, sources, form in HEADLINES:
        value = next((metrics[name] for name in sources if name in metrics), None)
        if value is not None and math.isfinite(value):
            if isinstance(form, tuple):
                below, limit, above = form
                # Zero is no small number: it is written in full.
                form = (
                    below if abs(value) < limit and not (value == 0 and below == ".1e") else above
                )
            # A narrow space would be finer typography, but a log is also read by grep and on plain terminals.
            fields[label] = format(value, form).replace(",", " ")
        elif value is not None:
            fields[label] = str(value)
    parts = [name for name in metrics if name.startswith(COMPONENT_PREFIX)][:NUM_COMPONENTS]
    return fields | {
        f"reward.{name.removeprefix(COMPONENT_PREFIX)}": f"{metrics[name]:.3f}" for name in parts
    }


def join_field(label: str, value: str) -> str:
    """A label stands before its value, a unit (a label with a slash, such as tok/s) behind it."""
    return f"{value} {label}" if "/" in label else f"{label} {value}"


class ValidationResult(NamedTuple):
    """One validation metric, taken apart: `val-core/<data source>/<variable>/<statistic>`."""

    source: str
    variable: str
    statistic: str
    value: float

    @property
    def column(self) -> str:
        """What it is called in a table of data sources."""
        return f"{self.variable} {self.statistic}"


def validation_results(metrics: Mapping[str, float]) -> list[ValidationResult]:
    """The main validation metrics among `metrics`, in their order. The statistic begins at the last part with an "@"
    ("mean@8", "best@8/mean"), so a data source may contain slashes."""
    results = []
    for name, value in metrics.items():
        parts = name.removeprefix(VALIDATION_PREFIX).split("/")
        at = max((index for index, part in enumerate(parts) if "@" in part), default=0)
        if name.startswith(VALIDATION_PREFIX) and at >= 2:
            source, variable, statistic = (
                "/".join(parts[: at - 1]),
                parts[at - 1],
                "/".join(parts[at:]),
            )
            results.append(ValidationResult(source, variable, statistic, value))
    return results


class Progress(AbstractContextManager["Progress"]):
    """A bar on a terminal, a bar and a curve in a notebook, or a line per step in a log.
    `total`: the number of steps, which may change between updates.
    `initial`: steps done before this process (a resumed run); they do not enter the pace.
    `console`: where to print; standard output by default. It decides between bar and lines.
    `activity`: says, while the bar is shown, what is being done at the moment, such as `timer.current`."""

    def __init__(
        self,
        total: int,
        initial: int = 0,
        description: str = "step",
        *,
        console: Console | None = None,
        activity: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Long lines in a log stay whole: a log has no edge.
        self._console = console or Console(highlight=False, soft_wrap=True)
        self.total, self._description, self._initial = total, description, initial
        self._activity, self._clock = activity or str, clock
        self._widths: dict[str, int] = {}
        # Steps that are done, and when.
        self._marks: deque[tuple[int, float]] = deque([(initial, clock())], maxlen=PACE_STEPS + 1)
        self._bar: RichProgress | None = None
        self._cell = Cell(total, initial) if self._console.is_jupyter else None
        if self._console.is_interactive:
            self._bar = RichProgress(
                TextColumn("{task.description}", style="bold"),
                TextColumn(f"{{task.completed:>{len(str(total))}.0f}}/{{task.total:.0f}}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[fields]}", markup=False),
                RenderableColumn(self),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(description, total=total, completed=initial, fields="")
            self._bar.start()

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the present pace; None before the first step."""
        (first_step, first_s), (last_step, last_s) = self._marks[0], self._marks[-1]
        if last_step == first_step:
            return None
        per_step_s = (last_s - first_s) / (last_step - first_step)
        return max(0.0, (self.total - last_step) * per_step_s)

    def __rich__(self) -> Text:
        step, marked_s = self._marks[-1]
        if step >= self.total:
            return Text("done", style="green")
        # Between two steps the time since the last one is taken off.
        left_s, since_s = self.left_s, self._clock() - marked_s
        left = "" if left_s is None else f"{clock_text(max(0.0, left_s - since_s))} left"
        doing = self._activity()
        return Text(left, style="cyan").append(
            f"{' · ' if left and doing else ''}{doing}", style="dim"
        )

    def begin(self) -> None:
        """The first step begins now: what went before it, such as a validation, does not enter the pace."""
        self._marks[0] = (self._initial, self._clock())

    def update(self, step: int, fields: Mapping[str, str]) -> None:
        """Show that `step` steps are done, and the numbers of the last one.
        `fields`: label -> text, as `step_fields` makes them. A label with a slash is a unit and stands behind."""
        self._marks.append((step, self._clock()))
        if len(self._marks) == 3 and self._marks[0][0] == self._initial:
            # The first step carries what happens only once (kernels that warm up).
            self._marks.popleft()
        if self._bar is not None and not self._console.is_terminal:
            # The terminal is gone: standard output is a log, which gets lines and no last state of the bar.
            self._bar.live.transient = True
            self._bar.stop()
            self._bar = None
        if self._bar is not None:
            shown = [name for name in BAR_FIELDS if name in fields] or list(fields)
            # Beside the bar and the fields above a component of the reward takes about 20 columns.
            room = max(0, (self._console.width - 80) // 20)
            shown += [name for name in fields if name.startswith("reward.") and name not in shown][
                :room
            ]
            text = GAP.join(join_field(name, fields[name]) for name in shown)
            self._bar.update(self._task, completed=step, total=self.total, fields=text)
            return
        if self._cell is not None:
            self._cell.update(step, self.total, fields)
            return
        position = f"{step:>{len(str(self.total))}}/{self.total}"
        line, left_s = aligned({self._description: position, **fields}, self._widths), self.left_s
        self.message(f"{line}{GAP}{clock_text(left_s)} left" if left_s else line)

    def message(self, text: str) -> None:
        """Print text that stays: above the bar on a terminal, as it is in a log."""
        if self._cell is not None:
            print(text, flush=True)
            return
        # Metrics and responses of a model are not markup: "[/b]" in a response is text.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back. May be called twice."""
        if self._bar is not None:
            self._bar.stop()


def aligned(fields: Mapping[str, str], widths: dict[str, int]) -> str:
    """One of several lines whose fields stand below each other. A field that is missing leaves its place empty.
    `widths`: of the columns, kept from line to line; one grows when a value needs it and never shrinks."""
    for label, value in fields.items():
        widths[label] = max(widths.get(label, 0), len(value))
    cells = []
    for label, width in widths.items():
        cell = join_field(label, fields.get(label, "").rjust(width))
        cells.append(cell if label in fields else " " * len(cell))
    return GAP.join(cells).rstrip()


def clock_text(seconds: float) -> str:
    """2:24, or 1:02:24 from an hour on, or 3 d 04 h from two days on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Picture:
    """A picture that a notebook shows: curves of `(step, value)` by their names, over one axis of values."""

    def __init__(self, curves: Mapping[str, Points]) -> None:
        self.curves = {name: points for name, points in curves.items() if points}

    def _repr_svg_(self) -> str:
        places = [place for points in self.curves.values() for place in points] or [(0.0, 0.0)]
        (first, last), (low, high) = (
            (min(values), max(values)) for values in zip(*places, strict=True)
        )
        x_scale = (WIDTH - LEFT - 12) / ((last - first) or 1)
        y_scale = (HEIGHT - ABOVE - BELOW) / ((high - low) or 1)
        top, bottom = ABOVE, HEIGHT - BELOW
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
        ]
        for y, value in ((top, high), (bottom, low)):
            parts.append(f'<path d="M{LEFT} {y}H{WIDTH - 12}" stroke="#e4e7ec"/>')
            parts.append(
                f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end" {INK}>{value:.3g}</text>'
            )
        for x, step, anchor in ((LEFT, first, "start"), (WIDTH - 12, last, "end")):
            parts.append(
                f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}" {INK}>step {step:g}</text>'
            )
        for number, (name, points) in enumerate(self.curves.items()):
            color = COLORS[number % len(COLORS)]
            line = " ".join(
                f"{LEFT + (x - first) * x_scale:.1f},{bottom - (y - low) * y_scale:.1f}"
                for x, y in points
            )
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.8"/>'
            )
            dot = line.rpartition(" ")[2].split(",")
            parts.append(f'<circle cx="{dot[0]}" cy="{dot[1]}" r="2.6" fill="{color}"/>')
            place = f'x="{LEFT + 180 * number}" y="14" font-family="sans-serif" font-size="12"'
            parts.append(f'<text {place} fill="{color}">{escape(name)}</text>')
        return "".join([*parts, "</svg>"])

    def save(self, path: str | Path) -> Path:
        Path(path).write_text(self._repr_svg_(), encoding="utf-8")
        return Path(path)


class Cell:
    """The output of a notebook's cell: a bar, the numbers of the last step, and the curve of the first of them."""

    def __init__(self, total: int, initial: int) -> None:
        self._curves = dict[str, list[tuple[float, float]]]()
        display = import_module("IPython.display")
        self._html, self._handle = display.HTML, display.display(display.HTML(""), display_id=True)
        self.update(initial, total, {})

    def update(self, step: int, total: int, fields: Mapping[str, str]) -> None:
        """Show that `step` of `total` steps are done, and the numbers of the last one, as `Progress.update` does."""
        for label, value in list(fields.items())[:1]:
            self._curves.setdefault(label, []).append((step, float(value.replace(" ", ""))))
        text = escape("  ".join(f"{label} {value}" for label, value in fields.items()))
        bar = f'<progress value="{step}" max="{total}"></progress> step {step}/{total} <code>{text}</code>'
        curve: Any = Picture(self._curves)._repr_svg_() if self._curves else ""
        self._handle.update(self._html(f"<div>{bar}</div>{curve}"))
