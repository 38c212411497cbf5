# SPDX-License-Identifier: Apache-2.0
"""OTB: the optimal baseline of each token. Li et al., arXiv:2602.07078.

The reward to come at a token, minus the mean of what was to come at the same place of the other responses to the
prompt, in which a response weighs as much as its gradient is large up to there:

    B_t = sum over i of G_i,t W_i,t / sum over i of W_i,t            W_i,t = sum over s <= t of (1 - 2 p_s + sum p^2)

1 - 2 p + sum p^2 is the squared length of the gradient of log p by the logits, read off the forward pass: p is the
probability of the sampled token and sum p^2 that of drawing the same token twice.

`tir_optimal_token_baseline` is the form for responses of several turns (tool-integrated reasoning): the tokens that
the policy wrote are moved together before responses are compared, so that its n-th token is compared with the n-th of
the others, however long the tools' output in between is. On responses of one turn the two are the same.

Only responses that have a token at a place are compared there. Groups may have any size and order; a group of one keeps
its reward. At a place where one response of several is left it keeps its reward too, or has an advantage of 0 without
`handle_zero_tail`. Importance weights of off-policy correction scale a token's gradient, so their squares its energy.
"""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("optimal_token_baseline")
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor,
    *,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (undiscounted rewards to go) of each token, [B, T] each.

    Args:
        old_log_probs: [B, T] of the sampled tokens.
        sum_pi_squared: [B, T], the sum over the vocabulary of squared probabilities.
        rollout_is_weights: [B, T] of off-policy correction, 1 without; a token's gradient is that much longer.
        handle_zero_tail: whether the longest response keeps its reward where it is the only one left.
    """
    is_ours = response_mask.bool()
    to_go = token_level_rewards.flip(-1).cumsum(-1).flip(-1)
    energy = token_energy(old_log_probs, sum_pi_squared, rollout_is_weights)
    advantages = against_optimum(to_go, is_ours, uid, energy, keeps_tail=handle_zero_tail)
    return advantages, to_go.masked_fill(~is_ours, 0)


def token_energy(
    old_log_probs: Tensor, sum_pi_squared: Tensor, rollout_is_weights: Tensor
) -> Tensor:
    """The squared length of each token's gradient by the logits, [B, T]."""
    return (1 - 2 * old_log_probs.exp() + sum_pi_squared).clamp(min=0) * rollout_is_weights.square()


def against_optimum(
    to_go: Tensor, is_ours: Tensor, uid: Iterable[Hashable], energy: Tensor, *, keeps_tail: bool
) -> Tensor:
    """Rewards to go [B, T] minus the optimal baseline of their place, 0 outside the mask `is_ours`.
    `energy`: [B, T], of each token.
    `keeps_tail`: `handle_zero_tail` of the estimators."""
    present = is_ours.to(to_go.dtype)
    energy = energy.masked_fill(~is_ours, 0).cumsum(-1) * present
    groups = Groups.of(uid, to_go)
    # Where no gradient has any length, all weigh alike.
    weights = energy.where(groups.sum(energy) > 0, present)
    # Distances from the smallest are exactly 0 when all are alike; see `Groups.centered`.
    smallest = groups.smallest(to_go.masked_fill(~is_ours, float("inf")))
    distance = (to_go - smallest).masked_fill(~is_ours, 0)
    baseline = groups.sum(distance * weights) / groups.sum(weights).clamp(
        min=torch.finfo(weights.dtype).tiny
    )
    is_alone = (groups.size == 1)[:, None]
    if keeps_tail:
        is_alone = groups.sum(present) == 1
    return torch.where(is_alone, to_go, distance - baseline).masked_fill(~is_ours, 0)


@register_adv_est("tir_optimal_token_baseline")
def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor,
    *,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token, [B, T]; arguments and result as for `optimal_token_baseline`."""
    is_ours = response_mask.bool()
    to_go = token_level_rewards.flip(-1).cumsum(-1).flip(-1)
    order = (~is_ours).int().argsort(dim=-1, stable=True)
    energy = token_energy(old_log_probs, sum_pi_squared, rollout_is_weights)
    moved = [column.gather(-1, order) for column in (to_go, is_ours, energy)]
    advantages = against_optimum(moved[0], moved[1], uid, moved[2], keeps_tail=handle_zero_tail)
    return advantages.gather(-1, order.argsort(dim=-1)), to_go.masked_fill(~is_ours, 0)
