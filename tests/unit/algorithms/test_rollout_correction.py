# SPDX-License-Identifier: Apache-2.0
"""Off-policy correction: mismatch, importance weights, rejection, and the whole correction of a batch."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.algorithms.rollout_correction import (
    Rejection,
    correct_rollout,
    divergence_metrics,
    importance_weights,
    keep_mask,
    mean_weight,
    weight_metrics,
)

NAN = float("nan")
# Rollout: 0.5, 0.25, (tool), 0.5; 0.5. Trainer: 0.25, 0.5, (tool), 0.5; 1. Log-ratios in units of log 2: -1, 1, 0; 1.
ROLLOUT = torch.tensor([[0.5, 0.25, NAN, 0.5], [0.5, NAN, NAN, NAN]], dtype=torch.float64).log()
OLD = torch.tensor([[0.25, 0.5, NAN, 0.5], [1.0, NAN, NAN, NAN]], dtype=torch.float64).log()
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
COLUMNS = {"old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "response_mask": MASK}
LOG2 = math.log(2)


@dataclass
class Settings:
    """As the configuration gives them."""

    bypass_mode: bool = False
    loss_type: str = "reinforce"
    rollout_is: str | None = None
    weight_bounds: tuple[float | None, float] = (None, 2.0)
    rollout_is_batch_normalize: bool = False
    rejections: tuple = ()


def test_divergence_by_hand() -> None:
    """Mean log-probs in units of -log 2: trainer (2 + 1 + 1) / 3 and 0, rollout (1 + 2 + 1) / 3 and 1.

    k1: -(-1 + 1 + 0 + 1) / 4 log 2. k3: (0.5 - 1 + log 2) + (2 - 1 - log 2) + 0 + (2 - 1 - log 2), a quarter of it.
    chi2: ratios squared 1/4, 4, 1, 4; products over answers 1 and 2.
    """
    told = divergence_metrics(OLD, ROLLOUT, MASK)
    expected = {
        "kl": -LOG2 / 4,
        "k3_kl": (1.5 - LOG2) / 4,
        "training_log_ppl": 2 / 3 * LOG2,
        "rollout_log_ppl": (4 / 3 + 1) / 2 * LOG2,
        "training_ppl": (2 ** (4 / 3) + 1) / 2,
        "rollout_ppl": (2 ** (4 / 3) + 2) / 2,
        "ppl_ratio": (1 + 0.5) / 2,
        "log_ppl_diff": -LOG2 / 2,
        "log_ppl_abs_diff": LOG2 / 2,
        "log_ppl_diff_max": 0,
        "log_ppl_diff_min": -LOG2,
        "chi2_token": 9.25 / 4 - 1,
        "chi2_seq": (1 + 4) / 2 - 1,
    }
    assert told == {name: pytest.approx(value, abs=1e-9) for name, value in expected.items()}
    assert divergence_metrics(OLD, ROLLOUT, MASK * 0) == {}


def test_weights_and_rejection() -> None:
    """Ratios 0.5, 2, 1 and 2, truncated at 1.5; the second answer is rejected by its mean k1 of -log 2."""
    settings = Settings(
        rollout_is="token", weight_bounds=(None, 1.5), rejections=(("seq_mean", "k1", 0.9, 1.1),)
    )
    changed, told = correct_rollout(COLUMNS, settings)
    assert changed["rollout_is_weights"].tolist() == [
        pytest.approx([0.5, 1.5, 0, 1]),
        pytest.approx([1.5, 0, 0, 0]),
    ]
    assert changed["response_mask"].tolist() == [[1, 1, 0, 1], [0, 0, 0, 0]]
    assert told["rollout_corr/rollout_rs_masked_fraction"] == 0.25
    assert told["rollout_corr/rollout_is_mean"] == pytest.approx(4.5 / 4)
    assert told["rollout_corr/kl"] == pytest.approx(-LOG2 / 4)


def test_batch_normalisation() -> None:
    """Of answers 0.5 * 2 * 1 = 1 and 2: mean 1.5; of tokens (0.5 + 2 + 1 + 2) / 4."""
    changed, told = correct_rollout(
        COLUMNS, Settings(rollout_is="sequence", rollout_is_batch_normalize=True)
    )
    assert changed["rollout_is_weights"][:, 0].tolist() == pytest.approx([1 / 1.5, 2 / 1.5])
    assert told["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.5)
    changed, _ = correct_rollout(
        COLUMNS, Settings(rollout_is="token", rollout_is_batch_normalize=True)
    )
    assert changed["rollout_is_weights"][MASK.bool()].mean() == pytest.approx(1)


def test_metrics_only() -> None:
    """Without weights and rules nothing is changed, and the divergence is told."""
    changed, told = correct_rollout(COLUMNS, Settings())
    assert changed == {} and "rollout_corr/ppl_ratio" in told


def test_bypass_form_leaves_the_rest_to_the_loss() -> None:
    """Only the factor of normalisation, 1 / 1.5, is the batch's; without it nothing is."""
    bypass = {
        "bypass_mode": True,
        "rollout_is": "sequence",
        "rejections": (("token", "k2", 0.0, 0.001),),
    }
    assert correct_rollout(COLUMNS, Settings(**bypass))[0] == {}
    changed, _ = correct_rollout(COLUMNS, Settings(**bypass, rollout_is_batch_normalize=True))
    assert set(changed) == {"rollout_is_weights"}
    assert changed["rollout_is_weights"].tolist() == [pytest.approx([1 / 1.5, 1 / 1.5, 0, 1 / 1.5]),
                                                      pytest.approx([1 / 1.5, 0, 0, 0])]  # fmt: skip


