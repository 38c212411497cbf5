# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ with a group baseline, by hand and against its two steps written out."""

import statistics

import torch

from quadriga.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline


def test_golden_values() -> None:
    """Centred scores 1, -1 over two tokens and one: mean 1/3, unbiased variance 4/3."""
    rewards = torch.tensor([[0.0, 3.0], [1.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages, _ = reinforce_plus_plus_baseline(rewards, mask, ["a", "a"])
    expected = torch.tensor([[0.5773503, 0.5773503], [-1.1547005, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


def test_equals_the_slow_reference(batch) -> None:
    """Centre each group, lay the score on each token, whiten all of them together."""
    advantages, _ = reinforce_plus_plus_baseline(batch.rewards, batch.mask, batch.uid)
    tokens, centred = [], []
    for row, score in enumerate(batch.scores):
        group = [batch.scores[other] for other in batch.group(row)]
        centred.append(score - statistics.mean(group) if len(group) > 1 else score)
        tokens += [centred[-1]] * int(batch.mask[row].sum())
    mean, deviation = statistics.mean(tokens), statistics.stdev(tokens)
    for row, value in enumerate(centred):
        expected = (value - mean) / deviation * batch.mask[row].double()
        torch.testing.assert_close(advantages[row], expected, rtol=1e-6, atol=1e-7)


def test_scores_all_alike_give_exactly_zero() -> None:
    """Whitening must not blow a rounding error up."""
    advantages, _ = reinforce_plus_plus_baseline(
        torch.full((6, 2), 0.1), torch.ones(6, 2), list("aaabbb")
    )
    assert not advantages.any()
