# SPDX-License-Identifier: Apache-2.0
"""Measured numbers that know how to be combined.

A worker that saw 40 tokens and a worker that saw 4000 must not count the same in a mean. So a metric travels
with the way it is reduced and with the weight it stands for, from the place where it was measured to the log.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Reduction = Literal["mean", "sum", "max", "min", "last"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, how it combines with others of its name, and the count (tokens, sequences, steps) that it weighs."""

    value: float
    reduction: Reduction = "mean"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"Metric.reduction: got {self.reduction!r}, expected one of {', '.join(REDUCTIONS)}."
            )
        # Zero-dimensional tensors and numpy numbers become plain floats here, so that a metric never keeps a graph
        # or a device alive and can be sent and written anywhere. item() reads a loss that has its graph in silence.
        # What an accelerator has yet to compute is read later, with all the others of a step.
        for name in ("value", "weight"):
            number = getattr(self, name)
            if getattr(number, "is_cuda", False):
                object.__setattr__(self, name, number.detach())
            else:
                object.__setattr__(
                    self, name, float(number.item() if hasattr(number, "item") else number)
                )
        if isinstance(self.weight, float) and not 0 <= self.weight < math.inf:
            raise ValueError(
                f"Metric.weight: got {self.weight!r}, expected a finite number of at least 0."
            )


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One metric per name of several workers, micro-batches or mini-batches. Merging in stages is merging at once."""
    collected: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            collected.setdefault(name, []).append(metric)
    return {name: _combine(name, metrics) for name, metrics in collected.items()}


def reduce_metrics(*parts: Mapping[str, Metric | Sequence[Metric]]) -> dict[str, float]:
    """The plain numbers to log: one float per name, lists (from concatenated results) and parts combined first. A name
    whose lists are empty was measured nowhere and is left out."""
    found: Mapping[str, Metric | Sequence[Metric]] = parts[0]
    if len(parts) > 1:
        found = lists = defaultdict[str, list[Metric]](list)
        for part in parts:
            for name, metric in part.items():
                lists[name] += [metric] if isinstance(metric, Metric) else metric
    reduced: dict[str, float] = {}
    for name, metric in found.items():
        if isinstance(metric, Metric):
            reduced[name] = metric.value
        elif metric:
            reduced[name] = _combine(name, metric).value
    return reduced


def _combine(name: str, metrics: Sequence[Metric]) -> Metric:
    kinds = {metric.reduction for metric in metrics}
    if len(kinds) > 1:
        raise ValueError(
            f"metric {name}: got the reductions {', '.join(sorted(kinds))}, expected one for all parts."
        )
    reduction, weight = metrics[0].reduction, math.fsum(metric.weight for metric in metrics)
    values = [metric.value for metric in metrics]
    if reduction in ("mean", "sum"):
        if reduction == "mean":
            # A part of weight 0 says nothing, even where its own value is NaN.
            values = [metric.value * metric.weight for metric in metrics if metric.weight > 0]
        # fsum is exact in any order, but it refuses to add opposite infinities; plain addition gives the NaN they are.
        value = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
        if reduction == "mean":
            # The mean of nothing is NaN and not 0.
            value = value / weight if weight else math.nan
    elif reduction == "last":
        value = values[-1]
    elif any(math.isnan(value) for value in values):
        # max() and min() answer by position when a NaN is among the values; a NaN must be seen, so it wins.
        value = math.nan
    else:
        value = max(values) if reduction == "max" else min(values)
    return Metric(value, reduction, weight)
