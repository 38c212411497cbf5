# SPDX-License-Identifier: Apache-2.0
"""Comparison of recorded and replayed numbers: what counts as different, and where it begins."""

from math import inf, nan
from typing import Any

import pyarrow as pa
import pytest

from quadriga.observe.records import SCHEMA
from quadriga.replay.compare import Comparison, Difference, compare_metrics, compare_rows


def table(**columns: list[Any]) -> pa.Table:
    """Two rows of the record; columns that are not given are null."""
    columns = {"rollout_id": ["1-0/0", "1-0/1"], **columns}
    arrays = []
    for field in SCHEMA:
        values = columns.get(field.name, [None, None])
        arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def by_name(recorded: pa.Table, replayed: pa.Table) -> dict[str, Comparison]:
    return {entry.name: entry for entry in compare_rows(recorded, replayed)}


def test_the_first_token_that_differs() -> None:
    recorded = table(advantages=[[1.0, nan], [2.0, 3.0]], log_probs=[None, [-1.0, -1.0]])
    replayed = table(advantages=[[1.0, nan], [2.0, 3.5]], log_probs=[None, [-1.0, -1.0]])
    comparisons = by_name(recorded, replayed)
    first = Difference(1, "1-0/1", 1, 3.0, 3.5)
    assert comparisons["advantages"] == Comparison("advantages", 4, 1, 0.5 / 3.5, first)
    assert comparisons["log_probs"].is_equal
    # A ratio needs the log-probs of the rollout too, which this record does not have.
    assert comparisons.keys() == {"advantages", "log_probs"}


def test_ratios_are_compared() -> None:
    sampled = [[-1.0], [-2.0, -3.0]]
    recorded = table(rollout_log_probs=sampled, log_probs=[[-1.0], None])
    replayed = table(rollout_log_probs=sampled, log_probs=[[-1.0], [-2.0, -3.0]])
    comparisons = by_name(recorded, replayed)
    # The second row was not computed in the run.
    assert comparisons["ratio"].first == Difference(1, "1-0/1", None, None, "2 values")
    assert comparisons["log_probs"].largest == inf


def test_responses_of_another_length() -> None:
    comparisons = by_name(table(values=[[1.0], [2.0]]), table(values=[[1.0], [2.0, 2.0]]))
    assert comparisons["values"].first == Difference(1, "1-0/1", None, "1 values", "2 values")


def test_metrics() -> None:
    recorded = {"actor/loss": 1.0, "actor/nan": nan, "timing_s/step": 3.0, "rollout/num": 4.0}
    comparisons, recorded_alone = compare_metrics(
        recorded, {"actor/loss": 1.1, "actor/nan": nan, "timing_s/step": 9.0}
    )
    assert [entry.name for entry in comparisons if entry.is_equal] == ["actor/nan"]
    [loss] = [entry for entry in comparisons if not entry.is_equal]
    assert loss.largest == pytest.approx(0.1 / 1.1)
    assert recorded_alone == ["rollout/num"]
