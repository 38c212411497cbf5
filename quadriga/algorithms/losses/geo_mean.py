# SPDX-License-Identifier: Apache-2.0
"""GMPO: the geometric mean of the ratios of a response. Zhao et al., arXiv:2507.20673.

The log-ratio of each token is clipped if that lowers the objective, and the ratio of the response
is the geometric mean of the clipped ones:

    c_t = clip(log r_t, -clip_ratio_low, clip_ratio_high)           on the pessimistic side only
    loss_t = -A_t exp(mean over t of c_t)

Each token passes on its own gradient. If a response has one advantage, that is the gradient of the
paper's objective. The paper averages over responses (`loss_agg_mode=seq-mean-token-mean`) and
clips wide: 0.4 on both sides.

Shapes: B sequences, T response positions.
"""

from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios, sequence_mean, zero_outside
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
    """Policy loss with the geometric mean of a response's clipped ratios.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        clip_ratio_low: how far below 0 a token's log-ratio counts.
        clip_ratio_high: how far above 0 a token's log-ratio counts.

    Returns:
        The loss of each token, [B, T], and the diagnostics `pg_clipfrac` and `ppo_kl`.
    """
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    advantages = zero_outside(advantages, response_mask)

    # Clip only where it makes the objective smaller.
    is_too_high = (advantages > 0) & (log_ratio > clip_ratio_high)
    is_too_low = (advantages < 0) & (log_ratio < -clip_ratio_low)
    is_clipped = is_too_high | is_too_low
    # A clipped token counts with the bound in the mean, but has no gradient.
    bounded = log_ratio.detach().clamp(-clip_ratio_low, clip_ratio_high)
    clipped = log_ratio.where(~is_clipped, bounded)

    # Straight-through: the mean gives the value of the ratio. The second term of the exponent is 0
    # in value, and gives each token the gradient of its own log-ratio.
    mean = sequence_mean(clipped, response_mask).detach()  # [B, 1]
    ratio = (mean + (clipped - clipped.detach())).exp()
    return -advantages * ratio, diagnostics(log_ratio, pg_clipfrac=is_clipped)
