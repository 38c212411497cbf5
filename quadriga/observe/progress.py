# SPDX-License-Identifier: Apache-2.0
"""Progress of long work: a few numbers of each step, beside a bar or as lines in a log.

    step 12/30 ━━━───── reward 0.430  1 214 tok/s  8.1 s/step 2:24 left, ends 14:05 · generating
    61/128

A run logs about a hundred metrics a step. The few that are shown here are its `HEADLINES`; the
trackers record all of them.

While a `Progress` is open, it alone prints the steps. The console tracker of the same run leaves
them to it, and prints validation results and samples through `message`, above the bar. Without a
`Progress` the tracker prints the steps itself, in the same form.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, RenderableColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from quadriga.errors import ConfigError

# Number of last steps whose mean duration predicts the time left: large enough for a steady
# prediction, and small enough to follow a change of pace.
PACE_STEPS = 10
# Fields beside the bar on a terminal, which has little room. If a step has none of them, the bar
# shows all its fields. Lines of a log always have all fields.
BAR_FIELDS = ("reward", "tok/s", "s/step")
# Widths of a terminal in characters: from `MEDIUM` on it has room for all `BAR_FIELDS` and the
# running phase, from `WIDE` on for a longer bar and components of the reward too.
MEDIUM = 104
WIDE = 120
GAP = "  "
VALIDATION_PREFIX = "val-core/"
VALIDATION_PREFIXES = (VALIDATION_PREFIX, "val/")  # the second one in supervised runs
NUM_SUMMARY_STEPS = 5
COMPONENT_PREFIX = "reward/extra/"
TOOL_CALLS = "rollout/num_tool_calls"
"""Metric: calls of tools in the conversations of a step."""
NUM_COMPONENTS = 4  # how many of the values that a grader returns beside the score are shown

# Size of the curves in a notebook, and the margins around their axes, in pixels.
WIDTH = 640
HEIGHT = 220
LEFT = 56
BELOW = 22
ABOVE = 24
COLORS = ("#3b6fd4", "#d9480f", "#2b8a6e", "#6d5bd0", "#a61e4d", "#e67700")
INK = 'fill="#7a8191" font-family="sans-serif" font-size="11"'
Points = Sequence[tuple[float, float]]
Fields = Mapping[str, str]
"""Fields of a step: text by label."""


class Headline(NamedTuple):
    """A field of a step that is shown.

    Attributes:
        label: name of the field.
        sources: metrics that the value may come from; the first that was measured counts.
        form: format of the value; or the format of small values, the limit from which a value is
            large, and the format of large ones.
        has_zero: whether a value of 0 is shown.
    """

    label: str
    sources: tuple[str, ...]
    form: str | tuple[str, float, str]
    has_zero: bool = True


# The sources are names of the trainer's metrics. A test of the trainer checks that they exist.
HEADLINES = (
    Headline(
        "reward", ("critic/rewards/mean", "critic/score/mean", "reward/mean"), (".3f", 1000, ".3g")
    ),
    Headline("loss", ("actor/pg_loss", "train/loss"), "+.4f"),
    Headline("critic", ("critic/vf_loss",), (".1e", 0.001, ".4f")),
    Headline("explained", ("critic/vf_explained_var",), ".2f"),
    Headline(
        "kl", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), (".1e", 0.001, ".4f")
    ),
    Headline("entropy", ("actor/entropy",), (".3f", 1000, ".3g")),
    Headline("grad", ("actor/grad_norm", "train/grad_norm"), (".3f", 1000, ".3g")),
    Headline("lr", ("actor/lr", "train/lr"), ".1e"),
    Headline("len", ("response_length/mean",), (".1f", 100, ".0f")),
    # Conversations without tools have the metric, too.
    Headline("calls", (TOOL_CALLS,), ",.0f", has_zero=False),
    Headline("mfu", ("perf/mfu/actor", "perf/mfu"), ".0%"),
    Headline("tok/s", ("perf/throughput",), ",.0f"),
    Headline("s/step", ("perf/time_per_step", "timing_s/step"), (".1f", 100, ".0f")),
)


def step_fields(metrics: Mapping[str, float]) -> dict[str, str]:
    """Format the headlines of a step that were measured, for `Progress.update`.

    Returns:
        Text by label, in a fixed order.
    """
    fields = {}
    for label, sources, form, has_zero in HEADLINES:
        value = next((metrics[name] for name in sources if name in metrics), None)
        if value is None or (value == 0 and not has_zero):
            continue
        if not math.isfinite(value):
            fields[label] = str(value)
            continue
        if isinstance(form, tuple):
            small_form, limit, large_form = form
            # "0.0e+00" reads worse than "0.0000".
            is_plain_zero = value == 0 and small_form == ".1e"
            form = small_form if abs(value) < limit and not is_plain_zero else large_form
        # A plain space between thousands, since logs are also read by grep and on simple terminals.
        fields[label] = format(value, form).replace(",", " ")
    components = [name for name in metrics if name.startswith(COMPONENT_PREFIX)]
    for name in components[:NUM_COMPONENTS]:
        fields[f"reward.{name.removeprefix(COMPONENT_PREFIX)}"] = f"{metrics[name]:.3f}"
    return fields


def join_field(label: str, value: str) -> str:
    """Join a label and its value: "reward 0.43". A label with a slash is a unit: "8.1 s/step"."""
    return f"{value} {label}" if "/" in label else f"{label} {value}"


class ValidationResult(NamedTuple):
    """The parts of a validation metric `val-core/<data source>/<variable>/<statistic>`."""

    source: str
    variable: str
    statistic: str
    value: float

    @property
    def column(self) -> str:
        """Name of the column in a table with a row for each data source."""
        return f"{self.variable} {self.statistic}"


def validation_results(metrics: Mapping[str, float]) -> list[ValidationResult]:
    """Take the main validation metrics out of `metrics` and split their names.

    The name of a data source may contain slashes. So the parts are counted from the end: the
    statistic begins at the last part with an "@" ("mean@8", "best@8/mean").
    """
    results = []
    for name, value in metrics.items():
        if not name.startswith(VALIDATION_PREFIX):
            continue
        parts = name.removeprefix(VALIDATION_PREFIX).split("/")
        start = max((index for index, part in enumerate(parts) if "@" in part), default=0)
        # Leave out a name without a statistic, or without a source and a variable before it.
        if start >= 2:
            source = "/".join(parts[: start - 1])
            statistic = "/".join(parts[start:])
            results.append(ValidationResult(source, parts[start - 1], statistic, value))
    return results


def summary_lines(metrics_of_steps: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Describe the last steps of a run, and its last validation, in lines of text.

    Args:
        metrics_of_steps: metrics by step, in the order of the steps.
    """
    fields_of_steps = {step: step_fields(metrics) for step, metrics in metrics_of_steps.items()}
    shown_steps = [step for step, fields in fields_of_steps.items() if fields]
    widths = {}  # `align_fields` widens the columns from line to line
    lines = []
    for step in shown_steps[-NUM_SUMMARY_STEPS:]:
        lines.append(align_fields({"step": str(step), **fields_of_steps[step]}, widths))
    # The last step with a validation.
    for step, metrics in reversed([*metrics_of_steps.items()]):
        names = [name for name in metrics if name.startswith(VALIDATION_PREFIXES)]
        if names:
            lines += [f"validation of step {step}{GAP}{name} {metrics[name]:.3f}" for name in names]
            break
    return lines


