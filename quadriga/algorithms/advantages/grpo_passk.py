# SPDX-License-Identifier: Apache-2.0
"""GRPO for pass@k: only the best response of a group learns. Tang et al., arXiv:2503.19595.

The best response gets the distance of its score to the second best, divided by the group's
standard deviation; all others get 0. pass@k counts the best of k tries, and only the best response
raised it.

If several responses share the best score, the distance is 0. A group of one keeps its score.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("grpo_passk", compares_group=True)
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    *,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantage of each group's best response over the second best; 0 for the other responses.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        uid: group of each response, [B].
        epsilon: added to the group's standard deviation.
        norm_adv_by_std_in_grpo: whether to divide by the group's (unbiased) standard deviation.
        rollout_id: rollout of each row, [B]. None: every row is a rollout.

    Returns:
        Advantages and returns, [B, T] each: the response's advantage on each of its tokens.
    """
    scores = token_level_rewards.sum(-1)  # [B]
    groups = Groups.of(uid, scores, rollout_id)

    # `Groups` has no largest value of a group, but the smallest of the negated scores is the same.
    best = -groups.smallest(-scores)
    is_best = scores == best
    second_best = -groups.smallest(-scores.masked_fill(is_best, -float("inf")))

    # A mean over rollouts times their number is the number of rollouts with the best score. If it
    # is not 1 (up to rounding), no response has raised the best score alone.
    num_best = groups.mean(is_best.to(scores.dtype)) * groups.size
    has_single_best = num_best < 1.5
    lead = (scores - second_best).masked_fill(~(is_best & has_single_best), 0)
    # A group of one has no second best.
    advantage = lead.where(groups.size > 1, scores)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.deviation(scores) + epsilon)
    advantages = spread(advantage, response_mask)
    return advantages, advantages
