# SPDX-License-Identifier: Apache-2.0
"""One ragged batch of two turns, worked out by hand for every loss.

row 0: three own tokens with a tool's token between the second and the third; row 1: one own token.
ratios r = p / p_old     row 0: 2, 0.5, (tool), 1        row 1: 4
old probability          row 0: 0.25, 0.5, (tool), 0.5   row 1: 0.125
so the new one is        row 0: 0.5, 0.25, (tool), 0.5   row 1: 0.5
advantages               row 0: 1, -2, (tool), 1         row 1: -1
clips: 0.2 below, 0.5 above; dual clip 3
"""

import math

import pytest
import torch

from quadriga.algorithms.registry import POLICY_LOSSES, bind_options, required_fields

NAN = float("nan")
HALF, QUARTER = math.log(0.5), math.log(0.25)
OLD = torch.tensor([[0.25, 0.5, NAN, 0.5], [0.125, NAN, NAN, NAN]], dtype=torch.float64).log()
NEW = torch.tensor([[0.5, 0.25, NAN, 0.5], [0.5, NAN, NAN, NAN]], dtype=torch.float64).log()
GAIN = torch.tensor([[1.0, -2.0, NAN, 1.0], [-1.0, NAN, NAN, NAN]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
MARKS = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])
SETTINGS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.5, "clip_ratio_c": 3.0}


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


EXPECTED = {
    # -min(2, 1.5) = -1.5; A < 0 and r = 0.5: max(1, 2 * 0.8) = 1.6; -1; A < 0 and r = 4: min(4, 3) = 3.
    "vanilla": [-1.5, 1.6, -1.0, 3.0],
    "bypass_mode": [-1.5, 1.6, -1.0, 3.0],
    # Row 0: s = (2 * 0.5 * 1)^(1/3) = 1, losses -A. Row 1: s = 4 and A < 0: max(4, 1.5) = 4, without a dual clip.
    "gspo": [-1.0, 2.0, -1.0, 4.0],
    # gspo's, times 3 tokens and 1 token.
    "luspo": [-3.0, 6.0, -3.0, 4.0],
    # -A phi(W) log p. Row 0: W = 1, so phi = 1. Row 1: W = 4 and A < 0: phi = 4^3 exp(2 (1 - 4)).
    "vespo": [-HALF, 2 * QUARTER, -HALF, 64 * math.exp(-6) * HALF],
    # Row 0: log 2 = 0.693 held at 0.5 (A > 0); log 0.5 = -0.693 held at -0.2 (A < 0); 0. The ratio is exp(0.3 / 3).
    # Row 1: A < 0 and log 4 above: not held; 4.
    "geo_mean": [-math.exp(0.1), 2 * math.exp(0.1), -math.exp(0.1), 4.0],
    # Gates 4 sigmoid(r - 1) for A > 0; 4 / 1.05 sigmoid(1.05 (r - 1)) for A < 0; at r = 1 the gate is 2.
    "sapo": [-4 * sigmoid(1), 2 * 4 / 1.05 * sigmoid(-0.525), -2.0, 4 / 1.05 * sigmoid(3.15)],
    # -A log p.
    "gpg": [-HALF, 2 * QUARTER, -HALF, HALF],
    # -A clip(r) log p, r in [0.8, 1.5].
    "cispo": [-1.5 * HALF, 2 * 0.8 * QUARTER, -HALF, 1.5 * HALF],
    # |p - q| = 0.25 <= 0.5: -2 log 0.5; 0.25 > 0.2 and falling with A < 0: 0; -log 0.5; rising with A < 0,
    # the ratio of 4 cut to 3: 3 log 0.5.
    "dppo_tv": [-2 * HALF, 0.0, -HALF, 3 * HALF],
    # KL((.25, .75) || (.5, .5)) = 0.131 <= 0.5; KL((.5, .5) || (.25, .75)) = 0.144 <= 0.2, so 2 * 0.5 log 0.25; the
    # rest as for dppo_tv.
    "dppo_kl": [-2 * HALF, 2 * 0.5 * QUARTER, -HALF, 3 * HALF],
    # gpg's, plus 0.05 times squares of log 2, log 0.5, 0 and log 4 = 2 log 2.
    "dro": [-HALF + 0.05 * HALF**2, 2 * QUARTER + 0.05 * HALF**2, -HALF, HALF + 0.05 * 4 * HALF**2],
    # vanilla's, and 0 on the marked token.
    "clip_cov": [-1.5, 0.0, -1.0, 3.0],
    # -A r, plus 0.1 |log 0.5| on the marked token.
    "kl_cov": [-2.0, 1.0 - 0.1 * HALF, -1.0, 4.0],
}
CLIPPED = {
    "vanilla": [1, 1, 0, 0],
    "gspo": [0, 0, 0, 0],
    "geo_mean": [1, 1, 0, 0],
    "cispo": [1, 1, 0, 1],
    "dppo_tv": [0, 1, 0, 0],
    "dppo_kl": [0, 0, 0, 0],
}


def test_every_loss_is_here() -> None:
    """A new one brings its values."""
    assert set(EXPECTED) == set(POLICY_LOSSES)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_golden_values(name: str) -> None:
    """The arithmetic stands beside each value; NaN on the tool's token and on padding is not read."""
    inputs = {"old_log_prob": OLD, "rollout_log_probs": OLD, "log_prob": NEW, "advantages": GAIN}
    inputs |= {"response_mask": MASK, "covariance_clipped": MARKS, "covariance_top": MARKS}
    function = bind_options(POLICY_LOSSES.get(name), shared=SETTINGS)
    losses, told = function(*(inputs[field] for field in required_fields(function)))
    kept = MASK.bool()
    assert losses[kept].tolist() == pytest.approx(EXPECTED[name], rel=1e-9)
    assert not losses[~kept].any()
    if name in CLIPPED:
        assert told["pg_clipfrac"][kept].tolist() == CLIPPED[name]
    if "ppo_kl" in told:
        assert told["ppo_kl"][kept].tolist() == pytest.approx([HALF, -HALF, 0, 2 * HALF], abs=1e-12)