class Progress(AbstractContextManager["Progress"]):
    """A bar on a terminal, a bar and a curve in a notebook, or a line per step in a log.

    Args:
        total: number of steps. The attribute may change between updates.
        initial: steps done before this process, in a resumed run; they do not count for the pace.
        description: word for a step, such as "step".
        console: console to print to, by default standard output. Its kind (terminal, notebook,
            other) decides what is shown.
        activity: returns the current activity, such as `timer.activity`, for the end of the bar.
        quiet_s: seconds without a line after which a log gets a line with the current activity.
            None: lines come with steps and messages only.
        clock: returns seconds, from any origin.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        description: str = "step",
        *,
        console: Console | None = None,
        activity: Callable[[], str] | None = None,
        quiet_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Long lines are not wrapped, so that a line of a log stays one line.
        self._console = console or Console(highlight=False, soft_wrap=True)
        self.total = total
        self._description = description
        self.initial = initial
        self._activity = activity or str  # by default "", the value of str()
        self._clock = clock
        self._widths: dict[str, int] = {}  # widths of the fields in lines, see `align_fields`
        # A pair for each of the last steps: number of steps done by then, and time by `clock`. Before
        # the first step, the pair of the start.
        self._marks: deque[tuple[int, float]] = deque([(initial, clock())], maxlen=PACE_STEPS + 1)
        self._bar: RichProgress | None = None
        self._cell = NotebookCell(total, initial) if self._console.is_jupyter else None
        # Expected duration of the work after the last step, such as the last validation.
        self._closing_s = 0.0
        self._last_line_s = clock()
        self._is_closed = threading.Event()
        if self._console.is_interactive:
            self._bar = RichProgress(
                TextColumn("{task.description}", style="bold"),
                TextColumn(f"{{task.completed:>{len(str(total))}.0f}}/{{task.total:.0f}}"),
                BarColumn(bar_width=24 if self._console.width >= WIDE else 8),
                TextColumn("{task.fields[fields]}", markup=False),
                RenderableColumn(self),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(description, total=total, completed=initial, fields="")
            self._bar.start()
        elif quiet_s is not None and self._cell is None:
            threading.Thread(
                target=self._report_activity, args=(quiet_s,), name="progress", daemon=True
            ).start()

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def left_s(self) -> float | None:
        """Seconds from the end of the last step to the end of the work; None before the first step.

        Predicted from the pace of the steps in `_marks`.
        """
        first_step, first_s = self._marks[0]
        last_step, last_s = self._marks[-1]
        if last_step == first_step:
            return None
        per_step_s = (last_s - first_s) / (last_step - first_step)
        return max(0.0, (self.total - last_step) * per_step_s) + self._closing_s

    def __rich__(self) -> Text:
        """Text at the end of the bar: the time left, and the current activity."""
        step, marked_s = self._marks[-1]
        if step >= self.total:
            return Text("done", style="green")
        text = ""
        left_s = self.left_s
        if left_s is not None:
            # `left_s` counts from the end of the last step.
            since_s = self._clock() - marked_s
            remaining_s = max(0.0, left_s - since_s)
            text = f"{clock_text(remaining_s)} left, {end_text(remaining_s, datetime.now())}"
        activity = self._activity()
        separator = " · " if text and activity else ""
        # If the terminal is too narrow, this column is shortened, not the others.
        state = Text(text, style="cyan", no_wrap=True, overflow="ellipsis")
        return state.append(f"{separator}{activity}", style="dim")

    def begin(self, *, is_repeated: bool = False) -> None:
        """Begin the first step now, so that the pace does not include a validation before it.

        Args:
            is_repeated: whether the work before the first step, such as a validation, follows the
                last step as well. The time left then includes it.
        """
        now = self._clock()
        if is_repeated:
            # The time since construction predicts the time after the last step.
            self._closing_s = now - self._marks[0][1]
        self._marks[0] = (self.initial, now)

    def update(self, step: int, fields: Fields) -> None:
        """Show that `step` steps are done, and the fields of the last one.

        Args:
            step: number of steps that are done.
            fields: fields of the last step, from `step_fields`.
        """
        self._marks.append((step, self._clock()))
        if step >= self.total:
            # The work after the last step has begun, and is no longer predicted.
            self._closing_s = 0.0
        if len(self._marks) == 3 and self._marks[0][0] == self.initial:
            # After two steps, the pace is that of the second. The first one takes longer, for
            # example to compile kernels.
            self._marks.popleft()
        if self._bar is not None and not self._console.is_terminal:
            # Standard output has been redirected since the start. Print lines from now on, and do
            # not print the last state of the bar.
            self._bar.live.transient = True
            self._bar.stop()
            self._bar = None
        if self._bar is not None:
            text = self._bar_text(fields)
            self._bar.update(self._task, completed=step, total=self.total, fields=text)
        elif self._cell is not None:
            self._cell.update(step, self.total, fields)
        else:
            position = f"{step:>{len(str(self.total))}}/{self.total}"
            line = align_fields({self._description: position, **fields}, self._widths)
            left_s = self.left_s
            self.message(f"{line}{GAP}{clock_text(left_s)} left" if left_s else line)

    def _report_activity(self, quiet_s: float) -> None:
        """Print the current activity whenever the log has had no line for `quiet_s` seconds."""
        wait_s = quiet_s
        while not self._is_closed.wait(wait_s):
            now = self._clock()
            wait_s = self._last_line_s + quiet_s - now
            # A line was printed meanwhile: wait until `quiet_s` after it.
            if wait_s > 0:
                continue
            wait_s = quiet_s
            step, marked_s = self._marks[-1]
            since_s = now - marked_s
            parts = [f"after {self._description} {step}/{self.total}: {since_s:.0f} s"]
            # Leave out an empty activity.
            parts += filter(None, [self._activity()])
            left_s = self.left_s
            if left_s:
                # `left_s` counts from the end of the last step.
                parts.append(f"{clock_text(max(0.0, left_s - since_s))} left")
            self.message(GAP.join(parts))

    def _bar_text(self, fields: Fields) -> str:
        """Join the fields for which there is room beside the bar."""
        labels = [label for label in BAR_FIELDS if label in fields] or list(fields)
        width = self._console.width
        if width < MEDIUM:
            labels = labels[:1]
        # Number of components of the reward for which there is room: each takes about 20 columns.
        room = max(0, (width - WIDE) // 20)
        components = [label for label in fields if label.startswith("reward.")]
        labels += [label for label in components if label not in labels][:room]
        return GAP.join(join_field(label, fields[label]) for label in labels)

    def message(self, text: str) -> None:
        """Print text that stays: above the bar on a terminal, unchanged in a log."""
        self._last_line_s = self._clock()
        if self._cell is not None:
            print(text, flush=True)
        else:
            # No markup: "[/b]" in the response of a model is text.
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar and leave its last state on the screen. May be called twice."""
        self._is_closed.set()
        if self._bar is not None:
            self._bar.stop()


