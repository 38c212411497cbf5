# SPDX-License-Identifier: Apache-2.0
"""The few numbers of a step that a person watches, and how they are written.

A run logs about a hundred metrics a step; its progress bar and its log show these. Everything else is in the files of
the tracking backends.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

VALIDATION_PREFIX = "val-core/"


def _general(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def _signed(value: float) -> str:
    return f"{value:+.4f}"


def _small(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


def _rate(value: float) -> str:
    return f"{value:.1e}"


def _length(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _thousands(value: float) -> str:
    # A narrow space would be finer typography, but a log is also read by grep and by terminals without Unicode.
    return f"{value:,.0f}".replace(",", " ")


def _percent(value: float) -> str:
    return f"{value:.0%}"


@dataclass(frozen=True, slots=True)
class Headline:
    """A label and the metrics it may come from (the first that was measured), in the order they are shown."""

    label: str
    sources: tuple[str, ...]
    write: Callable[[float], str]


# The names on the right are those of the trainer's metrics; a test of the trainer holds the two together.
HEADLINES = (
    Headline("reward", ("critic/rewards/mean", "critic/score/mean", "reward/mean"), _general),
    Headline("loss", ("actor/pg_loss", "train/loss"), _signed),
    Headline("kl", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), _small),
    Headline("entropy", ("actor/entropy",), _general),
    Headline("grad", ("actor/grad_norm", "train/grad_norm"), _general),
    Headline("lr", ("actor/lr", "train/lr"), _rate),
    Headline("len", ("response_length/mean",), _length),
    Headline("mfu", ("perf/mfu/actor", "perf/mfu"), _percent),
    Headline("tok/s", ("perf/throughput",), _thousands),
    Headline("s/step", ("perf/time_per_step", "timing_s/step"), _length),
)


def step_fields(metrics: Mapping[str, float]) -> dict[str, str]:
    """The fields of a step for `Progress.update`: label -> text, in a fixed order.

    A metric that was not measured in this step has no field.
    """
    fields: dict[str, str] = {}
    for headline in HEADLINES:
        value = next((metrics[name] for name in headline.sources if name in metrics), None)
        if value is not None:
            fields[headline.label] = headline.write(value) if math.isfinite(value) else str(value)
    return fields


def join_field(label: str, value: str) -> str:
    """A label stands before its value, a unit (a label with a slash, such as tok/s) behind it."""
    return f"{value} {label}" if "/" in label else f"{label} {value}"


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """One validation metric, taken apart: `val-core/<data source>/<variable>/<statistic>`."""

    source: str
    variable: str
    statistic: str
    value: float

    @property
    def column(self) -> str:
        return f"{self.variable} {self.statistic}"


def validation_results(metrics: Mapping[str, float]) -> list[ValidationResult]:
    """The main validation metrics among `metrics`, in their order.

    The statistic begins at the last part with an "@" ("mean@8", "best@8/mean"), so a data source may contain slashes.
    """
    results = []
    for name, value in metrics.items():
        parts = name.removeprefix(VALIDATION_PREFIX).split("/")
        at = max((index for index, part in enumerate(parts) if "@" in part), default=0)
        if name.startswith(VALIDATION_PREFIX) and at >= 2:
            source, variable, statistic = "/".join(parts[: at - 1]), parts[at - 1], "/".join(parts[at:])
            results.append(ValidationResult(source, variable, statistic, value))
    return results
