# SPDX-License-Identifier: Apache-2.0
"""The clipped policy loss: golden values, gradients against the formula by hand, and what is outside the mask."""

import math

import pytest
import torch

from quadriga.algorithms.losses.vanilla import vanilla
from quadriga.errors import ConfigError

OPTIONS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}


def by_hand(ratio: float, advantage: float) -> tuple[float, float, bool, bool]:
    """The loss of one token and its derivative by log-prob, and which clip holds it."""
    clipped = min(max(ratio, 0.8), 1.3)
    if advantage >= 0:
        is_held = ratio > 1.3
        return (
            -advantage * (clipped if is_held else ratio),
            0.0 if is_held else -advantage * ratio,
            is_held,
            False,
        )
    if ratio > 3.0:
        return -advantage * 3.0, 0.0, False, True
    is_held = ratio < 0.8
    return (
        -advantage * (clipped if is_held else ratio),
        0.0 if is_held else -advantage * ratio,
        is_held,
        False,
    )


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.9, 1.0, 1.29, 1.31, 2.9, 3.5])
def test_value_gradient_and_diagnostics(ratio: float, advantage: float) -> None:
    """Below, inside and above both clips and the dual clip, for good and bad tokens."""
    old = torch.tensor([[-2.0]], dtype=torch.float64)
    log_prob = (old + math.log(ratio)).requires_grad_()
    losses, diagnostics = vanilla(
        old, log_prob, torch.full_like(old, advantage), torch.ones(1, 1), **OPTIONS
    )
    losses.sum().backward()
    value, slope, is_clipped, is_bounded = by_hand(ratio, advantage)
    assert losses.item() == pytest.approx(value, rel=1e-12)
    assert log_prob.grad.item() == pytest.approx(slope, rel=1e-12)
    assert diagnostics["pg_clipfrac"].item() == is_clipped
    assert diagnostics["pg_clipfrac_lower"].item() == is_bounded
    assert diagnostics["ppo_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-12)


def test_on_policy_gradient_is_reinforce() -> None:
    """At ratio 1 the gradient is minus the advantage, whatever the clip."""
    log_prob = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, -0.5]])
    vanilla(log_prob.detach(), log_prob, advantages, torch.ones(1, 2), **OPTIONS)[
        0
    ].sum().backward()
    assert log_prob.grad.tolist() == [[-2.0, 0.5]]


def test_a_wild_token_stays_finite() -> None:
    """A log-ratio of 200 is cut to 20, and a bad token that wild costs clip_ratio_c times its advantage."""
    old, log_prob = torch.tensor([[-200.0, -200.0]]), torch.tensor([[0.0, 0.0]], requires_grad=True)
    losses, diagnostics = vanilla(
        old, log_prob, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2), **OPTIONS
    )
    losses.sum().backward()
    assert losses.tolist() == [[pytest.approx(-1.3), 3.0]]
    assert diagnostics["ppo_kl"].tolist() == [[-20.0, -20.0]]
    assert not log_prob.grad.any()


def test_nothing_outside_the_mask() -> None:
    """NaN in all three inputs there gives a loss of 0 and a gradient of 0."""
    nan = float("nan")
    log_prob = torch.tensor([[-1.0, nan]], requires_grad=True)
    losses, diagnostics = vanilla(
        torch.tensor([[-1.0, nan]]),
        log_prob,
        torch.tensor([[1.0, nan]]),
        torch.tensor([[1, 0]]),
        **OPTIONS,
    )
    losses.sum().backward()
    assert losses.tolist() == [[-1.0, 0.0]] and log_prob.grad.tolist() == [[-1.0, 0.0]]
    assert all(values[0, 1] == 0 for values in diagnostics.values())


def test_dual_clip_must_be_above_one() -> None:
    """Below it, the bound would cut losses of tokens that did not move."""
    with pytest.raises(ConfigError, match=r"clip_ratio_c: got 1.0"):
        vanilla(*torch.zeros(4, 1, 1), clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1.0)
