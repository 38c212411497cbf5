# SPDX-License-Identifier: Apache-2.0
"""The clipped value loss: values and gradients by hand."""

import pytest
import torch

from quadriga.algorithms.losses.value import clipped_value_loss


@pytest.mark.parametrize(
    ("vpred", "expected", "slope", "is_clipped"),
    [
        (0.2, 0.5 * 0.8**2, -0.8, False),  # inside the range: plain
        (0.9, 0.5 * 0.5**2, 0.0, True),  # moved too far towards the return: no more to gain
        (-0.9, 0.5 * 1.9**2, -1.9, False),  # moved away from it: the plain error is worse
    ],
)
def test_golden_values(vpred: float, expected: float, slope: float, is_clipped: bool) -> None:
    """Before: 0. Return: 1. Range: 0.5."""
    prediction = torch.tensor([[vpred]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    losses, diagnostics = clipped_value_loss(prediction, one, zero, one, cliprange_value=0.5)
    losses.sum().backward()
    assert losses.item() == pytest.approx(expected) and prediction.grad.item() == pytest.approx(
        slope
    )
    assert diagnostics["vf_clipfrac"].item() == is_clipped


def test_nothing_outside_the_mask() -> None:
    """NaN there is neither read nor differentiated."""
    prediction = torch.tensor([[float("nan"), 2.0]], requires_grad=True)
    other = torch.tensor([[float("nan"), 2.0]])
    losses, _ = clipped_value_loss(
        prediction, other, other, torch.tensor([[0, 1]]), cliprange_value=0.5
    )
    losses.sum().backward()
    assert losses.tolist() == [[0.0, 0.0]] and prediction.grad.tolist() == [[0.0, 0.0]]
