# SPDX-License-Identifier: Apache-2.0
"""The learning curve of a run as one picture: reward and validation above, answer length and speed below."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.errors import ConfigError, DataError
from quadriga.observe.progress import HEADLINES, validation_results
from quadriga.observe.tracking.jsonl import read_metrics

# Left edge of the axes, and of the titles above them, as a share of the width.
LEFT = 0.062
INK, QUIET, HAIRLINE = "#1f2430", "#7a8191", "#e4e7ec"
REWARD, VALIDATION, LENGTH, SPEED = "#3b6fd4", "#d9480f", "#6d5bd0", "#2b8a6e"
# More data sources than this in one panel are a tangle; the first ones are shown and the picture says so.
SHOWN_SOURCES = 4
SOURCE_COLORS = (VALIDATION, "#a61e4d", "#e67700", "#5c4033")
SOURCE_MARKERS = "Dso^"

Style = dict[str, Any]
# The smoothing window of a curve is this part of the run.
SMOOTHING = 15

STYLE: Style = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": HAIRLINE,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": HAIRLINE,
    "grid.linewidth": 0.8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}

Series = tuple[np.ndarray, np.ndarray]


def plot_curves(
    metrics_file: Path,
    output: Path,
    *,
    title: str = "",
    subtitle: str = "",
    validation_label: str = "",
) -> Path:
    """Draw the run whose `metrics.jsonl` is given; what it did not measure is left out of the picture.

    Args:
        metrics_file: written by the jsonl tracking backend.
        output: the picture; its suffix chooses the format (png, svg, pdf).
        title: one line above, such as "SmolLM2-135M learns to compare numbers".
        subtitle: a quieter line below it: algorithm, batch, machine, time.
        validation_label: what the validation is called in the picture, such as "accuracy on 200 held-out prompts"; by
            default the data source and the statistic. For several data sources the default always stands.

    Returns:
        The path of the picture.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: the file holds neither rewards nor validation results.
    """
    steps = read_metrics(metrics_file)
    reward, length, speed = (_series(steps, label) for label in ("reward", "len", "tok/s"))
    validation = _validation(steps, validation_label)
    if not reward[0].size and not validation:
        raise DataError(
            str(metrics_file),
            got="no rewards and no validation results",
            expected="a run's metrics",
        )
    small = [
        (label, series, color)
        for label, series, color in (
            ("tokens per response", length, LENGTH),
            ("tokens per second", speed, SPEED),
        )
        if series[0].size
    ]
    matplotlib = _matplotlib()
    with matplotlib.rc_context(STYLE):
        figure = import_module("matplotlib.figure").Figure(
            figsize=(9, 5.6 if small else 4.4), dpi=200
        )
        grid = figure.add_gridspec(
            2 if small else 1,
            len(small) or 1,
            height_ratios=(3.1, 1) if small else None,
            left=LEFT, right=0.965, top=0.8 if title or subtitle else 0.91, bottom=0.075, hspace=0.5, wspace=0.14,
        )  # fmt: skip
        _draw_learning(figure.add_subplot(grid[0, :]), reward, validation)
        for column, (label, series, color) in enumerate(small):
            _draw_small(figure.add_subplot(grid[1, column]), label, series, color)
        _write_titles(figure, title, subtitle)
        return _save(figure, Path(output))


def smooth(steps: np.ndarray, values: np.ndarray, width: float) -> np.ndarray:
    """Local straight-line fits with Gaussian weights of `width` steps: follows a rise without lag, also at the ends."""
    smoothed = np.empty(len(steps))
    for index, center in enumerate(steps):
        offset = steps - center
        weight = np.exp(-0.5 * (offset / width) ** 2)
        moments = [np.sum(weight * offset**power) for power in range(3)]
        spread = moments[0] * moments[2] - moments[1] ** 2
        sums = np.sum(weight * values), np.sum(weight * values * offset)
        # A single point (or all at one step) has no slope; its mean is the fit.
        has_slope = spread > 1e-9 * moments[0] ** 2
        smoothed[index] = (
            (moments[2] * sums[0] - moments[1] * sums[1]) / spread
            if has_slope
            else sums[0] / moments[0]
        )
    return smoothed


def _series(steps: Mapping[int, Mapping[str, float]], label: str) -> Series:
    """A headline metric over the steps where it was measured and finite."""
    sources = next(headline.sources for headline in HEADLINES if headline.label == label)
    points = []
    for step, metrics in steps.items():
        value = next((metrics[name] for name in sources if name in metrics), None)
        if value is not None and np.isfinite(value):
            points.append((step, value))
    return _arrays(points)


def _validation(steps: Mapping[int, Mapping[str, float]], label: str) -> dict[str, Series]:
    """The mean validation result of each data source, under the name it has in the picture."""
    points: dict[str, list[tuple[int, float]]] = {}
    for step, metrics in steps.items():
        seen: set[str] = set()
        for result in validation_results(metrics):
            # One line per source: its first mean. Best, worst and majority are in the files.
            if (
                result.statistic.startswith("mean@")
                and result.source not in seen
                and np.isfinite(result.value)
            ):
                seen.add(result.source)
                points.setdefault(f"{result.source} ({result.statistic})", []).append(
                    (step, result.value)
                )
    if label and len(points) == 1:
        points = {label: next(iter(points.values()))}
    return {name: _arrays(values) for name, values in points.items()}


def _arrays(points: Sequence[tuple[int, float]]) -> Series:
    return np.array([step for step, _ in points], dtype=float), np.array(
        [value for _, value in points], dtype=float
    )


def _draw_learning(axes: Any, reward: Series, validation: Mapping[str, Series]) -> None:
    steps, values = reward
    if steps.size:
        axes.plot(
            steps,
            values,
            "o",
            color=REWARD,
            markersize=4.5 if steps.size < 120 else 2.5,
            alpha=0.35,
            markeredgewidth=0,
        )
        curve = smooth(steps, values, width=max(1.2, steps.size / SMOOTHING))
        axes.plot(
            steps,
            curve,
            color=REWARD,
            linewidth=2.4,
            solid_capstyle="round",
            label="training reward",
        )
    for index, (name, (at, results)) in enumerate(list(validation.items())[:SHOWN_SOURCES]):
        color, marker = SOURCE_COLORS[index], SOURCE_MARKERS[index]
        axes.plot(at, results, color=color, linewidth=1.2, alpha=0.55, dashes=(4, 3), zorder=3)
        axes.plot(
            at, results, marker, color=color, markersize=8, markeredgecolor="white", markeredgewidth=1.4,
            zorder=4, label=f"validation: {name}" if len(validation) == 1 else name, clip_on=False,
        )  # fmt: skip
        if len(validation) == 1:
            _write_values(axes, at, results, color)
    if len(validation) > SHOWN_SOURCES:
        axes.plot([], [], " ", label=f"(data sources not shown: {len(validation) - SHOWN_SOURCES})")
    _set_ranges(axes, [reward, *validation.values()])
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.008, 1.02), ncols=3, frameon=False, fontsize=9.5, labelcolor=INK,
        handlelength=1.6, handletextpad=0.6, columnspacing=2.0, borderaxespad=0.2,
    )  # fmt: skip
    axes.set_xlabel("training step", fontsize=9.5, loc="right", labelpad=2)


def _write_values(axes: Any, at: np.ndarray, results: np.ndarray, color: str) -> None:
    """The first and the last result in figures: what a reader wants to take away."""
    for index in sorted({0, len(at) - 1}):
        is_rising = len(at) < 2 or results[-1] >= results[0]
        above = is_rising if index else not is_rising
        room = 13 if above else -13
        # Inwards, so that neither the axis nor the edge of the picture is in the way.
        inwards, side = (8, "right") if index else (-6, "left")
        axes.annotate(
            f"{results[index]:.3g}", (at[index], results[index]), xytext=(inwards, room), textcoords="offset points",
            ha=side, va="center", color=color, fontsize=11.5, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def _set_ranges(axes: Any, all_series: Sequence[Series]) -> None:
    steps = np.concatenate([series[0] for series in all_series])
    values = np.concatenate([series[1] for series in all_series])
    room = max(0.5, 0.02 * np.ptp(steps))
    axes.set_xlim(steps.min() - room, steps.max() + room)
    if values.min() >= 0 and values.max() <= 1:
        # Rewards and accuracies between 0 and 1 are shown on their whole scale: a rise looks as large as it is.
        axes.set_ylim(0, 1.08)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    else:
        axes.margins(y=0.14)


def _draw_small(axes: Any, label: str, series: Series, color: str) -> None:
    steps, values = series
    curve = smooth(steps, values, width=max(1.2, steps.size / SMOOTHING))
    axes.fill_between(steps, curve, color=color, alpha=0.07, linewidth=0)
    axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.35)
    axes.plot(steps, curve, color=color, linewidth=1.8, solid_capstyle="round")
    axes.set_title(label, loc="left", fontsize=9.5, color=INK, pad=6)
    axes.set_title(
        _number(curve[-1]), loc="right", fontsize=10, color=color, fontweight="bold", pad=6
    )
    axes.set_ylim(0, values.max() * 1.25 or 1)
    axes.margins(x=0.03)
    axes.locator_params(axis="y", nbins=3)
    axes.yaxis.set_major_formatter(lambda value, _: _number(value))
    axes.tick_params(labelsize=8.5)


def _number(value: float) -> str:
    """4.4, 120, 1 214: as many digits as a reader can use."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}".replace(",", " ")


def _write_titles(figure: Any, title: str, subtitle: str) -> None:
    if title:
        figure.text(LEFT, 0.955, title, fontsize=15, fontweight="bold", va="center")
    if subtitle:
        figure.text(
            LEFT, 0.908 if title else 0.955, subtitle, fontsize=9.5, color=QUIET, va="center"
        )


def _save(figure: Any, output: Path) -> Path:
    """Written aside and renamed, so that a picture in a README is never half a picture."""
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.tmp")
    figure.savefig(aside, format=output.suffix.removeprefix(".") or "png")
    os.replace(aside, output)
    return output


def _matplotlib() -> Any:
    try:
        return import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            "the learning curve",
            got=f"no usable matplotlib ({error})",
            expected="it to be installed",
            fix="Install it with: pip install -e '.[plot]'",
        ) from error
