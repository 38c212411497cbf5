# SPDX-License-Identifier: Apache-2.0
"""GRPO for pass@k: only the best response of a group learns. Tang et al., arXiv:2503.19595.

The best response gets the distance of its score to the second best, divided by the group's standard deviation; all
others get 0: what counts is the best of k tries, and only the best response raised that.

Where several responses share the best score the distance is 0. A group of one keeps its score.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("grpo_passk")
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    *,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same advantage on every token of a response, as advantages and as returns, [B, T] each.
    `epsilon`: added to the group's standard deviation.
    `norm_adv_by_std_in_grpo`: divide by that deviation (the unbiased one)."""
    scores = token_level_rewards.sum(-1)
    groups = Groups.of(uid, scores)
    best = -groups.smallest(-scores)
    is_best = scores == best
    second = -groups.smallest(-scores.masked_fill(is_best, -float("inf")))
    has_one_best = groups.sum(is_best.to(scores.dtype)) == 1
    lead = (scores - second).masked_fill(~(is_best & has_one_best), 0)
    advantage = lead.where(groups.size > 1, scores)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.deviation(scores) + epsilon)
    advantages = spread(advantage, response_mask)
    return advantages, advantages
