# SPDX-License-Identifier: Apache-2.0
"""DRO: policy gradient with a quadratic penalty. Richemond et al., arXiv:2405.19107.

    loss_t = -A_t log p_t + (dro_beta / 2) (log p_t - log p_old,t)^2

Nothing is clipped: the farther a token moves, the harder it is pulled back. The advantage stands
for the paper's reward minus value. The paper's penalty is against a reference policy; here it is
against the policy that sampled.

Shapes: [B, T] with B sequences and T response positions, or any other shape, element by element.
"""

from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios, zero_outside
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
    """Policy gradient with a quadratic penalty on the log-ratio.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        dro_beta: weight of the penalty, above 0.

    Returns:
        The loss of each token, [B, T], and the diagnostic `ppo_kl`.

    Raises:
        ConfigError: `dro_beta` is not above 0.
    """
    if not dro_beta > 0:
        key = "actor_rollout_ref.actor.policy_loss.dro_beta"
        raise ConfigError(key, got=str(dro_beta), expected="a number above 0")
    # Not clamped, unlike `log_ratios`: the penalty must grow with any distance.
    distance = zero_outside(log_prob - old_log_prob, response_mask)
    advantages = zero_outside(advantages, response_mask)
    gradient_term = -advantages * zero_outside(log_prob, response_mask)
    losses = gradient_term + dro_beta / 2 * distance.square()
    return losses, diagnostics(log_ratios(log_prob, old_log_prob, response_mask))
