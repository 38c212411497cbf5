# SPDX-License-Identifier: Apache-2.0
"""The few numbers a person watches."""

import math

import pytest

from quadriga.observe.headline import ValidationResult, join_field, step_fields, validation_results


def test_the_important_metrics_are_picked_in_a_fixed_order_and_the_rest_is_not():
    metrics = {
        "timing_s/step": 8.14,
        "perf/throughput": 1214.3,
        "actor/pg_loss": -0.00123,
        "actor/lr": 2e-5,
        "actor/grad_norm": 0.834,
        "critic/score/mean": 0.4301,
        "perf/mfu/actor": 0.12,
        "response_length/mean": 4.24,
        "actor/kl_loss": 0.00004,
        "critic/advantages/max": 3.0,
    }
    assert list(step_fields(metrics).items()) == [
        ("reward", "0.430"),
        ("loss", "-0.0012"),
        ("kl", "4.0e-05"),
        ("grad", "0.834"),
        ("lr", "2.0e-05"),
        ("len", "4.2"),
        ("mfu", "12%"),
        ("tok/s", "1 214"),
        ("s/step", "8.1"),
    ]


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (-math.inf, "-inf")])
def test_a_number_that_is_none_is_shown_as_such(value, text):
    assert step_fields({"actor/entropy": value, "perf/throughput": value}) == {"entropy": text, "tok/s": text}


def test_units_stand_behind_labels_before():
    assert join_field("reward", "0.43") == "reward 0.43"
    assert join_field("tok/s", "1 214") == "1 214 tok/s"


def test_validation_names_are_taken_apart_though_sources_contain_slashes():
    results = validation_results(
        {
            "val-core/openai/gsm8k/reward/mean@8": 0.5,
            "val-core/math/acc/maj@8/mean": 0.75,
            "val-core/none": 0.0,
            "val-aux/math/acc/std@8": 0.1,
            "actor/entropy": 1.0,
        }
    )
    assert results == [
        ValidationResult("openai/gsm8k", "reward", "mean@8", 0.5),
        ValidationResult("math", "acc", "maj@8/mean", 0.75),
    ]
    assert results[0].column == "reward mean@8"
