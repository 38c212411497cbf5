# SPDX-License-Identifier: Apache-2.0
"""ReMax by hand and against sums written out."""

import torch

from quadriga.algorithms.advantages.remax import remax


def test_golden_values() -> None:
    """Rewards 1, -1, 3 leave 3, 2, 3 to go; the greedy answer scored 2."""
    rewards = torch.tensor([[1.0, -1.0, 3.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    advantages, returns = remax(rewards, torch.tensor([2.0]), mask)
    assert returns.tolist() == [[3.0, 2.0, 3.0, 0.0]]
    assert advantages.tolist() == [[1.0, 0.0, 1.0, 0.0]]


def test_equals_the_slow_reference(batch) -> None:
    """Sum what comes, token by token."""
    advantages, _ = remax(batch.rewards, batch.baselines, batch.mask)
    for row in range(len(batch.mask)):
        for t in range(batch.mask.shape[1]):
            to_go = float(batch.rewards[row, t:].sum())
            expected = (to_go - float(batch.baselines[row])) * float(batch.mask[row, t])
            assert abs(float(advantages[row, t]) - expected) < 1e-12
