# SPDX-License-Identifier: Apache-2.0
"""GPG: group policy gradient. Chu et al., arXiv:2504.02546.

The score of a response minus the mean score of its group, divided by a constant. Groups whose
scores are all equal have no gradient, yet their responses count in the mean of the loss over the
batch. The other responses are therefore scaled up by

    alpha = responses of the batch / responses of groups whose scores differ

Groups may have any size and order; a group of one keeps its score and counts as having a gradient.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("gpg")
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    *,
    f_norm: float = 1.0,
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages, scaled up for groups without a gradient.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        uid: group of each response, [B].
        f_norm: constant that the advantages are divided by.
        rollout_id: rollout of each row, [B]. None: every row is a rollout.

    Returns:
        Advantages and returns, [B, T] each: the response's advantage on each of its tokens.
    """
    scores = token_level_rewards.sum(-1)  # [B]
    groups = Groups.of(uid, scores, rollout_id)
    # A group of one counts, too: its deviation is taken as 1.
    num_with_gradient = groups.count(groups.deviation(scores) > 0)
    num_responses = groups.count(groups.size > 0)
    # If no group has a gradient, all advantages are 0 and alpha does not matter.
    alpha = num_responses / num_with_gradient.clamp(min=1)
    advantages = spread(alpha * groups.centered(scores) / f_norm, response_mask)
    return advantages, advantages
