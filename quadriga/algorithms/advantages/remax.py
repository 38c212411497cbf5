# SPDX-License-Identifier: Apache-2.0
"""ReMax: the greedy response is the baseline. Li et al., arXiv:2310.10505.

The reward still to come at each token minus the score of the response that greedy decoding gives to the same prompt.
Reading `reward_baselines` is what makes the trainer generate that response.
"""

from torch import Tensor

from quadriga.algorithms.registry import register_adv_est


@register_adv_est("remax")
def remax(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (undiscounted rewards to go), [B, T] each.
    `reward_baselines`: [B], the score of the greedy response to the row's prompt."""
    is_outside = ~response_mask.bool()
    to_go = token_level_rewards.flip(-1).cumsum(-1).flip(-1)
    return (to_go - reward_baselines[:, None]).masked_fill(is_outside, 0), to_go.masked_fill(
        is_outside, 0
    )
