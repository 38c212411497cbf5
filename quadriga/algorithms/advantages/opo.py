# SPDX-License-Identifier: Apache-2.0
"""OPO: on-policy RL with the optimal reward baseline. Hao et al., arXiv:2505.23585.

The score of a response minus the mean score of its group in which every response weighs as much as it has tokens: the
baseline of least variance, if a response's gradient grows with its length. Meant for exactly on-policy updates.

Groups may have any size and order; a group of one keeps its score.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("opo")
def opo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Iterable[Hashable]
) -> tuple[Tensor, Tensor]:
    """The same advantage on every token of a response, as advantages and as returns, [B, T] each."""
    scores = token_level_rewards.sum(-1)
    groups = Groups.of(uid, scores)
    lengths = response_mask.bool().sum(-1).to(scores.dtype)
    # A group without a single token has no gradient; any weight will do, if it is not 0.
    lengths = lengths.where(groups.sum(lengths) > 0, 1.0)
    advantages = spread(groups.centered(scores, weights=lengths), response_mask)
    return advantages, advantages
