# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ by hand, against its definition, and across a tool's tokens."""

import torch

from quadriga.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus


def test_golden_values() -> None:
    """gamma 0.5: a reward of 4 is worth 1, 2, 4 from the first token on. Their mean is 7/3, their std 1.527525."""
    rewards = torch.tensor([[0.0, 0.0, 4.0]], dtype=torch.float64)
    advantages, returns = reinforce_plus_plus(rewards, torch.ones(1, 3), gamma=0.5)
    assert returns.tolist() == [[1.0, 2.0, 4.0]]
    expected = torch.tensor([[-0.8728716, -0.2182179, 1.0910895]], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


def test_equals_the_definition(batch) -> None:
    """A reward is discounted once per token of the policy's that follows the one in question, up to its own."""
    gamma = 0.9
    advantages, returns = reinforce_plus_plus(batch.rewards, batch.mask, gamma=gamma)
    expected = torch.zeros_like(batch.rewards)
    for row, mask in enumerate(batch.mask.tolist()):
        own = [t for t, is_own in enumerate(mask) if is_own]
        for i, t in enumerate(own):
            expected[row, t] = sum(
                gamma**j * float(batch.rewards[row, later]) for j, later in enumerate(own[i:])
            )
    kept = batch.mask.bool()
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(
        advantages[kept],
        (expected[kept] - expected[kept].mean()) / expected[kept].std(),
        rtol=1e-6,
        atol=1e-7,
    )


def test_foreign_tokens_take_no_time() -> None:
    """The reward after a tool's two tokens is one step away, and one that stands on them is not lost."""
    rewards = torch.tensor([[0.0, 0.0, 1.0, 4.0]])
    _, returns = reinforce_plus_plus(rewards, torch.tensor([[1, 0, 0, 1]]), gamma=0.5)
    assert returns.tolist() == [[2.5, 0.0, 0.0, 4.0]]
