# SPDX-License-Identifier: Apache-2.0
"""Covariances of tokens by hand, and which of them are held back."""

import pytest
import torch

from quadriga.algorithms.losses.covariance import (
    covariance_clipped,
    covariance_top,
    token_covariance,
)
from quadriga.errors import ConfigError

NAN = float("nan")
LOG_PROB = torch.tensor([[-1.0, -3.0, NAN], [-1.0, NAN, -3.0]], dtype=torch.float64)
GAIN = torch.tensor([[2.0, -2.0, NAN], [-1.0, NAN, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])


def test_by_hand() -> None:
    """Means -2 and 0: (1)(2), (-1)(-2), (1)(-1), (-1)(1)."""
    assert token_covariance(LOG_PROB, GAIN, MASK).tolist() == [[2, 2, 0], [-1, 0, -1]]


def test_top() -> None:
    """Half of four tokens: the two of covariance 2. A share that rounds to none is one token all the same."""
    assert covariance_top(LOG_PROB, GAIN, MASK, kl_cov_ratio=0.5).tolist() == [[1, 1, 0], [0, 0, 0]]
    assert covariance_top(LOG_PROB, GAIN, MASK, kl_cov_ratio=0.0).sum() == 1
    assert covariance_top(LOG_PROB, GAIN, MASK, kl_cov_ratio=1.0).tolist() == MASK.tolist()


def test_clipped() -> None:
    """Two are in the range, and a quarter of four tokens is one; the same one each time, and both if half are asked."""
    options = {"clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    one = covariance_clipped(LOG_PROB, GAIN, MASK, clip_cov_ratio=0.25, **options)
    assert one.sum() == 1 and one[0, :2].sum() == 1
    assert torch.equal(
        one, covariance_clipped(LOG_PROB, GAIN, MASK, clip_cov_ratio=0.25, **options)
    )
    both = covariance_clipped(LOG_PROB, GAIN, MASK, clip_cov_ratio=0.5, **options)
    assert both.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert not covariance_clipped(LOG_PROB, GAIN, MASK, clip_cov_lb=3.0, clip_cov_ub=5.0).any()


@pytest.mark.parametrize("seed", range(5))
def test_top_against_a_sort(seed: int) -> None:
    """The tokens of the largest covariance, found by sorting numbers in Python."""
    generator = torch.Generator().manual_seed(seed)
    log_prob, gain = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator)
    mask = (torch.rand(5, 7, generator=generator) < 0.7).long()
    tokens = [(row, t) for row in range(5) for t in range(7) if mask[row, t]]
    means = [
        sum(float(column[place]) for place in tokens) / len(tokens) for column in (log_prob, gain)
    ]
    value = {
        (r, t): (float(log_prob[r, t]) - means[0]) * (float(gain[r, t]) - means[1])
        for r, t in tokens
    }
    best = sorted(tokens, key=value.__getitem__, reverse=True)[: max(1, int(0.3 * len(tokens)))]
    marks = covariance_top(log_prob, gain, mask, kl_cov_ratio=0.3)
    assert {tuple(place) for place in marks.nonzero().tolist()} == set(best)


def test_an_empty_batch() -> None:
    """No token, no mark."""
    empty = torch.zeros_like(MASK)
    assert (
        not covariance_top(LOG_PROB, GAIN, empty).any()
        and not covariance_clipped(LOG_PROB, GAIN, empty).any()
    )


def test_refused() -> None:
    """A range that is empty, a share that is none."""
    with pytest.raises(
        ConfigError, match=r"clip_cov_lb: got 5.0 with clip_cov_ub=5.0, expected less"
    ):
        covariance_clipped(LOG_PROB, GAIN, MASK, clip_cov_lb=5.0)
    with pytest.raises(ConfigError, match="kl_cov_ratio: got 2, expected a share"):
        covariance_top(LOG_PROB, GAIN, MASK, kl_cov_ratio=2)
