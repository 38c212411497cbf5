# SPDX-License-Identifier: Apache-2.0
"""SAPO: soft adaptive policy optimization. Gao et al., arXiv:2511.20347.

A smooth gate in place of a clip: with r the ratio and tau a temperature that depends on the sign of the advantage,

    loss_t = -A_t (4 / tau) sigmoid(tau (r_t - 1))

Its gradient is that of plain policy gradient at r = 1 and fades on both sides; the larger tau, the sooner. Bad tokens
get the larger one, for their gradients spread over the whole vocabulary. The paper averages over responses
(`loss_agg_mode=seq-mean-token-mean`).

Shapes: [B, T] with B sequences and T response positions, or any other, element by element.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios
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
    """The loss of each token, [B, T]; diagnostics `ppo_kl`.
    `tau_pos`, `tau_neg`: temperatures for tokens with an advantage above 0, and for the others; above 0."""
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not tau > 0:
            raise ConfigError(
                f"actor_rollout_ref.actor.policy_loss.{name}",
                got=str(tau),
                expected="a number above 0",
            )
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    gain = advantages.masked_fill(~response_mask.bool(), 0)
    tau = torch.full_like(gain, tau_neg).masked_fill(gain > 0, tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return -gain * gate, diagnostics(log_ratio)
