# SPDX-License-Identifier: Apache-2.0
"""OTB: the optimal baseline of each token. Li et al., arXiv:2602.07078.

The advantage of a token is its reward to go G minus a weighted mean of the rewards to go at the
same position of all responses to the prompt. A response weighs as much as the squared length of
its gradient up to that position:

    B_t   = sum over i of G_i,t W_i,t / sum over i of W_i,t
    W_i,t = sum over s <= t of (1 - 2 p_s + sum p^2)

1 - 2 p + sum p^2 is the squared length of the gradient of log p by the logits, known from the
forward pass: p is the probability of the sampled token, and sum p^2 the sum of the squared
probabilities over the vocabulary.

`tir_optimal_token_baseline` is the variant for responses of several turns (tool-integrated
reasoning). It moves the policy's own tokens together before it compares responses, so that the
n-th own token of a response is compared with the n-th own token of the others, however long the
tools' output in between is. For responses of one turn the two are the same.

Only responses that have a token at a position are compared there. Groups may have any size and
order; a group of one keeps its reward. Where only one of several responses still has tokens, it
keeps its reward too, or has an advantage of 0 without `handle_zero_tail`. Importance weights of
off-policy correction scale a token's gradient, so their squares scale its squared length.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import zero_outside
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
    """Rewards to go minus the optimal baseline of each position.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        uid: group of each response, [B].
        old_log_probs: log-probabilities of the sampled tokens, [B, T].
        sum_pi_squared: sum over the vocabulary of the squared probabilities, [B, T].
        rollout_is_weights: importance weights of off-policy correction, [B, T]; 1 without it.
        handle_zero_tail: whether the longest response keeps its reward where no other has tokens.

    Returns:
        Advantages and undiscounted rewards to go, [B, T] each.
    """
    to_go = _rewards_to_go(token_level_rewards)
    energy = token_energy(old_log_probs, sum_pi_squared, rollout_is_weights)
    is_sampled = response_mask.bool()
    advantages = subtract_optimal_baseline(
        to_go, is_sampled, uid, energy, keeps_tail=handle_zero_tail
    )
    return advantages, zero_outside(to_go, response_mask)


def _rewards_to_go(token_level_rewards: Tensor) -> Tensor:
    """Undiscounted sum of the rewards from each position on, [B, T]."""
    return token_level_rewards.flip(-1).cumsum(-1).flip(-1)


def token_energy(
    old_log_probs: Tensor, sum_pi_squared: Tensor, rollout_is_weights: Tensor
) -> Tensor:
    """Squared length of each token's gradient by the logits.

    Args:
        old_log_probs: log-probabilities of the sampled tokens, [B, T].
        sum_pi_squared: sum over the vocabulary of the squared probabilities, [B, T].
        rollout_is_weights: importance weights, which scale the gradient, [B, T].

    Returns:
        The squared lengths, [B, T].
    """
    # Rounding may leave a negative number where the policy is certain.
    energy = (1 - 2 * old_log_probs.exp() + sum_pi_squared).clamp(min=0)
    return energy * rollout_is_weights.square()


def subtract_optimal_baseline(
    to_go: Tensor, is_sampled: Tensor, uid: Iterable[Hashable], energy: Tensor, *, keeps_tail: bool
) -> Tensor:
    """Subtract the optimal baseline of each position from the rewards to go.

    Args:
        to_go: reward to go of each token, [B, T].
        is_sampled: marks the tokens that the policy sampled, [B, T] bool.
        uid: group of each response, [B].
        energy: squared length of each token's gradient, [B, T].
        keeps_tail: in a group of several responses, whether a token keeps its reward to go if no
            other response has a token at its position. If not, its advantage is 0.

    Returns:
        Advantages, [B, T], 0 outside the mask.
    """
    mask = is_sampled.to(to_go.dtype)
    # W of the module docstring: the energy of all sampled tokens up to each position, 0 elsewhere.
    energy_so_far = zero_outside(energy, is_sampled).cumsum(-1) * mask
    groups = Groups.of(uid, to_go)
    # If no response of a group has any gradient up to a position, all of them weigh the same there.
    weights = energy_so_far.where(groups.sum(energy_so_far) > 0, mask)

    # Subtracting the smallest value first makes equal values exactly 0, as in `Groups.centered`.
    smallest = groups.smallest(to_go.masked_fill(~is_sampled, float("inf")))
    distance = zero_outside(to_go - smallest, is_sampled)
    # The clamp only matters at positions that no response reaches, where all weights are 0.
    total_weight = groups.sum(weights).clamp(min=torch.finfo(weights.dtype).tiny)
    baseline = groups.sum(distance * weights) / total_weight

    # Without anything to compare with, a token keeps its reward to go: in a group of one, and with
    # `keeps_tail` at every position that only one response reaches.
    is_alone = (groups.size == 1)[:, None]
    if keeps_tail:
        is_alone = groups.sum(mask) == 1
    return zero_outside(torch.where(is_alone, to_go, distance - baseline), is_sampled)


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
    """Rewards to go minus the optimal baseline of each token that the policy sampled, across turns.

    The n-th sampled token of a response is compared with the n-th sampled tokens of the other
    responses in its group. Tokens of tools and users are not counted.

    Args:
        token_level_rewards: [B, T].
        response_mask: 1 on the policy's own tokens, [B, T].
        uid: group of each response, [B].
        old_log_probs: log-probabilities of the sampled tokens, [B, T].
        sum_pi_squared: sum over the vocabulary of the squared probabilities, [B, T].
        rollout_is_weights: importance weights of off-policy correction, [B, T]; 1 without it.
        handle_zero_tail: whether the longest response keeps its reward where no other has tokens.

    Returns:
        Advantages and undiscounted rewards to go, [B, T] each.
    """
    to_go = _rewards_to_go(token_level_rewards)
    energy = token_energy(old_log_probs, sum_pi_squared, rollout_is_weights)

    # Move the sampled tokens of each row to its front, in their order.
    is_sampled = response_mask.bool()
    order = (~is_sampled).int().argsort(dim=-1, stable=True)
    moved_advantages = subtract_optimal_baseline(
        to_go.gather(-1, order),
        is_sampled.gather(-1, order),
        uid,
        energy.gather(-1, order),
        keeps_tail=handle_zero_tail,
    )
    # The argsort of a permutation is its inverse, which moves the tokens back.
    advantages = moved_advantages.gather(-1, order.argsort(dim=-1))
    return advantages, zero_outside(to_go, response_mask)
