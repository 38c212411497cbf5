# SPDX-License-Identifier: Apache-2.0
"""The optimal baseline of each token by hand: one turn, several turns, and tokens that nobody else has."""

import pytest
import torch

from quadriga.algorithms.advantages import optimal_token_baseline, tir_optimal_token_baseline

# 1 - 2 p + sum p^2 with p = 0.5: 0.25 of sum p^2 = 0.25, 0.75 of 0.75, 0 of 0.
LOG_PROBS = torch.full((3, 3), 0.5, dtype=torch.float64).log()
ONES = torch.ones(3, 3, dtype=torch.float64)
SQUARES = torch.tensor(
    [[0.25, 0.25, 0.25], [0.75, 0.75, 0.75], [0.25, 0.25, 0.25]], dtype=torch.float64
)


def test_one_turn() -> None:
    """Answers of 3 and 2 tokens with rewards 4 and 0 at their ends, and 7 alone.

    Weights add up: 0.25, 0.5 and 0.75, 1.5. Baselines: 4 * 0.25 / (0.25 + 0.75) = 1 and 4 * 0.5 / 2 = 1; at the third
    place the first answer is by itself and keeps its reward, or has its own reward as the baseline.
    """
    rewards = torch.tensor([[0.0, 0.0, 4.0], [0.0, 0.0, 0.0], [0.0, 7.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]])
    columns = (rewards, mask, ["a", "a", "b"], LOG_PROBS, SQUARES, ONES)
    advantages, returns = optimal_token_baseline(*columns)
    assert advantages.tolist() == [[3, 3, 4], [-1, -1, 0], [7, 7, 0]]
    assert returns.tolist() == [[4, 4, 4], [0, 0, 0], [7, 7, 0]]
    assert optimal_token_baseline(*columns, handle_zero_tail=False)[0].tolist() == [
        [3, 3, 0],
        [-1, -1, 0],
        [7, 7, 0],
    ]
    assert torch.equal(tir_optimal_token_baseline(*columns)[0], advantages)


def test_several_turns() -> None:
    """The second own token stands behind a tool's in the first answer and beside it in the second.

    Moved together the first own tokens are compared, 4 * 0.25 / 1 = 1, and the second ones, 4 * 0.5 / 2 = 1. By place
    the last token of the first answer and the second of the other have nobody.
    """
    rewards = torch.tensor([[0.0, 0.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    columns = (rewards, mask, ["a", "a"], LOG_PROBS[:2], SQUARES[:2], ONES[:2])
    assert tir_optimal_token_baseline(*columns)[0].tolist() == [[3, 0, 3], [-1, -1, 0]]
    assert optimal_token_baseline(*columns)[0].tolist() == [[3, 0, 4], [-1, 0, 0]]


@pytest.mark.parametrize("estimator", [optimal_token_baseline, tir_optimal_token_baseline])
def test_importance_weights_count_by_their_squares(estimator) -> None:
    """Weights 2 on the first answer: 0.25 * 4 against 0.75, a baseline of 4 * 1 / 1.75."""
    weights = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    rewards = torch.tensor([[4.0], [0.0]], dtype=torch.float64)
    columns = (rewards, torch.ones(2, 1), ["a", "a"], LOG_PROBS[:2, :1], SQUARES[:2, :1], weights)
    assert estimator(*columns)[0].flatten().tolist() == pytest.approx([4 - 16 / 7, -16 / 7])


@pytest.mark.parametrize("estimator", [optimal_token_baseline, tir_optimal_token_baseline])
def test_certain_tokens(estimator) -> None:
    """A policy that could not have chosen otherwise has no gradient; the plain mean is as good: 4 - 2 and 0 - 2."""
    rewards, ones = torch.tensor([[4.0], [0.0]]), torch.ones(2, 1)
    assert estimator(rewards, ones, ["a", "a"], ones * 0, ones, ones)[0].tolist() == [[2], [-2]]
