# SPDX-License-Identifier: Apache-2.0
"""SAPO: soft adaptive policy optimization. Gao et al., arXiv:2511.20347.

A smooth gate instead of a clip. With r the ratio and tau a temperature that depends on the sign of
the advantage,

    loss_t = -A_t (4 / tau) sigmoid(tau (r_t - 1))

The gradient is that of the plain policy gradient at r = 1 and fades on both sides, sooner for a
larger tau. Tokens of a negative advantage get the larger tau, because their gradients spread over
the whole vocabulary. The paper averages over responses (`loss_agg_mode=seq-mean-token-mean`).

Shapes: [B, T] with B sequences and T response positions, or any other shape, element by element.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios, zero_outside
from quadriga.algorithms.registry import register_policy_loss
from quadriga.errors import ConfigError


@register_policy_loss("sapo", needs_advantage=True)
def sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss with a sigmoid gate on the ratio.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        tau_pos: temperature for tokens with an advantage above 0; above 0.
        tau_neg: temperature for the other tokens; above 0.

    Returns:
        The loss of each token, [B, T], and the diagnostic `ppo_kl`.

    Raises:
        ConfigError: a temperature is not above 0.
    """
    for name, temperature in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not temperature > 0:
            key = f"actor_rollout_ref.actor.policy_loss.{name}"
            raise ConfigError(key, got=str(temperature), expected="a number above 0")
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    advantages = zero_outside(advantages, response_mask)
    # Larger for negative advantages: their gradients fade sooner.
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    # The factor 4 / tau makes the gate's slope 1 at a ratio of 1, where sigmoid' is 1 / 4.
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return -advantages * gate, diagnostics(log_ratio)
