# SPDX-License-Identifier: Apache-2.0
"""ReMax: the greedy response is the baseline. Li et al., arXiv:2310.10505.

The reward to go of each token minus the score of the response that greedy decoding gives to the
same prompt. Because the estimator reads `reward_baselines`, the trainer generates that response.

Shapes: B sequences, T response positions.
"""

from torch import Tensor

from quadriga.algorithms.masked import zero_outside
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("remax")
def remax(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Rewards to go minus the score of the greedy response.

    Args:
        token_level_rewards: [B, T].
        reward_baselines: score of the greedy response to the row's prompt, [B].
        response_mask: [B, T].

    Returns:
        Advantages and undiscounted rewards to go, [B, T] each.
    """
    # Flipping twice turns the running sum into a sum from each position to the end.
    to_go = token_level_rewards.flip(-1).cumsum(-1).flip(-1)
    advantages = zero_outside(to_go - reward_baselines[:, None], response_mask)
    return advantages, zero_outside(to_go, response_mask)
