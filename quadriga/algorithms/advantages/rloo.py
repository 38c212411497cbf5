# SPDX-License-Identifier: Apache-2.0
"""RLOO: REINFORCE, leave one out. Ahmadian et al., arXiv:2402.14740; Kool et al. (2019).

The score of a response minus the mean score of the *other* responses to the same prompt, which is n / (n - 1) times its
distance from the mean of all n: a baseline that does not depend on the response itself leaves the gradient unbiased.

`rloo_vectorized` is a second name, for those who know it: there is no loop over groups in either.

Groups may have any size and order; a group of one keeps its score.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("rloo_vectorized")
@register_adv_est("rloo")
def rloo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Iterable[Hashable]
) -> tuple[Tensor, Tensor]:
    """The same advantage on every token of a response, as advantages and as returns, [B, T] each."""
    scores = token_level_rewards.sum(-1)
    groups = Groups.of(uid, scores)
    num_others = (groups.size - 1).clamp(min=1)
    advantage = groups.centered(scores) * (groups.size / num_others)
    advantages = spread(advantage, response_mask)
    return advantages, advantages
