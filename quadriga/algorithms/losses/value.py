# SPDX-License-Identifier: Apache-2.0
"""Clipped loss of the critic. Schulman et al., arXiv:1707.06347; arXiv:1506.02438.

Half the squared distance from the return, either of the prediction or of the prediction held within
`cliprange_value` of the one before the update, whichever is larger.

Shapes: [B, T] with B sequences and T response positions, or any other shape, element by element.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import zero_outside


def clipped_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error of the critic's predictions.

    Args:
        vpreds: predictions of the critic, with gradient, [B, T].
        returns: returns to predict, [B, T].
        values: predictions before the update, [B, T].
        response_mask: [B, T]; nothing is read and no gradient flows outside it.
        cliprange_value: how far a prediction may move from `values` and still lower the loss.

    Returns:
        The loss of each token, [B, T], 0 outside the mask, and the diagnostic `vf_clipfrac`
        (1 where the clip is active), [B, T].
    """
    squared_error = zero_outside(vpreds - returns, response_mask).square()
    clipped_vpreds = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    clipped_error = zero_outside(clipped_vpreds - returns, response_mask).square()
    # The larger error: a move beyond the clip range that lowers the error is not rewarded.
    losses = torch.maximum(squared_error, clipped_error) / 2
    is_clipped = clipped_error > squared_error
    return losses, {"vf_clipfrac": is_clipped.detach().to(losses.dtype)}
