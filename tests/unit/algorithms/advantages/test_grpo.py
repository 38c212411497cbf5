# SPDX-License-Identifier: Apache-2.0
"""GRPO by hand, against the standard library's statistics, and where rounding could do harm."""

import statistics

import numpy as np
import pytest
import torch

from quadriga.algorithms.advantages.grpo import grpo


def test_golden_values() -> None:
    """Scores 1, 0, 0, 1 in one group (std 0.57735), 3 and 5 in another (std 1.41421), shuffled; 7 alone."""
    uid = np.array(["a", "b", "a", "c", "a", "b", "a"], dtype=object)
    scores = torch.tensor([1.0, 3.0, 0.0, 7.0, 0.0, 5.0, 1.0])
    rewards = torch.stack([torch.zeros(7), scores], dim=1)
    mask = torch.ones(7, 2)
    mask[5, 1] = 0
    advantages, returns = grpo(rewards, mask, uid)
    per_row = [0.8660254, -0.7071068, -0.8660254, 7.0, -0.8660254, 0.7071068, 0.8660254]
    expected = torch.tensor(per_row)[:, None] * mask
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(returns, advantages)
    plain, _ = grpo(rewards, mask, uid, norm_adv_by_std_in_grpo=False)
    assert plain[:, 0].tolist() == [0.5, -1.0, -0.5, 7.0, -0.5, 1.0, 0.5]


@pytest.mark.parametrize("use_std", [True, False])
def test_equals_the_slow_reference(batch, use_std: bool) -> None:
    """One row at a time, with the standard library."""
    advantages, _ = grpo(
        batch.rewards, batch.mask, batch.uid, norm_adv_by_std_in_grpo=use_std, epsilon=1e-6
    )
    for row, score in enumerate(batch.scores):
        group = [batch.scores[other] for other in batch.group(row)]
        mean, deviation = (
            (statistics.mean(group), statistics.stdev(group)) if len(group) > 1 else (0.0, 1.0)
        )
        expected = (score - mean) / (deviation + 1e-6 if use_std else 1.0)
        torch.testing.assert_close(advantages[row], expected * batch.mask[row].double())


@pytest.mark.parametrize("score", [0.1, 1 / 3, -7.7, 1e6])
def test_scores_all_alike_give_exactly_zero(score: float) -> None:
    """A mean in float32 misses 0.1 by a rounding error, which the division by epsilon would turn into a gradient."""
    rewards = torch.full((7, 1), score)
    advantages, _ = grpo(rewards, torch.ones(7, 1), ["same"] * 7)
    assert not advantages.any()
