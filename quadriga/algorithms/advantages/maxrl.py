# SPDX-License-Identifier: Apache-2.0
"""MaxRL: maximum likelihood reinforcement learning. arXiv:2602.02710.

The score of a response relative to the mean score of its group:

    A_i = (r_i - mean of group) / mean of group,  0 if the mean is not above 0

For scores of 0 and 1 the gradient is that of the log-likelihood of success, truncated after as many
terms as the group has responses. A prompt that is solved with probability p weighs about 1 / p, so
hard prompts count more than in GRPO.

Scores are taken to be at least 0. A group of one gets 0, since its score equals the mean.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("maxrl", compares_group=True)
def maxrl(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    *,
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages over the group's mean score, divided by that mean.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        uid: group of each response, [B].
        rollout_id: rollout of each row, [B]. None: every row is a rollout.

    Returns:
        Advantages and returns, [B, T] each: the response's advantage on each of its tokens.
    """
    scores = token_level_rewards.sum(-1)  # [B]
    groups = Groups.of(uid, scores, rollout_id)
    mean = groups.mean(scores)
    has_signal = (mean > 0) & (groups.size > 1)
    advantage = groups.centered(scores) / mean.where(has_signal, 1.0)
    advantages = spread(advantage.where(has_signal, 0.0), response_mask)
    return advantages, advantages
