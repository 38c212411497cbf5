# SPDX-License-Identifier: Apache-2.0
"""GMPO: the geometric mean in place of the arithmetic one. Zhao et al., arXiv:2507.20673.

The logarithm of each token's ratio is clipped, if that makes the objective smaller, and the response's ratio is the
geometric mean of what is left:

    c_t = clip(log r_t, -clip_ratio_low, clip_ratio_high), on the pessimistic side only
    loss_t = -A_t exp(mean over t of c_t)

Each token passes on its own gradient; where a response has one advantage that is the gradient of the paper's objective.
The paper averages over responses (`loss_agg_mode=seq-mean-token-mean`) and clips wide: 0.4 on both sides.

Shapes: B sequences, T response positions.
"""

from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios, sequence_mean
from quadriga.algorithms.registry import register_policy_loss


@register_policy_loss("geo_mean", needs_advantage=True)
def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, [B, T]; diagnostics `pg_clipfrac`, `ppo_kl`.
    `clip_ratio_low`, `clip_ratio_high`: how far below and above 0 the logarithm of a token's ratio counts."""
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    gain = advantages.masked_fill(~response_mask.bool(), 0)
    is_clipped = ((gain > 0) & (log_ratio > clip_ratio_high)) | (
        (gain < 0) & (log_ratio < -clip_ratio_low)
    )
    held = log_ratio.where(~is_clipped, log_ratio.detach().clamp(-clip_ratio_low, clip_ratio_high))
    of_response = sequence_mean(held, response_mask).detach()
    losses = -gain * (of_response + (held - held.detach())).exp()
    return losses, diagnostics(log_ratio, pg_clipfrac=is_clipped)
