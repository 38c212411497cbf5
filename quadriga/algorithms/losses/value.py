# SPDX-License-Identifier: Apache-2.0
"""The critic's loss, clipped like the policy's. Schulman et al., arXiv:1707.06347; arXiv:1506.02438.

Half the squared distance from the return, of the prediction or of the prediction held within `cliprange_value` of the
one before the update, whichever is worse.

Shapes: [B, T] with B sequences and T response positions, or any other, element by element.
"""

import torch
from torch import Tensor


def clipped_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token.
    Returns losses per token, 0 outside the mask; diagnostics per token: `vf_clipfrac` (1 where the clip is active).

    Args:
        vpreds: what the critic predicts, with gradient.
        returns: what it should have predicted.
        values: what it predicted before the update.
        response_mask: 0/1 or bool; nothing is read and no gradient flows outside it.
        cliprange_value: how far a prediction may move from `values` and still gain.
    """
    is_outside = ~response_mask.bool()
    error = (vpreds - returns).masked_fill(is_outside, 0)
    held = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    held_error = (held - returns).masked_fill(is_outside, 0)
    losses = torch.maximum(error.square(), held_error.square()) / 2
    is_clipped = held_error.square() > error.square()
    return losses, {"vf_clipfrac": is_clipped.detach().to(losses.dtype)}
