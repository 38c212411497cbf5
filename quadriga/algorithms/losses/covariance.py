# SPDX-License-Identifier: Apache-2.0
"""Clip-Cov and KL-Cov: holding back the tokens that lower a policy's entropy most. Cui et al., arXiv:2505.22617.

Tokens that are likely and good, or unlikely and bad, make the policy more certain; a small share of them does most of
it. The covariance of one token is

    (log p_t - mean log p) (A_t - mean A)                               means over all tokens of the batch

    clip_cov    the clipped loss of PPO, and 0 on tokens drawn at random among those of a high covariance
    kl_cov      loss_t = -A_t r_t, and on the tokens of the largest covariance + ppo_kl_coef |log r_t|

The paper takes the means over a mini-batch and p from the policy being trained. Here they are taken over the whole
batch and from the policy that the update starts from: which tokens are held back is then known before the first
gradient, and does not depend on how the batch is cut.

Shapes: [B, T] with B sequences and T response positions.
"""

import zlib

import torch
from torch import Tensor

from quadriga.algorithms.losses.vanilla import vanilla
from quadriga.algorithms.masked import diagnostics, log_ratios, masked_mean
from quadriga.algorithms.registry import register_batch_column, register_policy_loss
from quadriga.errors import ConfigError

_WHERE = "actor_rollout_ref.actor.policy_loss"


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
    """The loss of each token, [B, T]; diagnostics of `vanilla`, and `covariance_clipfrac`.
    `covariance_clipped`: [B, T], 1 on the tokens left out."""
    clips = {
        "clip_ratio_low": clip_ratio_low,
        "clip_ratio_high": clip_ratio_high,
        "clip_ratio_c": clip_ratio_c,
    }
    losses, of_vanilla = vanilla(old_log_prob, log_prob, advantages, response_mask, **clips)
    is_left_out = covariance_clipped.bool() & response_mask.bool()
    return losses.masked_fill(is_left_out, 0), {
        **of_vanilla,
        "covariance_clipfrac": is_left_out.to(losses.dtype),
    }


@register_policy_loss("kl_cov")
def kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    covariance_top: Tensor,
    *,
    ppo_kl_coef: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, [B, T]; diagnostics `ppo_kl`, `ppo_kl_abs`, `covariance_topfrac`.
    `covariance_top`: [B, T], 1 on the tokens that are held back.
    `ppo_kl_coef`: weight of the penalty, per nat."""
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    gain = advantages.masked_fill(~response_mask.bool(), 0)
    is_held_back = covariance_top.bool() & response_mask.bool()
    losses = -gain * log_ratio.exp() + ppo_kl_coef * log_ratio.abs() * is_held_back
    return losses, diagnostics(
        log_ratio, ppo_kl_abs=log_ratio.abs(), covariance_topfrac=is_held_back
    )


def token_covariance(old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """The covariance of each token, [B, T], 0 outside the mask."""
    surprise = old_log_prob - masked_mean(old_log_prob, response_mask)
    gain = advantages - masked_mean(advantages, response_mask)
    return (surprise * gain).masked_fill(~response_mask.bool(), 0)


@register_batch_column("covariance_clipped")
def covariance_clipped(
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """The tokens that `clip_cov` leaves out: some of those whose covariance is in a range, drawn at random.

    The draw is seeded by the covariances, so that a step that is repeated draws the same tokens. Returns [B, T], 1 on
    these tokens.

    `old_log_prob`, `advantages`, `response_mask`: [B, T].
    `clip_cov_ratio`: how many, as a share of all tokens of the batch; at least one.
    `clip_cov_lb`, `clip_cov_ub`: the range."""
    if not clip_cov_lb < clip_cov_ub:
        got = f"{clip_cov_lb} with clip_cov_ub={clip_cov_ub}"
        raise ConfigError(f"{_WHERE}.clip_cov_lb", got=got, expected="less than clip_cov_ub")
    covariance = token_covariance(old_log_prob, advantages, response_mask)
    in_range = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & response_mask.bool()
    places = in_range.flatten().nonzero()[:, 0]
    seed = zlib.crc32(covariance.double().cpu().numpy().tobytes())
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).to(
        places.device
    )
    return _marked(
        places[order[: _count(clip_cov_ratio, "clip_cov_ratio", response_mask)]], covariance
    )


@register_batch_column("covariance_top")
def covariance_top(
    old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, kl_cov_ratio: float = 2e-4
) -> Tensor:
    """The tokens that `kl_cov` holds back: those of the largest covariance.
    Returns [B, T], 1 on these tokens.
    `old_log_prob`, `advantages`, `response_mask`: [B, T].
    `kl_cov_ratio`: how many, as a share of all tokens of the batch; at least one."""
    covariance = token_covariance(old_log_prob, advantages, response_mask)
    candidates = covariance.masked_fill(~response_mask.bool(), -float("inf")).flatten()
    count = min(
        _count(kl_cov_ratio, "kl_cov_ratio", response_mask), int(response_mask.bool().sum())
    )
    return _marked(candidates.topk(count).indices, covariance)


def _count(share: float, name: str, response_mask: Tensor) -> int:
    if not 0 <= share <= 1:
        raise ConfigError(
            f"{_WHERE}.{name}", got=str(share), expected="a share of the tokens, 0 to 1"
        )
    return max(1, int(share * int(response_mask.bool().sum())))


def _marked(places: Tensor, like: Tensor) -> Tensor:
    marks = torch.zeros_like(like).flatten()
    marks[places] = 1
    return marks.view_as(like)
