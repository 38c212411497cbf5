# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ with a group baseline. Hu et al., arXiv:2501.03262.

The score of a response minus the mean score of its group, whitened over all tokens of the batch.
The group tells which score to expect for a prompt; the batch tells how large a difference is.

Groups may have any size and order; a group of one keeps its score.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import masked_whiten, spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("reinforce_plus_plus_baseline", compares_group=True)
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    *,
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Group-relative scores, whitened over the tokens of the batch.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        uid: group of each response, [B].
        rollout_id: rollout of each row, [B]. None: every row is a rollout.

    Returns:
        Advantages and returns, [B, T] each: the response's advantage on each of its tokens.
    """
    scores = token_level_rewards.sum(-1)  # [B]
    centered = Groups.of(uid, scores, rollout_id).centered(scores)
    # Whitening the tokens, not the responses, lets long responses count more in mean and variance.
    advantages = masked_whiten(spread(centered, response_mask), response_mask)
    return advantages, advantages
