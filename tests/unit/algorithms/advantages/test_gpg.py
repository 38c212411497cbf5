# SPDX-License-Identifier: Apache-2.0
"""GPG by hand: the answers that have a gradient stand for those that have none."""

import torch

from quadriga.algorithms.advantages.gpg import gpg


def test_golden_values() -> None:
    """Of 8 answers 2 have scores that differ: alpha is 4. Half of it with f_norm 2."""
    scores = torch.tensor([1.0, 0.0, 0.1, 0.1, 0.1, 1.0, 1.0, 1.0])
    uid = [0, 0, 1, 1, 1, 2, 2, 2]
    advantages, _ = gpg(scores[:, None], torch.ones(8, 1), uid)
    assert advantages[:, 0].tolist() == [2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    halved, _ = gpg(scores[:, None], torch.ones(8, 1), uid, f_norm=2.0)
    assert halved[:, 0].tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_equals_the_slow_reference(batch) -> None:
    """All groups of the random batch differ, so that alpha is 1."""
    advantages, _ = gpg(batch.rewards, batch.mask, batch.uid)
    for row, score in enumerate(batch.scores):
        group = [batch.scores[other] for other in batch.group(row)]
        expected = score - sum(group) / len(group) if len(group) > 1 else score
        torch.testing.assert_close(advantages[row], expected * batch.mask[row].double())


def test_no_gradient_anywhere_gives_zero() -> None:
    """Nothing is divided by the number of answers with a gradient when there is none."""
    advantages, _ = gpg(torch.ones(4, 2), torch.ones(4, 2), [0, 0, 1, 1])
    assert not advantages.any()
