# SPDX-License-Identifier: Apache-2.0
"""DPPO: a trust region in divergence instead of ratios. Qi et al., arXiv:2602.04879, binary forms.

A token keeps its full gradient until the policy has moved too far at it, in the direction of its
advantage:

    loss_t = -A_t sg[min(r_t, clip_ratio_c)] log p_t
             0 where A > 0, p > p_old and D > clip_ratio_high
             0 where A < 0, p < p_old and D > clip_ratio_low

D compares two distributions over {this token, any other token}. `dppo_tv` uses the total variation
|p - p_old|, `dppo_kl` uses KL(old || new). A rare token may therefore grow by a large factor, and a
likely one moves by a small one.

The paper compares with the policy that sampled. Here p_old is the policy that the update starts
from, which is the same if the rollout computes as the trainer does.

Shapes: [B, T] with B sequences and T response positions, or any other shape, element by element.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import diagnostics, log_ratios, zero_outside
from quadriga.algorithms.registry import register_policy_loss

# Keeps the KL divergence finite where a token has a probability of 1.
_EPSILON = 1e-8


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
    """Policy gradient within a trust region in total variation.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        clip_ratio_low: how far a probability may fall, absolutely.
        clip_ratio_high: how far a probability may rise, absolutely.
        clip_ratio_c: largest ratio that counts; the paper uses a large one, 20.

    Returns:
        The loss of each token, [B, T], and the diagnostics `pg_clipfrac` (1 outside the region),
        `pg_clipfrac_lower` (1 where the ratio is capped) and `ppo_kl`.
    """
    log_p = zero_outside(log_prob, response_mask)
    log_q = zero_outside(old_log_prob, response_mask)
    # The region only decides where the gradient stops; no gradient flows through it.
    divergence = (log_p.exp() - log_q.exp()).abs().detach()
    return _policy_gradient_in_region(
        log_p,
        log_q,
        advantages,
        response_mask,
        divergence,
        max_fall=clip_ratio_low,
        max_rise=clip_ratio_high,
        max_ratio=clip_ratio_c,
    )


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
    """Policy gradient within a trust region in KL divergence.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        clip_ratio_low: largest divergence of a probability that fell, in nats.
        clip_ratio_high: largest divergence of a probability that rose, in nats.
        clip_ratio_c: largest ratio that counts.

    Returns:
        The loss of each token, [B, T], and the diagnostics of `dppo_tv`.
    """
    log_p = zero_outside(log_prob, response_mask)
    log_q = zero_outside(old_log_prob, response_mask)
    p = log_p.detach().exp()
    q = log_q.exp()
    # KL over two outcomes: this token, with the probabilities q and p, and any other token, with
    # 1 - q and 1 - p.
    other_p = (1 - p).clamp(min=0) + _EPSILON
    other_q = (1 - q).clamp(min=0) + _EPSILON
    divergence = q * (log_q - log_p.detach()) + (1 - q) * (other_q / other_p).log()
    return _policy_gradient_in_region(
        log_p,
        log_q,
        advantages,
        response_mask,
        divergence,
        max_fall=clip_ratio_low,
        max_rise=clip_ratio_high,
        max_ratio=clip_ratio_c,
    )


def _policy_gradient_in_region(
    log_p: Tensor,
    log_q: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    divergence: Tensor,
    *,
    max_fall: float,
    max_rise: float,
    max_ratio: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient that stops at a token once its divergence exceeds a bound.

    Args:
        log_p: log-probabilities under the policy in training, [B, T].
        log_q: log-probabilities under the policy that the update starts from, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        divergence: divergence of the two policies at each token, [B, T].
        max_fall: largest divergence of a probability that fell.
        max_rise: largest divergence of a probability that rose.
        max_ratio: largest ratio that counts.

    Returns:
        As for `dppo_tv`.
    """
    advantages = zero_outside(advantages, response_mask)
    log_ratio = log_ratios(log_p, log_q, response_mask)
    ratio = log_ratio.detach().exp()

    # Only a move in the direction of the advantage is stopped; the way back stays open.
    has_risen_too_far = (advantages > 0) & (log_ratio > 0) & (divergence > max_rise)
    has_fallen_too_far = (advantages < 0) & (log_ratio < 0) & (divergence > max_fall)
    is_stopped = has_risen_too_far | has_fallen_too_far
    losses = -advantages * ratio.clamp(max=max_ratio) * torch.where(is_stopped, 0, log_p)
    is_capped = (ratio > max_ratio) & ~is_stopped
    return losses, diagnostics(log_ratio, pg_clipfrac=is_stopped, pg_clipfrac_lower=is_capped)
