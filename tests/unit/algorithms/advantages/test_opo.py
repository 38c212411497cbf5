# SPDX-License-Identifier: Apache-2.0
"""OPO by hand and against a weighted mean written out."""

import torch

from quadriga.algorithms.advantages.opo import opo


def test_golden_values() -> None:
    """Three tokens that scored 1 and one token that scored 0: the baseline is 3/4, not 1/2."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    advantages, _ = opo(rewards, mask, ["a", "a"])
    assert advantages.tolist() == [[0.25, 0.25, 0.25], [-0.75, 0.0, 0.0]]


def test_equals_the_slow_reference(batch) -> None:
    """Each score minus the mean of its group weighted by length."""
    advantages, _ = opo(batch.rewards, batch.mask, batch.uid)
    lengths = batch.mask.sum(-1).tolist()
    for row, score in enumerate(batch.scores):
        group = batch.group(row)
        total = sum(lengths[other] for other in group)
        weighted = sum(lengths[other] * batch.scores[other] for other in group)
        baseline = weighted / total if len(group) > 1 else 0.0
        torch.testing.assert_close(advantages[row], (score - baseline) * batch.mask[row].double())


def test_group_without_tokens_gives_zero() -> None:
    """There is no length to weigh with, and nothing to divide by it."""
    advantages, _ = opo(torch.zeros(2, 3), torch.zeros(2, 3), ["a", "a"])
    assert not advantages.any()