# Ratios 4, 0.25, (tool), 2; 8; no token.
RATIO = torch.tensor(
    [[4.0, 0.25, NAN, 2.0], [8.0, NAN, NAN, NAN], [NAN] * 4],
    dtype=torch.float64,
).log()
MASK_WEIGHTS = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


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
def test_golden_values_of_weights(level, bounds, expected: list[float]) -> None:
    """Outside the mask 0, whatever stands there."""
    weights = importance_weights(RATIO, MASK_WEIGHTS, level, bounds)
    assert (
        weights[MASK_WEIGHTS.bool()].tolist() == pytest.approx(expected)
        and not weights[~MASK_WEIGHTS.bool()].any()
    )


def test_mean_for_normalisation() -> None:
    """Of tokens: (3 + 0.25 + 2 + 3) / 4; of answers: (2 + 3) / 2, an empty one not counted; 1 where all are cut off."""
    tokens = importance_weights(RATIO, MASK_WEIGHTS, "token", (None, 3.0))
    assert mean_weight(tokens, MASK_WEIGHTS, "token").item() == pytest.approx(8.25 / 4)
    answers = importance_weights(RATIO, MASK_WEIGHTS, "sequence", (None, 3.0))
    assert mean_weight(answers, MASK_WEIGHTS, "sequence").item() == pytest.approx(2.5)
    assert mean_weight(tokens * 0, MASK_WEIGHTS, "token").item() == 1


def test_metrics_of_tokens() -> None:
    """Raw 4, 0.25, 2, 8 with bounds 0.5 and 5: one above, one below; of what counts, 4, 0, 2, 0: mean 1.5, mean square
    5.

    Means of the answers' raw weights: 6.25 / 3 and 8.
    """
    told = weight_metrics(RATIO, MASK_WEIGHTS, "token", (0.5, 5.0))
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
    assert told == {
        f"rollout_is_{name}": pytest.approx(value, rel=1e-6) for name, value in expected.items()
    }


def test_metrics_of_answers_and_of_nothing() -> None:
    """Extremes and shares count each answer once: 2 and 8 against 3. Without a token there is nothing to tell."""
    told = weight_metrics(RATIO, MASK_WEIGHTS, "sequence", (None, 3.0))
    assert (
        told["rollout_is_max"] == pytest.approx(8) and told["rollout_is_ratio_fraction_high"] == 0.5
    )
    assert "rollout_is_oob_ratio" not in told
    assert weight_metrics(RATIO, MASK_WEIGHTS * 0, "token", (None, 3.0)) == {}


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
def test_weights_equal_the_slow_reference(rows: int, level, bounds, seed: int) -> None:
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


