# SPDX-License-Identifier: Apache-2.0
"""CISPO: clipped importance-sampling weights. MiniMax-M1, arXiv:2506.13585, section 3.1.

The ratio is clipped and held constant, so every token keeps its gradient, however far it has moved:

    loss_t = -A_t sg[clip(r_t, 1 - clip_ratio_low, 1 + clip_ratio_high)] log p_t

The paper leaves the lower side open (`clip_ratio_low=1`) and averages over tokens.

Shapes: [B, T] with B sequences and T response positions, or any other shape, element by element.
"""

from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios, zero_outside
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
    """Policy gradient with a clipped, constant ratio as its weight.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        clip_ratio_low: how far below 1 the weight may be.
        clip_ratio_high: how far above 1 the weight may be.

    Returns:
        The loss of each token, [B, T], and the diagnostics `pg_clipfrac` and `ppo_kl`.
    """
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    # Without gradient: unlike PPO's clip, the clip here never stops the gradient of log p.
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    advantages = zero_outside(advantages, response_mask)
    losses = -advantages * weight * zero_outside(log_prob, response_mask)
    return losses, diagnostics(log_ratio, pg_clipfrac=weight != ratio)
