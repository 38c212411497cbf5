# SPDX-License-Identifier: Apache-2.0
"""DRO: policy gradient held back by a quadratic penalty. Richemond et al., arXiv:2405.19107.

    loss_t = -A_t log p_t + (dro_beta / 2) (log p_t - log p_old,t)^2

Nothing is clipped: what moves far is pulled back in proportion. The advantage stands in for the
reward less the value of the paper, whose penalty is against a reference policy; here it is the one that sampled.

Shapes: [B, T] with B sequences and T response positions, or any other, element by element.
"""

from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios
from quadriga.algorithms.registry import register_policy_loss
from quadriga.errors import ConfigError


@register_policy_loss("dro")
def dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    dro_beta: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, [B, T]; diagnostics `ppo_kl`. `dro_beta`: weight of the penalty, above 0."""
    if not dro_beta > 0:
        where = "actor_rollout_ref.actor.policy_loss.dro_beta"
        raise ConfigError(where, got=str(dro_beta), expected="a number above 0")
    outside = ~response_mask.bool()
    distance = (log_prob - old_log_prob).masked_fill(outside, 0)
    gradient_term = -advantages.masked_fill(outside, 0) * log_prob.masked_fill(outside, 0)
    losses = gradient_term + dro_beta / 2 * distance.square()
    return losses, diagnostics(log_ratios(log_prob, old_log_prob, response_mask))
