# SPDX-License-Identifier: Apache-2.0
"""OTB for answers of several turns. Li et al., arXiv:2602.07078.

The tokens that the policy wrote are moved together before answers are compared: its n-th token stands beside the n-th
of the others, however long the tools' answers in between are. On answers of one turn it is `optimal_token_baseline`.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.advantages.optimal_token_baseline import against_optimum
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("tir_optimal_token_baseline")
def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    *,
    handle_zero_tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token; arguments and result as for `optimal_token_baseline`."""
    is_ours = response_mask.bool()
    to_go = token_level_rewards.flip(-1).cumsum(-1).flip(-1)
    order = (~is_ours).int().argsort(dim=-1, stable=True)
    moved = [column.gather(-1, order) for column in (to_go, is_ours, old_log_probs, sum_pi_squared)]
    advantages = against_optimum(moved[0], moved[1], uid, (moved[2], moved[3]), keeps_tail=handle_zero_tail)
    return advantages.gather(-1, order.argsort(dim=-1)), to_go.masked_fill(~is_ours, 0)
