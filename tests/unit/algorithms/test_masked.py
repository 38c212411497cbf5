# SPDX-License-Identifier: Apache-2.0
"""Masked sums, means and whitening: values by hand, NaN outside the mask, nothing under it."""

import torch

from quadriga.algorithms.masked import masked_mean, masked_sum, masked_whiten, spread

NAN = float("nan")
VALUES = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


def test_sum_and_mean() -> None:
    """Over everything and by row; an empty row is 0."""
    assert float(masked_sum(VALUES, MASK)) == 9.0
    assert masked_sum(VALUES, MASK, dim=-1).tolist() == [3.0, 6.0, 0.0]
    assert float(masked_mean(VALUES, MASK)) == 3.0
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [1.5, 6.0, 0.0]


def test_no_gradient_outside_the_mask() -> None:
    """A NaN that is not read must not come back as a NaN gradient either."""
    values = VALUES.clone().requires_grad_()
    masked_mean(values, MASK).backward()
    torch.testing.assert_close(values.grad, MASK / 3.0)


def test_whiten() -> None:
    """1, 2, 6: mean 3, unbiased variance 7."""
    expected = torch.tensor([-2.0, -1.0, 3.0]) / 7**0.5
    torch.testing.assert_close(masked_whiten(VALUES, MASK)[MASK.bool()], expected)
    torch.testing.assert_close(masked_whiten(VALUES, MASK, shift_mean=False)[MASK.bool()], expected + 3)
    assert not masked_whiten(VALUES, MASK)[~MASK.bool()].any()


def test_whiten_without_variance() -> None:
    """Equal values, a single value, none at all."""
    assert not masked_whiten(torch.full((3, 3), 0.1), torch.ones(3, 3)).any()
    assert not masked_whiten(VALUES, torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 0]])).any()
    assert not masked_whiten(VALUES, torch.zeros(3, 3)).any()
    assert not masked_whiten(VALUES, torch.zeros(3, 3), shift_mean=False).any()


def test_spread() -> None:
    """One value per row, on the tokens of the row only."""
    assert spread(torch.tensor([5.0, 7.0, NAN]), MASK).tolist() == [[5, 5, 0], [7, 0, 0], [0, 0, 0]]
