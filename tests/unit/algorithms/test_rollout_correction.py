# SPDX-License-Identifier: Apache-2.0
"""The whole correction of a batch, and how far apart two policies are."""

import math
from dataclasses import dataclass

import pytest
import torch

from quadriga.algorithms.rollout_correction import correct_rollout, divergence_metrics

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
    settings = Settings(rollout_is="token", weight_bounds=(None, 1.5), rejections=(("seq_mean", "k1", 0.9, 1.1),))
    changed, told = correct_rollout(COLUMNS, settings)
    assert changed["rollout_is_weights"].tolist() == [pytest.approx([0.5, 1.5, 0, 1]), pytest.approx([1.5, 0, 0, 0])]
    assert changed["response_mask"].tolist() == [[1, 1, 0, 1], [0, 0, 0, 0]]
    assert told["rollout_corr/rollout_rs_masked_fraction"] == 0.25
    assert told["rollout_corr/rollout_is_mean"] == pytest.approx(4.5 / 4)
    assert told["rollout_corr/kl"] == pytest.approx(-LOG2 / 4)


def test_batch_normalisation() -> None:
    """Of answers 0.5 * 2 * 1 = 1 and 2: mean 1.5; of tokens (0.5 + 2 + 1 + 2) / 4."""
    changed, told = correct_rollout(COLUMNS, Settings(rollout_is="sequence", rollout_is_batch_normalize=True))
    assert changed["rollout_is_weights"][:, 0].tolist() == pytest.approx([1 / 1.5, 2 / 1.5])
    assert told["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.5)
    changed, _ = correct_rollout(COLUMNS, Settings(rollout_is="token", rollout_is_batch_normalize=True))
    assert changed["rollout_is_weights"][MASK.bool()].mean() == pytest.approx(1)


def test_metrics_only() -> None:
    """Without weights and rules nothing is changed, and the divergence is told."""
    changed, told = correct_rollout(COLUMNS, Settings())
    assert changed == {} and "rollout_corr/ppl_ratio" in told


def test_bypass_form_leaves_the_rest_to_the_loss() -> None:
    """Only the factor of normalisation, 1 / 1.5, is the batch's; without it nothing is."""
    bypass = {"bypass_mode": True, "rollout_is": "sequence", "rejections": (("token", "k2", 0.0, 0.001),)}
    assert correct_rollout(COLUMNS, Settings(**bypass))[0] == {}
    changed, _ = correct_rollout(COLUMNS, Settings(**bypass, rollout_is_batch_normalize=True))
    assert set(changed) == {"rollout_is_weights"}
    assert changed["rollout_is_weights"].tolist() == [pytest.approx([1 / 1.5, 1 / 1.5, 0, 1 / 1.5]),
                                                      pytest.approx([1 / 1.5, 0, 0, 0])]  # fmt: skip
