# SPDX-License-Identifier: Apache-2.0
"""GRPO: group relative policy optimisation. Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.

The score of a response minus the mean score of the responses to the same prompt, divided by their standard deviation.
Without the division it is the advantage of Dr. GRPO (arXiv:2503.20783), which does not favour prompts that are
nearly always or nearly never solved.

`grpo_vectorized` is a second name, for those who know it: there is no loop over groups in either.

Groups may have any size and order; a group of one keeps its score. A group whose scores are all alike gets exactly 0.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("grpo_vectorized")
@register_adv_est("grpo")
def grpo(
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
    advantage = groups.centered(scores)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.deviation(scores) + epsilon)
    advantages = spread(advantage, response_mask)
    return advantages, advantages
