# SPDX-License-Identifier: Apache-2.0
"""Clip-Cov and KL-Cov: hold back the tokens that lower entropy most. Cui et al., arXiv:2505.22617.

Tokens that are likely and good, or unlikely and bad, make the policy more certain, and a small
share of the tokens accounts for most of that. The covariance of one token is

    (log p_t - mean log p) (A_t - mean A)           with means over all tokens of the batch

    clip_cov    the clipped loss of PPO, and 0 on randomly drawn tokens of a high covariance
    kl_cov      loss_t = -A_t r_t, plus ppo_kl_coef |log r_t| on the tokens of largest covariance

The paper takes the means over a mini-batch and p from the policy in training. Here they are taken
over the whole batch and from the policy that the update starts from. Which tokens are held back is
then known before the first gradient and does not depend on how the batch is split.

Shapes: [B, T] with B sequences and T response positions.
"""

import zlib

import torch
from torch import Tensor

from quadriga.algorithms.losses.vanilla import vanilla
from quadriga.algorithms.masked import diagnostics, log_ratios, masked_mean, zero_outside
from quadriga.algorithms.registry import register_batch_column, register_policy_loss
from quadriga.errors import ConfigError

_SECTION = "actor_rollout_ref.actor.policy_loss"


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
    """Clipped loss of PPO without the tokens that `covariance_clipped` marks.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        covariance_clipped: 1 on the tokens to leave out, [B, T].
        clip_ratio_low: as for `vanilla`.
        clip_ratio_high: as for `vanilla`.
        clip_ratio_c: as for `vanilla`.

    Returns:
        The loss of each token, [B, T], and the diagnostics of `vanilla` with
        `covariance_clipfrac`.
    """
    losses, vanilla_diagnostics = vanilla(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
    )
    is_left_out = covariance_clipped.bool() & response_mask.bool()
    clip_fraction = {"covariance_clipfrac": is_left_out.to(losses.dtype)}
    return losses.masked_fill(is_left_out, 0), vanilla_diagnostics | clip_fraction


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
    """Unclipped policy loss with a KL penalty on the tokens that `covariance_top` marks.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        covariance_top: 1 on the tokens to hold back, [B, T].
        ppo_kl_coef: weight of the penalty, per nat.

    Returns:
        The loss of each token, [B, T], and the diagnostics `ppo_kl`, `ppo_kl_abs` and
        `covariance_topfrac`.
    """
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    distance = log_ratio.abs()
    is_held_back = covariance_top.bool() & response_mask.bool()
    policy_losses = -zero_outside(advantages, response_mask) * log_ratio.exp()
    losses = policy_losses + ppo_kl_coef * distance * is_held_back
    return losses, diagnostics(log_ratio, ppo_kl_abs=distance, covariance_topfrac=is_held_back)


def token_covariance(old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Covariance of log-probability and advantage at each token.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        advantages: [B, T].
        response_mask: [B, T].

    Returns:
        The covariances, [B, T], 0 outside the mask.
    """
    # Means over the whole batch, not over a response.
    centered_log_prob = old_log_prob - masked_mean(old_log_prob, response_mask)
    centered_advantages = advantages - masked_mean(advantages, response_mask)
    return zero_outside(centered_log_prob * centered_advantages, response_mask)


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
    """Random choice among the tokens whose covariance is in a range, for `clip_cov`.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        clip_cov_ratio: number of tokens to draw, as a share of all tokens of the batch, but at
            least one; if fewer tokens are in the range, all of them are chosen.
        clip_cov_lb: lower bound of the range.
        clip_cov_ub: upper bound of the range.

    Returns:
        Marks, [B, T], 1 on the chosen tokens.

    Raises:
        ConfigError: the range is empty, or the ratio is not in 0 to 1.
    """
    if not clip_cov_lb < clip_cov_ub:
        raise ConfigError(
            f"{_SECTION}.clip_cov_lb",
            got=f"{clip_cov_lb} with clip_cov_ub={clip_cov_ub}",
            expected="less than clip_cov_ub",
        )
    covariance = token_covariance(old_log_prob, advantages, response_mask)
    is_in_range = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & response_mask.bool()
    positions = is_in_range.flatten().nonzero()[:, 0]

    # Seeded by the covariances, so that a repeated step draws the same tokens.
    seed = zlib.crc32(covariance.double().cpu().numpy().tobytes())
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(positions), generator=generator).to(positions.device)
    count = _num_held_back(clip_cov_ratio, "clip_cov_ratio", response_mask)
    return _mark(positions[order[:count]], covariance)


@register_batch_column("covariance_top")
def covariance_top(
    old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, kl_cov_ratio: float = 2e-4
) -> Tensor:
    """Mark the tokens of the largest covariance, for `kl_cov`.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        kl_cov_ratio: number of tokens to choose, as a share of all tokens of the batch; at least
            one is chosen.

    Returns:
        Marks, [B, T], 1 on the chosen tokens.

    Raises:
        ConfigError: the ratio is not in 0 to 1.
    """
    covariance = token_covariance(old_log_prob, advantages, response_mask)
    candidates = covariance.masked_fill(~response_mask.bool(), -float("inf")).flatten()
    count = _num_held_back(kl_cov_ratio, "kl_cov_ratio", response_mask)
    # A batch without any token has no candidate, although the count is at least 1.
    count = min(count, int(response_mask.bool().sum()))
    return _mark(candidates.topk(count).indices, covariance)


def _num_held_back(share: float, name: str, response_mask: Tensor) -> int:
    """Number of tokens to hold back: a share of the response tokens, and at least 1.

    Args:
        share: share of the tokens, from 0 to 1.
        name: name of the option, for errors.
        response_mask: marks the response tokens, [B, T].

    Raises:
        ConfigError: the share is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        key = f"{_SECTION}.{name}"
        raise ConfigError(key, got=str(share), expected="a share of the tokens, 0 to 1")
    total = int(response_mask.bool().sum())
    # A small share of a small batch would round to no token.
    return max(1, int(share * total))


def _mark(positions: Tensor, like: Tensor) -> Tensor:
    """Mark positions with 1.

    Args:
        positions: positions in the flattened tensor, [N] int64.
        like: gives the shape, the dtype and the device of the result.

    Returns:
        Zeros, and ones at the positions.
    """
    marks = torch.zeros_like(like).flatten()
    marks[positions] = 1
    return marks.view_as(like)
