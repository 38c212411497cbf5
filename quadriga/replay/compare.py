# SPDX-License-Identifier: Apache-2.0
"""Comparison of the recorded numbers of a step with those of its replay."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from quadriga.observe.records import COLUMNS

TOLERANCE = 1e-5
"""Largest `distance` that other layouts of ranks, or another kind of CPU, may cause."""
RATIO = "ratio"
"""Compared besides the columns: probability under the trainer over that under the rollout."""
COMPUTED = {
    *("reward", "not_computed", "trained_mask", "log_probs", "entropies", "ref_log_probs"),
    *("teacher_log_probs", "rollout_is_weights", "advantages", "returns", "values", RATIO),
}
"""Columns that each replay computes. A replay that grades computes scores too. The other columns
are copied from the record."""
_NOT_COMPARED = {"text", "replay", "time"}
"""Groups of columns: texts, which thinning removes; inputs of a replay; and times."""
_NOT_COMPARABLE = {"position", "row_index", "rollout_id", "uid", "source_row"}
"""Columns that depend on the number of ranks, or that name a row."""
_MACHINE_METRICS = ("timing_s/", "timing_per_token_ms/", "perf/", "recovery/", "memory/")
"""Prefixes of metrics that say how fast or how reliable the machine was."""


@dataclass(frozen=True)
class Difference:
    """A number that differs.

    Attributes:
        row: number of the row in the step; None for a metric.
        rollout_id: name of the row's rollout; "" for a metric.
        token: number of the token in the response; None for a value of the whole row, and for lists
            of different lengths.
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
        num_different: number of values that are not equal bit for bit.
        largest: largest `distance` of two values; infinity if a value is missing, a text differs,
            or two lists differ in length.
        first: first value that differs; None if all are equal.
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
    """Compare the columns of a step.

    Args:
        recorded: rows of the record.
        replayed: rows of the replay, in the same order.

    Returns:
        A comparison for each column with values in both tables, in the order of the record, and at
        the end one for `RATIO`. Columns that need not be equal are left out.
    """
    comparisons = []
    rollout_ids = recorded.column("rollout_id").to_pylist()
    for name, column in COLUMNS.items():
        if column.group in _NOT_COMPARED or name in _NOT_COMPARABLE:
            continue
        # A replay that ends with the rewards or the advantages lacks later columns.
        if _has_values(recorded, name) and _has_values(replayed, name):
            old_values = recorded.column(name).to_pylist()
            new_values = replayed.column(name).to_pylist()
            comparisons.append(_compare_values(name, old_values, new_values, rollout_ids))
    if {"log_probs", "rollout_log_probs"} <= {entry.name for entry in comparisons}:
        comparisons.append(
            _compare_values(RATIO, _ratios(recorded), _ratios(replayed), rollout_ids)
        )
    return comparisons


def _has_values(table: pa.Table, name: str) -> bool:
    """Whether a table has a column of this name with a value in at least one row."""
    return name in table.column_names and table.column(name).null_count < len(table)


def _ratios(table: pa.Table) -> list[np.ndarray | None]:
    """`RATIO` of the tokens of each row; None for a row without both kinds of log-probs."""
    ratios = []
    sampled_column = table.column("rollout_log_probs").to_pylist()
    for sampled, trained in zip(sampled_column, table.column("log_probs").to_pylist(), strict=True):
        if sampled is None or trained is None:
            ratios.append(None)
        else:
            ratios.append(np.exp(np.float32(trained) - np.float32(sampled)))
    return ratios


def _compare_values(
    name: str, recorded: list[Any], replayed: list[Any], rollout_ids: list[str]
) -> Comparison:
    """Compare the values of a column.

    Args:
        name: name of the column.
        recorded: a number, a text, a list of numbers or None for each row.
        replayed: the same of the replay.
        rollout_ids: name of each row.
    """
    num_values = 0
    num_different = 0
    largest = 0.0
    first = None
    # Row by row, because a list may have another length in the replay.
    for row, (old, new) in enumerate(zip(recorded, replayed, strict=True)):
        if old is None or new is None or isinstance(old, str):
            # There is nothing to subtract: a value is missing, or it is a text.
            num_values += 1
            # Two missing values are equal. `==` of None and an array would be an array.
            is_equal = old == new if isinstance(old, str) else old is new
            places = [] if is_equal else [None]
            distances = [math.inf] * len(places)
        else:
            num_values += np.size(old)
            places, distances = _find_differences(old, new)
        num_different += len(places)
        largest = max([largest, *distances])
        if places and first is None:
            place = places[0]
            first = Difference(
                row, rollout_ids[row], place, _value_at(old, place), _value_at(new, place)
            )
    return Comparison(name, num_values, num_different, largest, first)


def _find_differences(old: Any, new: Any) -> tuple[list[int | None], list[float]]:
    """Compare two numbers, or two lists of numbers.

    Returns:
        Places of the values that differ, and the `distance` of each. A place is a position in the
        list, or None for a number and for lists of different lengths.
    """
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
        # `atleast_1d` made a list of the number, which has no places.
        places = [None] * len(places)
    return places, distances


def _value_at(value: Any, place: int | None) -> Any:
    """The value to show for a difference.

    Args:
        value: a number, a text, a list or None.
        place: place from `_find_differences`.

    Returns:
        The entry of a list at the place; without a place, the value itself, or the length of a list
        as text.
    """
    if place is not None:
        return value[place]
    if isinstance(value, list | np.ndarray):
        return f"{len(value)} values"
    return value


def distance(old: float, new: float) -> float:
    """Difference of two numbers: relative to the larger one if its absolute value is above 1.

    Infinity if one of them is infinite or NaN.
    """
    if not (math.isfinite(old) and math.isfinite(new)):
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
        A comparison for each metric that both have, and the names of metrics that only the record
        has, such as those of generation. `_MACHINE_METRICS` are in neither.
    """
    comparisons = []
    recorded_alone = []
    for name, old in sorted(recorded.items()):
        if name.startswith(_MACHINE_METRICS):
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
