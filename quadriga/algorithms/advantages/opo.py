# SPDX-License-Identifier: Apache-2.0
"""OPO: on-policy RL with the optimal reward baseline. Hao et al., arXiv:2505.23585.

The score of a response minus the mean score of its group, weighted by the length of the responses.
This is the baseline of least variance if the gradient of a response grows with its length. It is
meant for exactly on-policy updates.

Groups may have any size and order; a group of one keeps its score.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("opo", compares_group=True)
def opo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    *,
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages over the length-weighted mean score of the group.

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
    # The squared length of a response's gradient is taken to grow with its number of tokens.
    lengths = response_mask.bool().sum(-1).to(scores.dtype)
    # A group without any token has no gradient, so any weights will do as long as they are not 0.
    lengths = lengths.where(groups.sum(lengths) > 0, 1.0)
    advantages = spread(groups.centered(scores, weights=lengths), response_mask)
    return advantages, advantages
