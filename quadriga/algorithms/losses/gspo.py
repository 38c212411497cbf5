# SPDX-License-Identifier: Apache-2.0
"""GSPO: group sequence policy optimization. Zheng et al., arXiv:2507.18071, sec. 4.3 (per token).

One ratio for a whole response, the geometric mean of the ratios of its tokens:

    s = exp(mean over t of log r_t)
    loss_t = max(-A_t s, -A_t clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high))

Each token passes on the gradient of its own log-probability, so advantages may differ within a
response. The paper averages over responses (`loss_agg_mode=seq-mean-token-mean`) and clips far more
tightly than PPO: 3e-4 and 4e-4.

Shapes: B sequences, T response positions.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import diagnostics, sequence_mean, zero_outside
from quadriga.algorithms.registry import register_policy_loss

# The mean is clamped to this before exp(), so that one outlier gives a large number, not inf.
MAX_MEAN_LOG_RATIO = 10.0


@register_policy_loss("gspo", needs_advantage=True)
def gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss with one ratio per response.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        clip_ratio_low: the response's ratio is clipped below 1 - `clip_ratio_low`.
        clip_ratio_high: the response's ratio is clipped above 1 + `clip_ratio_high`.

    Returns:
        The loss of each token, [B, T], and the diagnostics `pg_clipfrac` and `ppo_kl`.
    """
    log_ratio = zero_outside(log_prob - old_log_prob, response_mask)
    advantages = zero_outside(advantages, response_mask)

    # Straight-through: the mean gives the value of the ratio. The second term of the exponent is 0
    # in value, and gives each token the gradient of its own log-probability.
    mean = sequence_mean(log_ratio, response_mask).detach()  # [B, 1]
    mean = mean.clamp(max=MAX_MEAN_LOG_RATIO)
    ratio = (mean + (log_ratio - log_ratio.detach())).exp()

    # The larger of the two losses: a move beyond the clip range is not rewarded.
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = torch.maximum(unclipped, clipped)
    return losses, diagnostics(log_ratio, pg_clipfrac=clipped > unclipped)
