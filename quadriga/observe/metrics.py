# SPDX-License-Identifier: Apache-2.0
"""Measured numbers, each with the way in which it combines with others of its name.

A worker with 40 tokens and a worker with 4000 must not count the same in a mean. So a metric has a
reduction and a weight from the place where it is measured to the log.
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
    """A measured number, and the way in which it combines with others of its name.

    Attributes:
        value: the number.
        reduction: how values of the same name combine.
        weight: number of tokens, sequences or steps that the value was computed from. Only a mean
            depends on it.
    """

    value: float
    reduction: Reduction = "mean"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"Metric.reduction: got {self.reduction!r}, expected one of {', '.join(REDUCTIONS)}."
            )
        # Zero-dimensional tensors and numpy numbers become floats, so that a metric keeps no graph
        # alive and can be sent and written anywhere.
        for name in ("value", "weight"):
            number = getattr(self, name)
            if getattr(number, "is_cuda", False):
                # It stays a tensor: reading it now would wait for the GPU. All numbers of a step
                # are read at once later.
                number = number.detach()
            elif hasattr(number, "item"):
                number = float(number.item())
            else:
                number = float(number)
            object.__setattr__(self, name, number)
        if isinstance(self.weight, float) and not 0 <= self.weight < math.inf:
            raise ValueError(
                f"Metric.weight: got {self.weight!r}, expected a finite number of at least 0."
            )


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of several workers, micro-batches or mini-batches into one for each name.

    Merging in stages gives the same result as merging at once.

    Raises:
        ValueError: metrics of the same name have different reductions.
    """
    collected = {}
    for part in parts:
        for name, metric in part.items():
            collected.setdefault(name, []).append(metric)
    return {name: _combine(name, metrics) for name, metrics in collected.items()}


def reduce_metrics(*parts: Mapping[str, Metric | Sequence[Metric]]) -> dict[str, float]:
    """Combine metrics to a float for each name.

    Args:
        parts: metrics by name, at least one mapping. A name may have a list of metrics, as it has
            in concatenated results of workers.

    Returns:
        The values. A name that has only empty lists was measured nowhere, and is left out.

    Raises:
        ValueError: metrics of the same name have different reductions.
    """
    # With one mapping, its metrics are not put into lists: combining a single metric could round
    # its value.
    collected: Mapping[str, Metric | Sequence[Metric]] = parts[0]
    if len(parts) > 1:
        lists = defaultdict[str, list[Metric]](list)
        for part in parts:
            for name, metric in part.items():
                lists[name] += [metric] if isinstance(metric, Metric) else metric
        collected = lists
    reduced = {}
    for name, metric in collected.items():
        if isinstance(metric, Metric):
            reduced[name] = metric.value
        elif metric:
            reduced[name] = _combine(name, metric).value
    return reduced


def _combine(name: str, metrics: Sequence[Metric]) -> Metric:
    """Combine metrics of the same name and reduction into one.

    Raises:
        ValueError: their reductions differ.
    """
    reductions = {metric.reduction for metric in metrics}
    if len(reductions) > 1:
        names = ", ".join(sorted(reductions))
        raise ValueError(f"metric {name}: got the reductions {names}, expected one for all parts.")
    reduction = metrics[0].reduction
    weight = math.fsum(metric.weight for metric in metrics)
    values = [metric.value for metric in metrics]
    if reduction == "mean":
        # A metric of weight 0 does not count, even if its value is NaN.
        products = [metric.value * metric.weight for metric in metrics if metric.weight > 0]
        # The mean of nothing is NaN, not 0.
        value = _sum(products) / weight if weight else math.nan
    elif reduction == "sum":
        value = _sum(values)
    elif reduction == "last":
        value = values[-1]
    elif any(math.isnan(value) for value in values):
        # Whether max() and min() return a NaN depends on its position, but it must not get lost.
        value = math.nan
    elif reduction == "max":
        value = max(values)
    else:
        value = min(values)
    return Metric(value, reduction, weight)


def _sum(values: Sequence[float]) -> float:
    """Sum of values. For finite values it does not depend on their order."""
    if all(map(math.isfinite, values)):
        return math.fsum(values)
    # fsum raises for opposite infinities, whose sum is NaN.
    return sum(values)
