# SPDX-License-Identifier: Apache-2.0
"""The clipped policy loss of PPO. Schulman et al., arXiv:1707.06347, equation 7.

With r the probability of a token under the policy over that under the one that sampled it, and A its advantage:

    loss = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))       and, where A < 0,
    loss = min(that, -A clip_ratio_c)

The two sides may be clipped apart (DAPO, arXiv:2503.14476: a higher `clip_ratio_high` lets unlikely tokens rise). The
last line is the dual clip (arXiv:1912.09729): a bad token that has become much likelier than when it was sampled
cannot dominate the batch.

Shapes: [B, T] with B sequences and T response positions, or any other, element by element.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios
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
    """The loss of each token, [B, T].
    Returns losses; diagnostics `pg_clipfrac` (1 where the clip is active), `pg_clipfrac_lower` (1 where the dual clip
    is), `ppo_kl` (k1 between the two policies).
    `old_log_prob`: under the policy that the update starts from.
    `clip_ratio_low`, `clip_ratio_high`: how far below and above 1 the ratio may pull.
    `clip_ratio_c`: the bound of the dual clip, above 1."""
    if not clip_ratio_c > 1:
        raise ConfigError(
            "actor_rollout_ref.actor.clip_ratio_c",
            got=str(clip_ratio_c),
            expected="a number above 1",
        )
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    gain = advantages.masked_fill(~response_mask.bool(), 0)
    ratio = log_ratio.exp()
    unclipped = -gain * ratio
    clipped = -gain * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -gain * clip_ratio_c
    losses = torch.where(gain < 0, torch.minimum(pessimistic, bound), pessimistic)
    is_bounded = (gain < 0) & (pessimistic > bound)
    return losses, diagnostics(
        log_ratio, pg_clipfrac=clipped > unclipped, pg_clipfrac_lower=is_bounded
    )
