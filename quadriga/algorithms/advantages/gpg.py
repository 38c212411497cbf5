# SPDX-License-Identifier: Apache-2.0
"""GPG: group policy gradient. Chu et al., arXiv:2504.02546.

The score of a response minus the mean score of its group, divided by a constant. Responses of groups whose scores are
all alike have no gradient, yet they count in the batch's mean; the rest is therefore scaled up by alpha = responses of
the batch / responses of groups whose scores differ.

Groups may have any size and order; a group of one keeps its score, and counts as one that has a gradient.
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
) -> tuple[Tensor, Tensor]:
    """The same advantage on every token of a response, as advantages and as returns, [B, T] each.
    `f_norm`: the constant to divide by."""
    scores = token_level_rewards.sum(-1)
    groups = Groups.of(uid, scores)
    num_with_gradient = (groups.deviation(scores) > 0).sum()
    alpha = len(scores) / num_with_gradient.clamp(min=1)
    advantages = spread(alpha * groups.centered(scores) / f_norm, response_mask)
    return advantages, advantages
