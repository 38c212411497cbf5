# SPDX-License-Identifier: Apache-2.0
"""Importance weights by hand and against loops: truncated, cut off on both sides, of tokens and of answers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.algorithms.rollout_correction import importance_weights, mean_weight, weight_metrics

NAN = float("nan")
# Ratios 4, 0.25, (tool), 2; 8; no token.
RATIO = torch.tensor([[4.0, 0.25, NAN, 2.0], [8.0, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64).log()
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("level", "bounds", "expected"),
    [
        ("token", (None, 3.0), [3, 0.25, 2, 3]),
        ("token", (0.5, 5.0), [4, 0, 2, 0]),
        # 4 * 0.25 * 2 = 2, and 8.
        ("sequence", (None, 3.0), [2, 2, 2, 3]),
        ("sequence", (0.5, 5.0), [2, 2, 2, 0]),
    ],
)
def test_golden_values(level, bounds, expected: list[float]) -> None:
    """Outside the mask 0, whatever stands there."""
    weights = importance_weights(RATIO, MASK, level, bounds)
    assert weights[MASK.bool()].tolist() == pytest.approx(expected) and not weights[~MASK.bool()].any()


def test_mean_for_normalisation() -> None:
    """Of tokens: (3 + 0.25 + 2 + 3) / 4; of answers: (2 + 3) / 2, an empty one not counted; 1 where all are cut off."""
    tokens = importance_weights(RATIO, MASK, "token", (None, 3.0))
    assert mean_weight(tokens, MASK, "token").item() == pytest.approx(8.25 / 4)
    answers = importance_weights(RATIO, MASK, "sequence", (None, 3.0))
    assert mean_weight(answers, MASK, "sequence").item() == pytest.approx(2.5)
    assert mean_weight(tokens * 0, MASK, "token").item() == 1


def test_metrics_of_tokens() -> None:
    """Raw 4, 0.25, 2, 8 with bounds 0.5 and 5: one above, one below; of what counts, 4, 0, 2, 0: mean 1.5, mean square
    5.

    Means of the answers' raw weights: 6.25 / 3 and 8.
    """
    told = weight_metrics(RATIO, MASK, "token", (0.5, 5.0))
    expected = {
        "mean": 1.5,
        "std": math.sqrt(5 - 1.5**2),
        "eff_sample_size": 1.5**2 / 5,
        "max": 8,
        "min": 0.25,
        "ratio_fraction_high": 0.25,
        "ratio_fraction_low": 0.25,
        "oob_ratio": 0.5,
        "seq_mean": (6.25 / 3 + 8) / 2,
        "seq_std": (8 - 6.25 / 3) / 2,
        "seq_max": 8,
        "seq_min": 6.25 / 3,
        "seq_max_deviation": 7,
        "seq_fraction_high": 0.5,
        "seq_fraction_low": 0,
    }
    assert told == {f"rollout_is_{name}": pytest.approx(value, rel=1e-6) for name, value in expected.items()}


def test_metrics_of_answers_and_of_nothing() -> None:
    """Extremes and shares count each answer once: 2 and 8 against 3. Without a token there is nothing to tell."""
    told = weight_metrics(RATIO, MASK, "sequence", (None, 3.0))
    assert told["rollout_is_max"] == pytest.approx(8) and told["rollout_is_ratio_fraction_high"] == 0.5
    assert "rollout_is_oob_ratio" not in told
    assert weight_metrics(RATIO, MASK * 0, "token", (None, 3.0)) == {}


def test_wild_answers_stay_finite() -> None:
    """A log-ratio of 900 is cut to 20 before the bound; no gradient comes through."""
    ratio = torch.tensor([[900.0, -900.0]], requires_grad=True)
    weights = importance_weights(ratio, torch.ones(1, 2), "token", (None, 2.0))
    assert weights.tolist() == [[2, pytest.approx(math.exp(-20))]] and not weights.requires_grad


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 5),
    level=st.sampled_from(["token", "sequence"]),
    bounds=st.sampled_from([(None, 2.0), (0.5, 1.5)]),
    seed=st.integers(0, 10_000),
)
def test_equals_the_slow_reference(rows: int, level, bounds, seed: int) -> None:
    """One answer at a time."""
    generator = torch.Generator().manual_seed(seed)
    ratio = torch.randn(rows, 6, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, 6, generator=generator) < 0.6
    weights = importance_weights(ratio, mask, level, bounds)
    for row in range(rows):
        own = [t for t in range(6) if mask[row, t]]
        for t in range(6):
            powers = [float(ratio[row, s]) for s in (own if level == "sequence" else [t])]
            weight = math.exp(sum(powers)) if t in own else 0.0
            if bounds[0] is None:
                weight = min(weight, bounds[1])
            elif not bounds[0] <= weight <= bounds[1]:
                weight = 0.0
            assert float(weights[row, t]) == pytest.approx(weight, abs=1e-6)
