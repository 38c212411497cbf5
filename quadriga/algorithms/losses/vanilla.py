# SPDX-License-Identifier: Apache-2.0
"""Clipped policy loss of PPO. Schulman et al., arXiv:1707.06347, equation 7.

With r the probability of a token under the policy in training over that under the policy that
sampled it, and A its advantage:

    loss = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))       and, where A < 0,
    loss = min(that, -A clip_ratio_c)

The two sides may have different clips (DAPO, arXiv:2503.14476: a higher `clip_ratio_high` lets
unlikely tokens rise). The last line is the dual clip (arXiv:1912.09729): a bad token that has
become much likelier than when it was sampled cannot dominate the batch.

Shapes: [B, T] with B sequences and T response positions, or any other shape, element by element.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios, zero_outside
from quadriga.algorithms.registry import register_policy_loss
from quadriga.errors import ConfigError


@register_policy_loss("vanilla", needs_advantage=True)
def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss of PPO, with a dual clip.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        clip_ratio_low: the ratio is clipped below 1 - `clip_ratio_low`.
        clip_ratio_high: the ratio is clipped above 1 + `clip_ratio_high`.
        clip_ratio_c: bound of the dual clip, above 1.

    Returns:
        The loss of each token, [B, T], and the diagnostics `pg_clipfrac` (1 where the clip is
        active), `pg_clipfrac_lower` (1 where the dual clip is active) and `ppo_kl` (k1 estimate of
        the divergence between the two policies).

    Raises:
        ConfigError: `clip_ratio_c` is not above 1.
    """
    if not clip_ratio_c > 1:
        key = "actor_rollout_ref.actor.clip_ratio_c"
        raise ConfigError(key, got=str(clip_ratio_c), expected="a number above 1")
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    ratio = log_ratio.exp()
    advantages = zero_outside(advantages, response_mask)

    # The larger of the two losses: a move beyond the clip range is not rewarded.
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    pessimistic = torch.maximum(unclipped, clipped)

    # Without this bound, the loss of a token with a negative advantage grows with its ratio.
    bound = -advantages * clip_ratio_c
    is_negative = advantages < 0
    losses = torch.where(is_negative, torch.minimum(pessimistic, bound), pessimistic)
    is_bounded = is_negative & (pessimistic > bound)
    is_clipped = clipped > unclipped
    return losses, diagnostics(log_ratio, pg_clipfrac=is_clipped, pg_clipfrac_lower=is_bounded)
