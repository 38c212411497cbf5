# SPDX-License-Identifier: Apache-2.0
"""Which tokens and answers each rule rejects, by hand and against loops, and what is told about it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.algorithms.rollout_correction import Rejection, keep_mask

NAN = float("nan")
# log p_train - log p_rollout: 1, -1, (tool), 0; 0.1, 0.1; none.
RATIO = torch.tensor([[1.0, -1.0, NAN, 0.0], [0.1, 0.1, NAN, NAN], [NAN] * 4], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        # k1 is 1 where the ratio is -1: above log 2 = 0.69; -1 below log 0.5.
        (Rejection("token", "k1", 0.5, 2.0), [0, 0, 1, 1, 1]),
        (Rejection("token", "k1", 0.1, 2.0), [1, 0, 1, 1, 1]),
        # d^2 / 2: 0.5, 0.5, 0, 0.005, 0.005.
        (Rejection("token", "k2", 0, 0.1), [0, 0, 1, 1, 1]),
        # exp(d) - 1 - d: 0.718, 0.368, 0, 0.005, 0.005.
        (Rejection("token", "k3", 0, 0.5), [0, 1, 1, 1, 1]),
        # Sums of k1: 0 and -0.2 = log 0.819.
        (Rejection("seq_sum", "k1", 0.9, 1.1), [1, 1, 1, 0, 0]),
        (Rejection("seq_sum", "k2", 0, 0.5), [0, 0, 0, 1, 1]),
        (Rejection("seq_sum", "k3", 0, 1.2), [1, 1, 1, 1, 1]),
        # Means of k1: 0 and -0.1 = log 0.905; of k2: 0.333 and 0.005; of k3: 0.362 and 0.005.
        (Rejection("seq_mean", "k1", 0.95, 1.05), [1, 1, 1, 0, 0]),
        (Rejection("seq_mean", "k2", 0, 0.3), [0, 0, 0, 1, 1]),
        (Rejection("seq_mean", "k3", 0, 0.001), [0, 0, 0, 0, 0]),
        # The worst token decides.
        (Rejection("seq_max", "k1", 0.5, 3.0), [0, 0, 0, 1, 1]),
        (Rejection("seq_max", "k2", 0, 0.4), [0, 0, 0, 1, 1]),
        (Rejection("seq_max", "k3", 0, 0.7), [0, 0, 0, 1, 1]),
    ],
)
def test_golden_values(rule: Rejection, kept: list[int]) -> None:
    """Five own tokens; the tool's and the padding stay 0."""
    mask, told = keep_mask(RATIO, MASK, [rule])
    assert mask.dtype == MASK.dtype and mask[MASK.bool()].tolist() == kept and not mask[~MASK.bool()].any()
    assert told["rollout_rs_masked_fraction"] == pytest.approx(1 - sum(kept) / 5)
    lost = [not all(kept[:3]), not all(kept[3:])]
    assert told["rollout_rs_seq_masked_fraction"] == sum(lost) / 2
    assert told[f"rollout_rs_{rule.level}_{rule.kind}_masked_fraction"] == told["rollout_rs_masked_fraction"]


def test_all_rules_must_be_kept() -> None:
    """One rejects the first answer, the other the second."""
    rules = [Rejection("seq_max", "k2", 0, 0.4), Rejection("seq_sum", "k1", 0.9, 1.1)]
    mask, told = keep_mask(RATIO, MASK, rules)
    assert not mask.any() and told["rollout_rs_masked_fraction"] == 1
    assert told["rollout_rs_seq_max_k2_seq_masked_fraction"] == 0.5


def test_statistics() -> None:
    """Sums of k1 over the two answers that have tokens: 0 and -0.2, the second below log 0.9."""
    _, told = keep_mask(RATIO, MASK, [Rejection("seq_sum", "k1", 0.9, 1.1)])
    expected = {"mean": -0.1, "std": 0.1, "max": 0, "min": -0.2, "fraction_high": 0, "fraction_low": 0.5}
    for name, value in expected.items():
        assert told[f"rollout_rs_seq_sum_k1_{name}"] == pytest.approx(value, abs=1e-9)


def test_nothing_to_reject() -> None:
    """No rules, or no token."""
    assert torch.equal(keep_mask(RATIO, MASK, [])[0], MASK) and keep_mask(RATIO, MASK, [])[1] == {}
    mask, told = keep_mask(RATIO, MASK * 0, [Rejection("token", "k1", 0.5, 2.0)])
    assert not mask.any() and told == {}


KINDS = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}


@settings(deadline=None, max_examples=60)
@given(
    level=st.sampled_from(["token", "seq_sum", "seq_mean", "seq_max"]),
    kind=st.sampled_from(list(KINDS)),
    upper=st.floats(1.01, 3.0),
    seed=st.integers(0, 10_000),
)
def test_equals_the_slow_reference(level: str, kind: str, upper: float, seed: int) -> None:
    """One answer at a time."""
    generator = torch.Generator().manual_seed(seed)
    ratio = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    mask = (torch.rand(4, 6, generator=generator) < 0.6).long()
    low, high = (-math.log(upper), math.log(upper)) if kind == "k1" else (-math.inf, upper)
    kept, _ = keep_mask(ratio, mask, [Rejection(level, kind, 1 / upper, upper)])
    for row in range(4):
        own = {t: KINDS[kind](float(ratio[row, t])) for t in range(6) if mask[row, t]}
        good = {t: low <= value <= high for t, value in own.items()}
        if own and level in ("seq_sum", "seq_mean"):
            statistic = sum(own.values()) / (len(own) if level == "seq_mean" else 1)
            good = dict.fromkeys(own, low <= statistic <= high)
        elif level == "seq_max":
            good = dict.fromkeys(own, all(good.values()))
        assert kept[row].tolist() == [int(good.get(t, False)) for t in range(6)]
