# SPDX-License-Identifier: Apache-2.0
"""Drawing the batch to learn from: weights by hand, and draws that follow them."""

import pytest
import torch

from quadriga.algorithms.pf_ppo import pf_ppo_rows, pf_ppo_weights
from quadriga.errors import ConfigError

SCORES = torch.tensor([2.0, -3.0, 0.0, 2.0])


@pytest.mark.parametrize(
    ("method", "expected"),
    [("pow", [4, 9, 0, 4]), ("max_min", [1, 1, 0, 1]), ("max_random", [0.4, 0.1, 0.1, 0.4])],
)
def test_weights(method: str, expected: list[float]) -> None:
    """Squares of 2, -3, 0, 2; the best are 2, the worst -3."""
    assert pf_ppo_weights(SCORES, method).tolist() == pytest.approx(expected)


def test_exponent_and_scores_of_zero() -> None:
    """|-3|^1; where all scores are 0 all are as likely."""
    assert pf_ppo_weights(SCORES, "pow", 1.0).tolist() == [2, 3, 0, 2]
    assert pf_ppo_weights(SCORES * 0, "pow").tolist() == [1, 1, 1, 1]


def test_draws() -> None:
    """As many rows as there are, the same from the same seed, in proportion, and never one of weight 0."""
    scores = SCORES.repeat(2500)
    rows = pf_ppo_rows(scores, "pow", seed=3)
    assert len(rows) == 10_000 and torch.equal(rows, pf_ppo_rows(scores, "pow", seed=3))
    shares = torch.bincount(rows % 4, minlength=4) / 10_000
    torch.testing.assert_close(shares, torch.tensor([4.0, 9.0, 0.0, 4.0]) / 17, rtol=0, atol=0.02)


def test_unknown_method() -> None:
    """The nearest name."""
    with pytest.raises(
        ConfigError, match=r"reweight_method: got 'max_mim'.* Did you mean 'max_min'"
    ):
        pf_ppo_weights(SCORES, "max_mim")
