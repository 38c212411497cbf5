# SPDX-License-Identifier: Apache-2.0
"""CISPO: the clipped weight of importance sampling. MiniMax-M1, arXiv:2506.13585, section 3.1.

The ratio is clipped and held constant, and every token keeps its gradient, however far it has moved:

    loss_t = -A_t sg[clip(r_t, 1 - clip_ratio_low, 1 + clip_ratio_high)] log p_t

The paper leaves the lower side open (`clip_ratio_low=1`) and averages over tokens.

Shapes: [B, T] with B sequences and T response positions, or any other, element by element.
"""

from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios
from quadriga.algorithms.registry import register_policy_loss


@register_policy_loss("cispo", needs_advantage=True)
def cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, [B, T]; diagnostics `pg_clipfrac`, `ppo_kl`.
    `clip_ratio_low`, `clip_ratio_high`: how far below and above 1 the weight may be."""
    outside = ~response_mask.bool()
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = -advantages.masked_fill(outside, 0) * weight * log_prob.masked_fill(outside, 0)
    return losses, diagnostics(log_ratio, pg_clipfrac=weight != ratio)
