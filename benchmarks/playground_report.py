# SPDX-License-Identifier: Apache-2.0
"""What the runs of playground.py came to: read from their files, as tables and as one picture."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from quadriga.observe.tracking.jsonl import METRICS_FILE, read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from curve import INK, LENGTH, QUIET, REWARD, SPEED, STYLE, VALIDATION

GOAL = 0.95
SERIES = {
    "kl": "actor/reward_kl_penalty",
    "coefficient": "actor/reward_kl_penalty_coeff",
    "rm_score": "reward/rm_score/mean",
    "staleness": "async/staleness_mean",
}
COLORS = (REWARD, VALIDATION, SPEED, LENGTH)
KL_RUNS = ("kl_target", "kl_fixed")
KL_EVERY = 20
STALE, COMPARED_BELOW = "stale_", 0.97
NUM_COLUMNS, NUM_COLORS = 4, 48


@dataclass(frozen=True)
class Course:
    """A run, as far as the tables need it.

    Attributes:
        name: of the run.
        seed: of playground, data and sampling.
        steps: those that ended with a validation; 0 is the model that the run began with.
        accuracy: of each such validation, 0 to 1.
        seconds: of training until each of them.
        num_steps: of the run.
        total_s: seconds of training in all.
        others: cores that other processes used meanwhile.
        series: values of each step, by their name in SERIES.
        facts: what else was measured.
    """

    name: str
    seed: int
    steps: list[int]
    accuracy: list[float]
    seconds: list[float]
    num_steps: int
    total_s: float
    others: float
    series: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def reached(self) -> int | None:
        """The place of the first validation that is at least GOAL; None: there is none."""
        return next((place for place, value in enumerate(self.accuracy) if value >= GOAL), None)

    def in_words(self) -> str:
        """On one line."""
        time = f"{self.total_s:.0f} s of training in {self.num_steps} steps, others {self.others:.2f} cores"
        if not self.accuracy:
            return time
        place = self.reached
        when = "never" if place is None else f"after {self.seconds[place]:.0f} s"
        return f"{self.accuracy[0]:.2f} -> {self.accuracy[-1]:.2f}, {GOAL} {when}; {time}"


def read_course(name: str, seed: int, directory: Path, others: float) -> Course:
    """What a run left in its directory: metrics.jsonl, and answers/STEP.jsonl where it validated.

    The accuracy is that of the answers themselves, so it does not matter who graded them.
    """
    metrics = read_metrics(directory / METRICS_FILE)
    steps, accuracy, seconds, total_s = [], [], [], 0.0
    for step, values in metrics.items():
        total_s += values.get("timing_s/step", 0.0)
        answers = directory / "answers" / f"{step}.jsonl"
        value = accuracy_of(answers) if answers.is_file() else values.get("val/accuracy")
        if value is not None:
            steps.append(step)
            accuracy.append(value)
            seconds.append(total_s)
    series = {
        name: [values[source] for values in metrics.values() if source in values]
        for name, source in SERIES.items()
    }
    kept = {name: values for name, values in series.items() if values}
    return Course(name, seed, steps, accuracy, seconds, max(metrics), total_s, others, kept)


def accuracy_of(answers: Path) -> float:
    """The share of right answers among the rows of a validation."""
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    return sum(row["output"].strip() == row["ground_truth"] for row in rows) / len(rows)


def report(courses: Sequence[Course], order: Sequence[str], folder: Path) -> str:
    """The tables, also written to `folder`/playground.md, and the picture beside them.

    Args:
        courses: all runs that there are.
        order: of the names, as the tables list them.
        folder: to write to.
    """
    runs = {
        name: sorted((c for c in courses if c.name == name), key=lambda c: c.seed) for name in order
    }
    runs = {name: found for name, found in runs.items() if found}
    kl_runs = [course for name in KL_RUNS for course in runs.get(name, [])]
    parts = [learning_table(runs), validation_lines(runs)]
    parts += [kl_table(kl_runs)] if kl_runs else []
    stale = {name: courses for name, courses in runs.items() if name.startswith(STALE)}
    parts += [staleness_table(stale)] if stale else []
    parts += [
        supervised_table([course for course in courses if course.name in ("sft", "reward_model")])
    ]
    text = "\n\n".join(parts) + "\n"
    (folder / "playground.md").write_text(text, encoding="utf-8")
    draw(runs, folder / "playground.png")
    return text


def learning_table(runs: dict[str, list[Course]]) -> str:
    """A line for each name, its seeds beside each other in each cell."""
    lines = [
        f"| run | steps | accuracy before | s until {GOAL} | at step | accuracy after | s in all | others, cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, courses in runs.items():
        places = [(course, course.reached) for course in courses]
        cells = (
            name,
            " ".join(dict.fromkeys(str(course.num_steps) for course in courses)),
            _joined(f"{course.accuracy[0]:.2f}" for course in courses),
            _joined(
                "never" if place is None else f"{course.seconds[place]:.0f}"
                for course, place in places
            ),
            _joined("-" if place is None else str(course.steps[place]) for course, place in places),
            _joined(f"{course.accuracy[-1]:.2f}" for course in courses),
            _joined(f"{course.total_s:.0f}" for course in courses),
            _joined(f"{course.others:.1f}" for course in courses),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _joined(values: Iterable[str]) -> str:
    return " / ".join(values)


def validation_lines(runs: dict[str, list[Course]]) -> str:
    """All accuracies of all runs, as a block of text."""
    width = max(map(len, runs), default=0)
    lines = [
        f"{name:<{width}} {course.seed}  {' '.join(_short(value) for value in course.accuracy)}"
        for name, courses in runs.items()
        for course in courses
    ]
    return "\n".join(["```", *lines, "```"])


def _short(share: float) -> str:
    """.44, 1.0: a share in three characters."""
    return f"{share:.2f}"[1:] if round(share, 2) < 1 else "1.0"


def kl_table(courses: Sequence[Course]) -> str:
    """Divergence and coefficient, each the mean of KL_EVERY steps."""
    length = max(course.num_steps for course in courses)
    ends = range(KL_EVERY, length + 1, KL_EVERY)
    lines = [
        f"| run, seed | mean of steps | {' | '.join(f'{end - KL_EVERY + 1}-{end}' for end in ends)} |",
        "|" + "---|" * (len(ends) + 2),
    ]
    for course in courses:
        for name in ("kl", "coefficient"):
            values = course.series[name]
            means = [
                sum(values[end - KL_EVERY : end]) / KL_EVERY for end in ends if end <= len(values)
            ]
            lines.append(
                f"| {course.name}, {course.seed} | {name} | {' | '.join(f'{mean:.3f}' for mean in means)} |"
            )
    return "\n".join(lines)


def staleness_table(runs: dict[str, list[Course]]) -> str:
    """Mean accuracy of the seeds, at the last validation before any run has reached COMPARED_BELOW and at the end; how
    far from the first run's; and how stale tokens were, on average over all steps."""
    courses = [course for own in runs.values() for course in own]
    steps = min((course.steps for course in courses), key=len)
    reached = [
        step
        for place, step in enumerate(steps)
        if max(one.accuracy[place] for one in courses) >= COMPARED_BELOW
    ]
    place = steps.index(reached[0]) - 1 if reached else len(steps) - 1
    lines = [
        f"| run | versions behind | accuracy at step {steps[place]} | mean | to the first | mean at step {steps[-1]} |",
        "|---|---|---|---|---|---|",
    ]
    first = float(np.mean([course.accuracy[place] for course in next(iter(runs.values()))]))
    for name, own in runs.items():
        here = [course.accuracy[place] for course in own]
        behind = np.mean([np.mean(course.series["staleness"]) for course in own])
        last = np.mean([course.accuracy[len(steps) - 1] for course in own])
        told = f"{_joined(f'{value:.2f}' for value in here)} | {np.mean(here):.3f} | {np.mean(here) - first:+.3f}"
        lines.append(f"| {name} | {behind:.2f} | {told} | {last:.3f} |")
    return "\n".join(lines)


