# SPDX-License-Identifier: Apache-2.0
"""GRPO: group relative policy optimisation. Shao et al., DeepSeekMath, arXiv:2402.03300, sec. 4.1.

The score of a response minus the mean score of the responses to the same prompt, divided by their
standard deviation:

    A_i = (r_i - mean of group) / (std of group + epsilon)

Without the division it is the advantage of Dr. GRPO (arXiv:2503.20783), which does not favour
prompts that are nearly always or nearly never solved.

`grpo_vectorized` is a second name; neither name loops over groups.

Groups may have any size and order; a group of one keeps its score. A group whose scores are all
equal gets exactly 0.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("grpo_vectorized", compares_group=True)
@register_adv_est("grpo", compares_group=True)
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    *,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages.

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
    advantage = groups.centered(scores)
    # Dr. GRPO leaves out this division.
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.deviation(scores) + epsilon)
    advantages = spread(advantage, response_mask)
    return advantages, advantages
