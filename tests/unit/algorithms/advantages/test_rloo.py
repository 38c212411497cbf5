# SPDX-License-Identifier: Apache-2.0
"""RLOO by hand and against the mean of the others."""

import statistics

import torch

from quadriga.algorithms.advantages.rloo import rloo


def test_golden_values() -> None:
    """1 against (0 + 0.5) / 2, 0 against 0.75, 0.5 against 0.5; 4 is alone."""
    rewards = torch.tensor([[1.0], [0.0], [4.0], [0.5]])
    advantages, _ = rloo(rewards, torch.ones(4, 1), ["a", "a", "b", "a"])
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0.75, -0.75, 4.0, 0.0]))


def test_equals_the_slow_reference(batch) -> None:
    """Each score minus the mean of the others in its group."""
    advantages, returns = rloo(batch.rewards, batch.mask, batch.uid)
    for row, score in enumerate(batch.scores):
        others = [batch.scores[other] for other in batch.group(row) if other != row]
        expected = score - (statistics.mean(others) if others else 0.0)
        torch.testing.assert_close(advantages[row], expected * batch.mask[row].double())
    assert torch.equal(advantages, returns)
