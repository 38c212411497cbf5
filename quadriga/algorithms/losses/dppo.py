# SPDX-License-Identifier: Apache-2.0
"""DPPO: a trust region in divergence instead of in ratios. Qi et al., arXiv:2602.04879, the binary forms.

A token keeps its whole gradient until the policy has moved too far at it, in the direction of its advantage:

    loss_t = -A_t sg[min(r_t, clip_ratio_c)] log p_t      0 where A > 0, p > p_old and D > clip_ratio_high,
                                                      or A < 0, p < p_old and D > clip_ratio_low

D compares two distributions over {this token, any other}. `dppo_tv` takes the total variation |p - p_old|; `dppo_kl`
takes KL(old || new). A rare token may so grow by a large factor, and a likely one moves by a small one.

The paper compares with the policy that sampled; here p_old is the one that the update starts from, which is the same
where the rollout computes as the trainer does.

Shapes: [B, T] with B sequences and T response positions, or any other, element by element.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios
from quadriga.algorithms.registry import register_policy_loss

_TINY = 1e-8


@register_policy_loss("dppo_tv", needs_advantage=True)
def dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, [B, T]; diagnostics `pg_clipfrac` (1 where the region is left), `ppo_kl`,
    `pg_clipfrac_lower` (1 at the cap).
    `clip_ratio_low`, `clip_ratio_high`: how far a probability may fall and rise, absolutely.
    `clip_ratio_c`: the largest ratio that counts; the paper takes a large one, 20."""
    outside = ~response_mask.bool()
    log_p, log_q = (each.masked_fill(outside, 0) for each in (log_prob, old_log_prob))
    divergence = (log_p.exp() - log_q.exp()).abs().detach()
    clips = (clip_ratio_low, clip_ratio_high, clip_ratio_c)
    return _within_region(log_p, log_q, advantages, response_mask, divergence, *clips)


@register_policy_loss("dppo_kl", needs_advantage=True)
def dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, [B, T], as for `dppo_tv`; the clips are divergences in nats."""
    outside = ~response_mask.bool()
    log_p, log_q = (each.masked_fill(outside, 0) for each in (log_prob, old_log_prob))
    p, q = log_p.detach().exp(), log_q.exp()
    rest = ((1 - q).clamp(min=0) + _TINY) / ((1 - p).clamp(min=0) + _TINY)
    divergence = q * (log_q - log_p.detach()) + (1 - q) * rest.log()
    clips = (clip_ratio_low, clip_ratio_high, clip_ratio_c)
    return _within_region(log_p, log_q, advantages, response_mask, divergence, *clips)


def _within_region(
    log_p: Tensor,
    log_q: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    divergence: Tensor,
    *clips: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    low, high, largest_ratio = clips
    gain = advantages.masked_fill(~response_mask.bool(), 0)
    log_ratio = log_ratios(log_p, log_q, response_mask)
    ratio = log_ratio.detach().exp()
    has_risen_too_far = (gain > 0) & (log_ratio > 0) & (divergence > high)
    has_fallen_too_far = (gain < 0) & (log_ratio < 0) & (divergence > low)
    is_outside = has_risen_too_far | has_fallen_too_far
    losses = -gain * ratio.clamp(max=largest_ratio) * torch.where(is_outside, 0, log_p)
    is_capped = (ratio > largest_ratio) & ~is_outside
    return losses, diagnostics(log_ratio, pg_clipfrac=is_outside, pg_clipfrac_lower=is_capped)
