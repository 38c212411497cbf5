# SPDX-License-Identifier: Apache-2.0
"""GSPO: group sequence policy optimization. Zheng et al., arXiv:2507.18071, section 4.3 (the token form).

One ratio for a whole response, the geometric mean of those of its tokens:

    s = exp(mean over t of log r_t)          loss_t = max(-A_t s, -A_t clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high))

Each token passes on the gradient of its own log-probability, so that advantages may differ within a response. The paper
averages over responses (`loss_agg_mode=seq-mean-token-mean`) and clips far more tightly than PPO: 3e-4 and 4e-4.

Shapes: B sequences, T response positions.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import diagnostics, sequence_mean
from quadriga.algorithms.registry import register_policy_loss

# exp() of the mean is cut here so that one outlying response gives a large number instead of infinity.
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
    """The loss of each token, [B, T]; diagnostics `pg_clipfrac`, `ppo_kl`.
    `clip_ratio_low`, `clip_ratio_high`: how far below and above 1 the response's ratio may pull."""
    log_ratio = (log_prob - old_log_prob).masked_fill(~response_mask.bool(), 0)
    gain = advantages.masked_fill(~response_mask.bool(), 0)
    of_response = sequence_mean(log_ratio, response_mask).detach().clamp(max=MAX_MEAN_LOG_RATIO)
    ratio = (of_response + (log_ratio - log_ratio.detach())).exp()
    unclipped = -gain * ratio
    clipped = -gain * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return torch.maximum(unclipped, clipped), diagnostics(
        log_ratio, pg_clipfrac=clipped > unclipped
    )
