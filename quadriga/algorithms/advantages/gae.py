# SPDX-License-Identifier: Apache-2.0
"""GAE: generalised advantage estimation. Schulman et al., arXiv:1506.02438.

    delta_t = r_t + gamma V_(t+1) - V_t
    A_t     = delta_t + gamma lam A_(t+1)

The advantages are then whitened over the batch. The return, which the critic learns, is the
advantage before whitening plus the value.

Only the policy's own tokens count as time steps. Tokens in between (a tool's output, mask 0) are
skipped, and a reward on one of them belongs to the last token before it that the policy wrote.

Shapes: B sequences, T response positions.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import masked_whiten, zero_outside
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("gae")
def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantages, whitened over the batch.

    Args:
        token_level_rewards: [B, T].
        values: the critic's predictions, [B, T].
        response_mask: 1 on the policy's own tokens, [B, T].
        gamma: discount per token, 0 to 1.
        lam: 0 trusts the critic one token ahead, 1 trusts only the rewards.

    Returns:
        Whitened advantages and the returns for the critic, [B, T] each.
    """
    is_own_token = response_mask.bool()
    advantages = torch.zeros_like(values)
    # The loop goes from right to left. Per sequence, [B]: reward of skipped tokens, which the next
    # own token on the left receives; and value and advantage of the nearest own token on the right.
    waiting_reward = torch.zeros_like(values[:, 0])
    next_value = waiting_reward
    next_advantage = waiting_reward
    for t in reversed(range(values.shape[1])):
        is_own = is_own_token[:, t]
        reward = token_level_rewards[:, t] + waiting_reward
        delta = reward + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        # A skipped token passes its reward to the left, and leaves value and advantage of the next
        # own token as they are.
        waiting_reward = reward.masked_fill(is_own, 0)
        next_value = torch.where(is_own, values[:, t], next_value)
        next_advantage = torch.where(is_own, advantage, next_advantage)
        advantages[:, t] = next_advantage
    # The critic learns the scale of the rewards, so its returns are not whitened.
    returns = zero_outside(advantages + values, response_mask)
    return masked_whiten(advantages, response_mask), returns
