# SPDX-License-Identifier: Apache-2.0
"""Metrics combine by their own reduction and weight, in any grouping."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.observe.metrics import REDUCTIONS, Metric, merge_metrics, reduce_metrics

values = st.floats(-1e6, 1e6)
weights = st.floats(0.5, 1e3)


def test_a_mean_counts_each_part_by_its_weight():
    merged = merge_metrics([{"loss": Metric(1.0, weight=1)}, {"loss": Metric(4.0, weight=3)}])
    assert merged["loss"] == Metric(3.25, "mean", 4.0)


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", 6.0), ("max", 3.0), ("min", 1.0), ("last", 2.0)]
)
def test_other_reductions(reduction, expected):
    parts = [{"x": Metric(value, reduction)} for value in (1.0, 3.0, 2.0)]
    assert merge_metrics(parts)["x"].value == expected


def test_a_name_measured_by_some_parts_only_is_kept():
    merged = merge_metrics([{"a": Metric(1.0)}, {"b": Metric(2.0, "sum")}])
    assert merged == {"a": Metric(1.0), "b": Metric(2.0, "sum")}


def test_reduce_takes_single_metrics_lists_and_leaves_out_what_was_measured_nowhere():
    metrics = {"a": Metric(1.5), "b": [Metric(1.0, weight=1), Metric(2.0, weight=3)], "c": []}
    assert reduce_metrics(metrics) == {"a": 1.5, "b": 1.75}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(REDUCTIONS),
    st.lists(st.tuples(values, weights), min_size=1, max_size=8),
    st.integers(0, 8),
)
def test_merging_in_stages_equals_merging_at_once(reduction, pairs, cut):
    parts = [{"x": Metric(value, reduction, weight)} for value, weight in pairs]
    groups = [group for group in (parts[:cut], parts[cut:]) if group]
    staged = merge_metrics(merge_metrics(group) for group in groups)["x"]
    at_once = merge_metrics(parts)["x"]
    assert staged.value == pytest.approx(at_once.value, rel=1e-9, abs=1e-6)
    assert staged.weight == pytest.approx(at_once.weight)


@pytest.mark.parametrize("order", [(1.0, math.nan), (math.nan, 1.0)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_nan_is_seen_whatever_its_place(reduction, order):
    assert math.isnan(merge_metrics({"x": Metric(value, reduction)} for value in order)["x"].value)


def test_a_part_without_weight_says_nothing_and_the_mean_of_nothing_is_nan():
    nothing = Metric(math.nan, weight=0)
    assert merge_metrics([{"x": nothing}, {"x": Metric(2.0, weight=5)}])["x"].value == 2.0
    assert math.isnan(merge_metrics([{"x": nothing}, {"x": nothing}])["x"].value)


def test_infinities_survive():
    assert (
        merge_metrics({"x": Metric(value, "sum")} for value in (1.0, math.inf))["x"].value
        == math.inf
    )
    assert math.isnan(
        merge_metrics({"x": Metric(value, "sum")} for value in (-math.inf, math.inf))["x"].value
    )


def test_two_reductions_under_one_name_are_refused():
    with pytest.raises(ValueError, match="metric loss: got the reductions mean, sum"):
        merge_metrics([{"loss": Metric(1.0)}, {"loss": Metric(1.0, "sum")}])


def test_a_metric_holds_plain_floats_and_travels():
    metric = Metric(torch.tensor(0.5, requires_grad=True), "mean", np.int64(3))
    assert type(metric.value) is float and type(metric.weight) is float
    assert pickle.loads(pickle.dumps(metric)) == Metric(0.5, "mean", 3.0)


@pytest.mark.parametrize(
    "arguments", [(1.0, "average"), (1.0, "mean", -1.0), (1.0, "mean", math.nan)]
)
def test_a_wrong_reduction_or_weight_is_refused(arguments):
    with pytest.raises(ValueError, match="expected"):
        Metric(*arguments)
