# SPDX-License-Identifier: Apache-2.0
"""GiGPO: group-in-group policy optimisation. Feng et al., arXiv:2505.10978, section 4.

The advantage of a turn has two parts. One compares whole responses to the same prompt, as GRPO
does; the other compares turns of these responses that began in the same state of the environment:

    A_turn = A_response + step_advantage_weight A_step
    R_t    = sum over k >= t of step_gamma^(k - t) r_k      r_k: reward of turn k
    A_step = R_t minus the mean of R over the turns of the group with the same state

Both parts are divided by the standard deviation, unless `norm_adv_by_std_in_grpo` is off. A turn
whose state no other turn of the group has gets A_step = 0.

The reward of a turn is the sum of the token-level rewards from its first token up to the next turn.

Shapes: B sequences, T response positions, S turns of all sequences.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread, zero_outside
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("gigpo", compares_group=True)
def gigpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    turn_spans: Iterable[Sequence[tuple[int, int]]],
    turn_states: Iterable[Sequence[str]],
    *,
    step_advantage_weight: float = 1.0,
    step_gamma: float = 0.95,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages of responses within their prompt, and of turns within their state.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        uid: group of each response, [B].
        turn_spans: first position and position after the last of each turn of the model, [B].
        turn_states: state of the environment in which each turn began, [B].
        step_advantage_weight: factor of the advantage of a turn within its state.
        step_gamma: discount per turn, 0 to 1.
        epsilon: added to standard deviations.
        norm_adv_by_std_in_grpo: whether to divide both parts by their (unbiased) standard
            deviation.
        rollout_id: rollout of each row, [B]. None: every row is a rollout.

    Returns:
        Advantages and returns, [B, T] each: the advantage of a turn on each of its tokens.
    """
    uids = list(uid)
    spans_of_row = list(turn_spans)
    scores = token_level_rewards.sum(-1)  # [B]
    groups = Groups.of(uids, scores, rollout_id)
    response_advantage = groups.centered(scores)  # [B]
    if norm_adv_by_std_in_grpo:
        response_advantage = response_advantage / (groups.deviation(scores) + epsilon)
    advantages = spread(response_advantage, response_mask)

    # All turns of the batch. Those of the same group and state are compared with one another.
    turns = []
    states_of_turns = []
    for row, states in enumerate(turn_states):
        for (start, end), state in zip(spans_of_row[row], states, strict=True):
            turns.append((row, start, end))
            states_of_turns.append((uids[row], state))
    if not turns:
        return advantages, advantages

    returns = turn_returns(token_level_rewards, spans_of_row, step_gamma)  # [S]
    peers = Groups.of(states_of_turns, returns)
    step_advantage = peers.centered(returns)  # [S]
    if norm_adv_by_std_in_grpo:
        step_advantage = step_advantage / (peers.deviation(returns) + epsilon)
    # A turn without peers says nothing for or against its action.
    step_advantage = torch.where(peers.size > 1, step_advantage, 0.0) * step_advantage_weight
    advantages = advantages.clone()
    for (row, start, end), value in zip(turns, step_advantage, strict=True):
        advantages[row, start:end] += value
    advantages = zero_outside(advantages, response_mask)
    return advantages, advantages


def turn_returns(
    token_level_rewards: Tensor, turn_spans: Sequence[Sequence[tuple[int, int]]], gamma: float
) -> Tensor:
    """Discounted reward to go of each turn.

    Args:
        token_level_rewards: [B, T].
        turn_spans: first position and position after the last of each turn, [B].
        gamma: discount per turn.

    Returns:
        Rewards to go of the turns of all rows, row after row, [S].
    """
    returns = []
    for rewards, spans in zip(token_level_rewards, turn_spans, strict=True):
        # From the last turn to the first. A turn gets the rewards up to the start of the next one.
        end = len(rewards)
        turn_return = rewards.new_zeros(())
        returns_of_row = []
        for start, _ in reversed(spans):
            turn_return = rewards[start:end].sum() + gamma * turn_return
            returns_of_row.append(turn_return)
            end = start
        returns += reversed(returns_of_row)
    return torch.stack(returns)
