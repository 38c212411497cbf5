# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++: REINFORCE with a baseline over the batch. Hu et al., arXiv:2501.03262.

The discounted reward to go of each token, whitened over all tokens of the batch. It needs neither a
critic nor several responses per prompt. The paper adds a k1 KL penalty to the rewards.

Only the policy's own tokens count as time steps: tokens in between (a tool's output, mask 0) do
not discount.

Shapes: B sequences, T response positions.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import masked_whiten, zero_outside
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """Discounted rewards to go, whitened over the batch.

    Args:
        token_level_rewards: [B, T].
        response_mask: 1 on the policy's own tokens, [B, T].
        gamma: discount per token, 0 to 1.

    Returns:
        Whitened advantages and the rewards to go, [B, T] each.
    """
    is_own_token = response_mask.bool()
    returns = torch.zeros_like(token_level_rewards)
    to_go = torch.zeros_like(token_level_rewards[:, 0])  # [B]
    for t in reversed(range(returns.shape[1])):
        # Tokens of others, such as a tool's output, take no time.
        discounted = torch.where(is_own_token[:, t], gamma * to_go, to_go)
        to_go = token_level_rewards[:, t] + discounted
        returns[:, t] = to_go
    returns = zero_outside(returns, response_mask)
    return masked_whiten(returns, response_mask), returns
