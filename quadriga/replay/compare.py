# SPDX-License-Identifier: Apache-2.0
"""Compares the recorded numbers of a step with those of its replay."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from quadriga.observe.records import COLUMNS

TOLERANCE = 1e-5
"""Largest difference, relative above 1, between layouts of ranks and between kinds of CPUs."""
RATIO = "ratio"
"""Probability of a token under the trainer over that under the rollout, computed from two columns."""
COMPUTED = {
    *("reward", "not_computed", "trained_mask", "log_probs", "entropies", "ref_log_probs"),
    *("teacher_log_probs", "rollout_is_weights", "advantages", "returns", "values", RATIO),
}
"""Columns that a replay computes. The others come from the record, and scores if it grades again."""
_NOT_COMPARED = {"text", "replay", "time"}
"""Groups of columns that are inputs of a replay, that thinning removes, or that clocks measured."""
# The place of a row depends on the number of ranks, the ids of rows come from the record.
_PLACES = {"position", "row_index", "rollout_id", "uid", "source_row"}
# Measured by the clock, or made by generation and grading, which a replay leaves out.
_CLOCK = ("timing_s/", "timing_per_token_ms/", "perf/", "recovery/", "memory/")


@dataclass(frozen=True)
class Difference:
    """A number that differs.

    Attributes:
        row: number of the row in the step; None for a metric.
        rollout_id: name of the row's rollout.
        token: number of the token in the response; None for a value of the whole row.
        recorded: recorded value; None if there is none.
        replayed: value of the replay; None if there is none.
    """

    row: int | None
    rollout_id: str
    token: int | None
    recorded: Any
    replayed: Any


@dataclass(frozen=True)
class Comparison:
    """The comparison of a column or a metric.

    Attributes:
        name: name of the column or metric.
        num_values: number of compared values.
        num_different: values that are not equal bit for bit.
        largest: largest difference, relative above 1; infinity where a value is missing.
        first: first value that differs.
    """

    name: str
    num_values: int
    num_different: int = 0
    largest: float = 0.0
    first: Difference | None = None

    @property
    def is_equal(self) -> bool:
        """Whether all values are equal bit for bit."""
        return self.num_different == 0


def compare_rows(recorded: pa.Table, replayed: pa.Table) -> list[Comparison]:
    """Compare the columns of a step that both tables have.

    Args:
        recorded: rows of the record.
        replayed: rows of the replay, in the same order.

    Returns:
        A comparison for each column with values in both tables, in the order of the record.
    """
    comparisons = []
    for name, column in COLUMNS.items():
        if column.group in _NOT_COMPARED or name in _PLACES:
            continue
        if _has_values(recorded, name) and _has_values(replayed, name):
            pair = (recorded.column(name).to_pylist(), replayed.column(name).to_pylist())
            comparisons.append(_compared(name, *pair, _rollout_ids(recorded)))
    if {"log_probs", "rollout_log_probs"} <= {entry.name for entry in comparisons}:
        comparisons.append(
            _compared(RATIO, _ratios(recorded), _ratios(replayed), _rollout_ids(recorded))
        )
    return comparisons


def _has_values(table: pa.Table, name: str) -> bool:
    return name in table.column_names and table.column(name).null_count < len(table)


def _rollout_ids(table: pa.Table) -> list[str]:
    return table.column("rollout_id").to_pylist()


def _ratios(table: pa.Table) -> list[np.ndarray | None]:
    """Ratio of each token of each row; None for a row without log-probs of the trainer."""
    ratios: list[np.ndarray | None] = []
    sampled_column = table.column("rollout_log_probs").to_pylist()
    for sampled, trained in zip(sampled_column, table.column("log_probs").to_pylist(), strict=True):
        if sampled is None or trained is None:
            ratios.append(None)
        else:
            ratios.append(np.exp(np.float32(trained) - np.float32(sampled)))
    return ratios


def _compared(
    name: str, recorded: list[Any], replayed: list[Any], rollout_ids: list[str]
) -> Comparison:
    """Compare the values of all rows; a value is a number, a text, or a list of numbers."""
    num_values = 0
    num_different = 0
    largest = 0.0
    first = None
    # Lengths may differ where a mask or a rejection does, so rows are compared one by one.
    for row, (old, new) in enumerate(zip(recorded, replayed, strict=True)):
        if old is None or new is None or isinstance(old, str):
            # One value of the row: at least one side has none, or it is a text.
            num_values += 1
            places = [] if (old is None and new is None) or old == new else [None]
            distances = [math.inf] * len(places)
        else:
            num_values += np.size(old)
            places, distances = _different_places(old, new)
        num_different += len(places)
        largest = max([largest, *distances])
        if places and first is None:
            place = places[0]
            first = Difference(
                row, rollout_ids[row], place, _value_at(old, place), _value_at(new, place)
            )
    return Comparison(name, num_values, num_different, largest, first)


def _different_places(old: Any, new: Any) -> tuple[list[int | None], list[float]]:
    """Places of the values that differ, and their differences."""
    old_values = np.atleast_1d(np.asarray(old))
    new_values = np.atleast_1d(np.asarray(new))
    if old_values.shape != new_values.shape:
        return [None], [math.inf]
    is_equal = old_values == new_values
    if old_values.dtype.kind == "f":
        is_equal |= np.isnan(old_values) & np.isnan(new_values)
    places: list[int | None] = np.flatnonzero(~is_equal).tolist()
    distances = [distance(float(old_values[place]), float(new_values[place])) for place in places]
    if np.ndim(old) == 0:
        places = [None] * len(places)
    return places, distances


def _value_at(value: Any, place: int | None) -> Any:
    if place is None:
        return value if not isinstance(value, list | np.ndarray) else f"{len(value)} values"
    return value[place]


def distance(old: float, new: float) -> float:
    """Difference of two numbers, relative to the larger one if that is above 1."""
    if math.isnan(old) or math.isnan(new) or math.isinf(old) or math.isinf(new):
        return math.inf
    return abs(old - new) / max(1.0, abs(old), abs(new))


def compare_metrics(
    recorded: Mapping[str, float], replayed: Mapping[str, float]
) -> tuple[list[Comparison], list[str]]:
    """Compare the metrics that a replay computes.

    Args:
        recorded: metrics of the record.
        replayed: metrics of the replay.

    Returns:
        A comparison for each metric that both have, and the names of those recorded alone, such as
        metrics of generation. Times and memory are in neither.
    """
    comparisons = []
    recorded_alone = []
    for name, old in sorted(recorded.items()):
        if name.startswith(_CLOCK):
            continue
        new = replayed.get(name)
        if new is None:
            recorded_alone.append(name)
        elif old == new or (math.isnan(old) and math.isnan(new)):
            comparisons.append(Comparison(name, 1))
        else:
            first = Difference(None, "", None, old, new)
            comparisons.append(Comparison(name, 1, 1, distance(old, new), first))
    return comparisons, recorded_alone
