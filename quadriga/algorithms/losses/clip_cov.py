# SPDX-License-Identifier: Apache-2.0
"""Clip-Cov: a few tokens that would make the policy surer of itself teach nothing. Cui et al., arXiv:2505.22617.

The clipped loss of PPO, and 0 on tokens drawn by lot among those of a high covariance
(`covariance.covariance_clipped`).

Shapes: [B, T] with B sequences and T response positions, or any other, element by element.
"""

from torch import Tensor

from quadriga.algorithms.losses.vanilla import vanilla
from quadriga.algorithms.registry import register_policy_loss


@register_policy_loss("clip_cov", needs_advantage=True)
def clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    covariance_clipped: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token.

    Args:
        old_log_prob, log_prob, advantages, response_mask: as for `vanilla`.
        covariance_clipped: 1 on the tokens left out.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: as for `vanilla`.

    Returns:
        losses per token, 0 outside the mask; the diagnostics of `vanilla`, and `covariance_clipfrac`.
    """
    losses, diagnostics = vanilla(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
    )
    is_left_out = covariance_clipped.bool() & response_mask.bool()
    return losses.masked_fill(is_left_out, 0), {**diagnostics, "covariance_clipfrac": is_left_out.to(losses.dtype)}