def supervised_table(courses: Sequence[Course]) -> str:
    """What `quadriga sft` did."""
    lines = [
        "| run | seed | steps | s of training | held-out pairs in order | others, cores |",
        "|---|---|---|---|---|---|",
    ]
    for course in sorted(courses, key=lambda course: (course.name != "sft", course.seed)):
        pairs = f"{course.accuracy[-1]:.3f}" if course.accuracy else ""
        facts = ", ".join(f"{name} {value:.2f}" for name, value in course.facts.items())
        lines.append(
            f"| {course.name} | {course.seed} | {course.num_steps} | {course.total_s:.0f} | "
            f"{', '.join(filter(None, (pairs, facts)))} | {course.others:.1f} |"
        )
    return "\n".join(lines)


def draw(runs: dict[str, list[Course]], output: Path) -> None:
    """A small panel for each name: accuracy over the steps, a line for each seed; one more for the divergence."""
    learning = {name: courses for name, courses in runs.items() if name not in KL_RUNS}
    kl_runs = [course for name in KL_RUNS for course in runs.get(name, [])]
    num_panels = len(learning) + bool(kl_runs)
    num_rows = -(-num_panels // NUM_COLUMNS)
    with rc_context(STYLE | {"font.size": 8}):
        figure = Figure(figsize=(9, 0.3 + 1.7 * num_rows), dpi=140)
        panels = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False).flatten()
        for panel, (name, courses) in zip(panels, learning.items(), strict=False):
            _draw_accuracy(panel, name, courses)
        if kl_runs:
            _draw_kl(panels[num_panels - 1], kl_runs)
        for panel in panels[num_panels:]:
            panel.axis("off")
        figure.tight_layout(h_pad=1.2, w_pad=0.8)
        drawn = BytesIO()
        figure.savefig(drawn, format="png")
    # A few lines need no more colours than these; the file is a third of the size.
    Image.open(drawn).convert("RGB").quantize(NUM_COLORS).save(output, optimize=True)


def _draw_accuracy(axes: Any, name: str, courses: Sequence[Course]) -> None:
    axes.axhline(GOAL, color=QUIET, linewidth=0.8, dashes=(4, 3))
    for course in courses:
        axes.plot(
            course.steps, course.accuracy, color=COLORS[course.seed % len(COLORS)], linewidth=1.3
        )
    axes.set_title(name, loc="left", fontsize=9, color=INK, pad=4)
    axes.set_ylim(0, 1.05)
    axes.set_yticks([0, 0.5, GOAL], ["0", ".5", ".95"])
    axes.set_xlim(left=0)
    axes.set_xlabel("step", fontsize=7.5, loc="right", labelpad=1)


def _draw_kl(axes: Any, courses: Sequence[Course]) -> None:
    for course in courses:
        style: dict[str, Any] = {} if course.name == "kl_target" else {"dashes": (2, 1.5)}
        values = course.series["kl"]
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=COLORS[course.seed % len(COLORS)],
            linewidth=1.1,
            **style,
        )
    axes.set_title("kl_target, kl_fixed (dashes)", loc="left", fontsize=9, color=INK, pad=4)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step; nats a token", fontsize=7.5, loc="right", labelpad=1)