# log p_train - log p_rollout: 1, -1, (tool), 0; 0.1, 0.1; none.
RATIO_REJECTION = torch.tensor(
    [[1.0, -1.0, NAN, 0.0], [0.1, 0.1, NAN, NAN], [NAN] * 4],
    dtype=torch.float64,
)
MASK_REJECTION = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]])


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
def test_golden_values_of_rejection(rule: Rejection, kept: list[int]) -> None:
    """Five own tokens; the tool's and the padding stay 0."""
    mask, told = keep_mask(RATIO_REJECTION, MASK_REJECTION, [rule])
    assert (
        mask.dtype == MASK_REJECTION.dtype
        and mask[MASK_REJECTION.bool()].tolist() == kept
        and not mask[~MASK_REJECTION.bool()].any()
    )
    assert told["rollout_rs_masked_fraction"] == pytest.approx(1 - sum(kept) / 5)
    lost = [not all(kept[:3]), not all(kept[3:])]
    assert told["rollout_rs_seq_masked_fraction"] == sum(lost) / 2
    assert (
        told[f"rollout_rs_{rule.level}_{rule.kind}_masked_fraction"]
        == told["rollout_rs_masked_fraction"]
    )


def test_all_rules_must_be_kept() -> None:
    """One rejects the first answer, the other the second."""
    rules = [Rejection("seq_max", "k2", 0, 0.4), Rejection("seq_sum", "k1", 0.9, 1.1)]
    mask, told = keep_mask(RATIO_REJECTION, MASK_REJECTION, rules)
    assert not mask.any() and told["rollout_rs_masked_fraction"] == 1
    assert told["rollout_rs_seq_max_k2_seq_masked_fraction"] == 0.5


def test_statistics_over_responses() -> None:
    """Of a rule on tokens their means, 0 and -0.1; a single response has no deviation."""
    _, told = keep_mask(RATIO_REJECTION, MASK_REJECTION, [Rejection("token", "k1", 0.95, 1.1)])
    expected = {"mean": -0.05, "std": 0.1 / 2**0.5, "max": 0, "min": -0.1, "max_deviation": 0.1}
    expected |= {"fraction_high": 0, "fraction_low": 0.5}
    assert {name: told[f"rollout_rs_token_k1_seq_{name}"] for name in expected} == pytest.approx(
        expected, abs=1e-9
    )
    _, told = keep_mask(
        RATIO_REJECTION[1:], MASK_REJECTION[1:], [Rejection("seq_mean", "k1", 0.9, 1.1)]
    )
    assert (
        told["rollout_rs_seq_mean_k1_seq_mean"] == pytest.approx(-0.1)
        and told["rollout_rs_seq_mean_k1_seq_std"] == 0
    )


def test_statistics() -> None:
    """Sums of k1 over the two answers that have tokens: 0 and -0.2, the second below log 0.9."""
    _, told = keep_mask(RATIO_REJECTION, MASK_REJECTION, [Rejection("seq_sum", "k1", 0.9, 1.1)])
    expected = {
        "mean": -0.1,
        "std": 0.1,
        "max": 0,
        "min": -0.2,
        "fraction_high": 0,
        "fraction_low": 0.5,
    }
    for name, value in expected.items():
        assert told[f"rollout_rs_seq_sum_k1_{name}"] == pytest.approx(value, abs=1e-9)


def test_nothing_to_reject() -> None:
    """No rules, or no token."""
    assert (
        torch.equal(keep_mask(RATIO_REJECTION, MASK_REJECTION, [])[0], MASK_REJECTION)
        and keep_mask(RATIO_REJECTION, MASK_REJECTION, [])[1] == {}
    )
    mask, told = keep_mask(
        RATIO_REJECTION, MASK_REJECTION * 0, [Rejection("token", "k1", 0.5, 2.0)]
    )
    assert not mask.any() and told == {}


KINDS = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}


@settings(deadline=None, max_examples=60)
@given(
    level=st.sampled_from(["token", "seq_sum", "seq_mean", "seq_max"]),
    kind=st.sampled_from(list(KINDS)),
    upper=st.floats(1.01, 3.0),
    seed=st.integers(0, 10_000),
)
def test_rejection_equals_the_slow_reference(
    level: str, kind: str, upper: float, seed: int
) -> None:
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


def test_a_rejected_response_takes_its_rollout_along() -> None:
    """The first rollout has two rows, of which the second is e from the trainer."""
    log_ratio = torch.tensor([[0.0], [1.0], [0.0]])
    mask = torch.ones(3, 1)
    rule = Rejection("seq_sum", "k1", 0.5, 2.0)
    passed, _ = keep_mask(log_ratio, mask, [rule], torch.tensor([0, 0, 1]))
    assert passed.flatten().tolist() == [0, 0, 1]
    passed, _ = keep_mask(log_ratio, mask, [rule])
    assert passed.flatten().tolist() == [1, 0, 1]
