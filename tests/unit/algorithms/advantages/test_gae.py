# SPDX-License-Identifier: Apache-2.0
"""GAE by hand, against its definition as a double sum, and with tokens that are not the policy's."""

import pytest
import torch

from quadriga.algorithms.advantages.gae import gae


def whitened(values: list[float]) -> torch.Tensor:
    """Mean 0, unbiased variance 1."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return (numbers - numbers.mean()) / numbers.std()


def test_golden_values() -> None:
    """gamma 0.5, lam 0.5. Backwards: 1 - 0.4 = 0.6; 0.5*0.4 - 0.2 + 0.25*0.6 = 0.15; 0.5*0.2 - 0.1 + 0.25*0.15."""
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.1, 0.2, 0.4]], dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.5)
    raw = [0.0375, 0.15, 0.6]
    torch.testing.assert_close(returns, torch.tensor([[0.1375, 0.35, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(advantages[0], whitened(raw), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_equals_the_definition(batch, gamma: float, lam: float) -> None:
    """Each row reduced to its own tokens, and the sum over later surprises written out."""
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, gamma=gamma, lam=lam)
    expected = torch.zeros_like(batch.values)
    for row in range(len(batch.mask)):
        own = batch.mask[row].nonzero()[:, 0].tolist()
        reward, value = batch.rewards[row, own].tolist(), [*batch.values[row, own].tolist(), 0.0]
        surprise = [reward[i] + gamma * value[i + 1] - value[i] for i in range(len(own))]
        for i, t in enumerate(own):
            expected[row, t] = sum(
                (gamma * lam) ** (j - i) * surprise[j] for j in range(i, len(own))
            )
    mask = batch.mask.bool()
    torch.testing.assert_close(returns[mask], (expected + batch.values)[mask])
    torch.testing.assert_close(
        advantages[mask], whitened(expected[mask].tolist()), rtol=1e-6, atol=1e-7
    )
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_reward_on_a_foreign_token_belongs_to_the_token_before_it() -> None:
    """A tool's tokens are stepped over without a discount, and a score that stands there is not lost."""
    values = torch.tensor([[0.5, 9.0, 9.0, 0.25, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0, 1, 0]])
    rewards = torch.tensor([[0.0, 0.0, 2.0, 0.0, 1.0]], dtype=torch.float64)
    _, returns = gae(rewards, values, mask, gamma=0.5, lam=1.0)
    assert returns.tolist() == [[2.5, 0.0, 0.0, 1.0, 0.0]]


def test_one_token_has_no_variance() -> None:
    """Whitening a single token gives 0, not NaN."""
    advantages, returns = gae(
        torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1), gamma=1.0, lam=1.0
    )
    assert advantages.tolist() == [[0.0]] and returns.tolist() == [[1.0]]
