# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++: REINFORCE with a baseline over the batch. Hu et al., arXiv:2501.03262.

The discounted reward still to come at each token, whitened over all tokens of the batch. It needs neither a critic
nor several responses per prompt; the paper puts a k1 KL penalty into the rewards.

Time passes only with the policy's own tokens: others in between (a tool's output, mask 0) discount nothing.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import masked_whiten
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """Whitened advantages and the returns they come from, [B, T] each; `gamma`, 0 to 1, discounts per token."""
    is_ours = response_mask.bool()
    returns = torch.zeros_like(token_level_rewards)
    to_go = torch.zeros_like(token_level_rewards[:, 0])
    for t in reversed(range(returns.shape[1])):
        to_go = token_level_rewards[:, t] + torch.where(is_ours[:, t], gamma * to_go, to_go)
        returns[:, t] = to_go
    returns = returns.masked_fill(~is_ours, 0)
    return masked_whiten(returns, response_mask), returns
