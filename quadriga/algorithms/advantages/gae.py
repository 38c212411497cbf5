# SPDX-License-Identifier: Apache-2.0
"""GAE: generalised advantage estimation. Schulman et al., arXiv:1506.02438.

How much better each token turned out than the critic expected, looking ahead with a weight that decays by gamma * lam
per token; then whitened over the batch. The return, which the critic learns, is the advantage before whitening plus
the value.

Time passes only with the policy's own tokens. Others in between (a tool's output, mask 0) are stepped over, and a
reward that stands on one belongs to the last token before it that the policy wrote.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import masked_whiten
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("gae")
def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Whitened advantages and the returns for the critic, [B, T] each.
    `values`: [B, T], the critic's predictions.
    `gamma`: discount per token, 0 to 1.
    `lam`: 0 trusts the critic one token ahead, 1 only the rewards."""
    is_ours = response_mask.bool()
    advantages = torch.zeros_like(values)
    waiting_reward = next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        reward = token_level_rewards[:, t] + waiting_reward
        surprise = reward + gamma * next_value - values[:, t]
        advantage = surprise + gamma * lam * next_advantage
        waiting_reward = reward.masked_fill(is_ours[:, t], 0)
        next_value = torch.where(is_ours[:, t], values[:, t], next_value)
        next_advantage = torch.where(is_ours[:, t], advantage, next_advantage)
        advantages[:, t] = next_advantage
    returns = (advantages + values).masked_fill(~is_ours, 0)
    return masked_whiten(advantages, response_mask), returns