def align_fields(fields: Fields, widths: dict[str, int]) -> str:
    """Format fields as a line whose columns are aligned with those of earlier lines.

    Args:
        fields: text by label. A label of an earlier line that is missing here leaves a gap.
        widths: width of each column, shared by all lines and updated here. A column grows when a
            value needs it, and never shrinks.
    """
    for label, value in fields.items():
        widths[label] = max(widths.get(label, 0), len(value))
    cells = []
    for label, width in widths.items():
        cell = join_field(label, fields.get(label, "").rjust(width))
        cells.append(cell if label in fields else " " * len(cell))
    return GAP.join(cells).rstrip()


def clock_text(seconds: float) -> str:
    """Format a duration: "2:24", from an hour on "1:02:24", from two days on "3 d 04 h"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d} h"
    if hours:
        return f"{hours}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"


def end_text(seconds: float, now: datetime) -> str:
    """Format the time `seconds` after `now`: "ends 14:05", on another day "ends Tue 14:05"."""
    end = now + timedelta(seconds=seconds)
    num_days = (end.date() - now.date()).days
    if num_days == 0:
        return f"ends {end:%H:%M}"
    if num_days < 7:
        return f"ends {end:%a %H:%M}"
    return f"ends {end:%d %b %H:%M}"


class Picture:
    """Curves that share their axes, shown as SVG in a notebook.

    Args:
        curves: points `(step, value)` of each curve, by its name.
    """

    def __init__(self, curves: Mapping[str, Points]) -> None:
        self.curves = {name: points for name, points in curves.items() if points}

    def _repr_svg_(self) -> str:
        """Draw the curves as SVG; a notebook calls this."""
        # Ranges of the axes, over all curves.
        points = [point for curve in self.curves.values() for point in curve] or [(0.0, 0.0)]
        steps, values = zip(*points, strict=True)
        first = min(steps)
        last = max(steps)
        low = min(values)
        high = max(values)
        right = WIDTH - 12
        bottom = HEIGHT - BELOW
        # Pixels per unit. A single step or value has a range of 0, for which any scale will do.
        x_scale = (right - LEFT) / ((last - first) or 1)
        y_scale = (bottom - ABOVE) / ((high - low) or 1)
        size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
        for y, value in ((ABOVE, high), (bottom, low)):
            place = f'x="{LEFT - 6}" y="{y + 4}"'
            parts.append(f'<path d="M{LEFT} {y}H{right}" stroke="#e4e7ec"/>')
            parts.append(f'<text {place} text-anchor="end" {INK}>{value:.3g}</text>')
        for x, step, anchor in ((LEFT, first, "start"), (right, last, "end")):
            place = f'x="{x}" y="{HEIGHT - 6}"'
            parts.append(f'<text {place} text-anchor="{anchor}" {INK}>step {step:g}</text>')
        for number, (name, curve) in enumerate(self.curves.items()):
            color = COLORS[number % len(COLORS)]
            line = []
            for step, value in curve:
                x = LEFT + (step - first) * x_scale
                y = bottom - (value - low) * y_scale
                line.append(f"{x:.1f},{y:.1f}")
            stroke = f'fill="none" stroke="{color}" stroke-width="1.8"'
            parts.append(f'<polyline points="{" ".join(line)}" {stroke}/>')
            # A dot marks the last point, whose place is still in x and y.
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>')
            place = f'x="{LEFT + 180 * number}" y="14" font-family="sans-serif" font-size="12"'
            parts.append(f'<text {place} fill="{color}">{escape(name)}</text>')
        return "".join([*parts, "</svg>"])

    def save(self, path: str | Path) -> Path:
        """Write the curves to a file.

        Args:
            path: the file, `.svg` or `.png`; the latter needs matplotlib.

        Raises:
            ConfigError: the name ends otherwise, or matplotlib is not installed.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix == ".svg":
            path.write_text(self._repr_svg_(), encoding="utf-8")
        elif suffix == ".png":
            self._save_png(path)
        else:
            raise ConfigError(
                "plot", got=f"the file {str(path)!r}", expected="a name that ends in .svg or .png"
            )
        return path

    def _save_png(self, path: Path) -> None:
        """Draw the curves with matplotlib.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        try:
            figure_class = import_module("matplotlib.figure").Figure
        except ImportError as error:
            raise ConfigError(
                "plot",
                got=f"the file {str(path)!r}, without matplotlib ({error})",
                expected="a name that ends in .svg, or an environment with matplotlib",
                fix="pip install -e '.[plot]'",
            ) from error
        figure = figure_class(figsize=(WIDTH / 100, HEIGHT / 100), layout="constrained")
        axes = figure.add_subplot(xlabel="step")
        for number, (name, curve) in enumerate(self.curves.items()):
            steps, values = zip(*curve, strict=True)
            color = COLORS[number % len(COLORS)]
            axes.plot(steps, values, color=color, label=name, marker="o", markevery=[-1])
        if self.curves:
            axes.legend()
        figure.savefig(path, dpi=200)


class NotebookCell:
    """Output of a notebook's cell: a bar, the last step's fields, and a curve of their first one.

    Args:
        total: number of steps.
        initial: steps that are done already.
    """

    def __init__(self, total: int, initial: int) -> None:
        self._curves: dict[str, list[tuple[float, float]]] = {}
        display = import_module("IPython.display")
        self._html = display.HTML
        self._handle = display.display(display.HTML(""), display_id=True)
        self.update(initial, total, {})

    def update(self, step: int, total: int, fields: Fields) -> None:
        """Show that `step` of `total` steps are done, with the fields of the last one and a curve.

        The curve is that of the first field, which is the reward or the loss.
        """
        # The text of a field may have spaces between thousands.
        for label, value in list(fields.items())[:1]:
            self._curves.setdefault(label, []).append((step, float(value.replace(" ", ""))))
        text = escape(GAP.join(f"{label} {value}" for label, value in fields.items()))
        bar = f'<progress value="{step}" max="{total}"></progress> step {step}/{total}'
        curves: Any = Picture(self._curves)._repr_svg_() if self._curves else ""
        self._handle.update(self._html(f"<div>{bar} <code>{text}</code></div>{curves}"))
