# SPDX-License-Identifier: Apache-2.0
"""Hierarchical GRPO: agents of a rollout are compared with their peers only.

For rollouts in which one agent sets a task and others solve it. Solvers of the same task are
compared with one another; tasks are compared with the other tasks of the group:

    A_i = r_i - mean of the peers of i

The peers of an agent named in `episode_agents` are the rows of that agent in the same rollout; the
peers of another agent are its rows in all rollouts of the group, each rollout counted once. Scores
are not divided by a standard deviation. A row without peers gets 0.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est
from quadriga.errors import ConfigError


@register_adv_est("hierarchical_grpo")
def hierarchical_grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    agent: Iterable[str],
    *,
    episode_agents: Sequence[str] = (),
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores minus the mean score of the peers.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        uid: group of each row, [B].
        agent: name of each row's agent, [B].
        episode_agents: agents that are compared within a rollout.
        rollout_id: rollout of each row, [B]. None: every row is a rollout.

    Returns:
        Advantages and returns, [B, T] each: the row's advantage on each of its tokens.

    Raises:
        ConfigError: `episode_agents` is a string.
    """
    if isinstance(episode_agents, str):
        key = "algorithm.adv_options.episode_agents"
        raise ConfigError(key, got=repr(episode_agents), expected="a list of names of agents")
    scores = token_level_rewards.sum(-1)  # [B]
    rollouts = list(range(len(scores)) if rollout_id is None else rollout_id)
    # Agents without a role are named "0", "1", ..., which YAML reads as numbers.
    names_within_rollout = {str(name) for name in episode_agents}
    # Rows with equal entries in `peers` are compared with one another. Of these, rows with equal
    # entries in `attempts` count once in the mean. For an agent that is compared within a rollout,
    # each row has a different entry: its number. For others, the rows of a rollout share an entry.
    peers = []
    attempts = []
    for row, (group, name) in enumerate(zip(uid, agent, strict=True)):
        is_within_rollout = name in names_within_rollout
        peers.append((name, rollouts[row] if is_within_rollout else None, group))
        attempts.append(row if is_within_rollout else ("rollout", rollouts[row]))
    groups = Groups.of(peers, scores, attempts)
    advantage = torch.where(groups.size > 1, groups.centered(scores), 0.0)
    advantages = spread(advantage, response_mask)
    return advantages, advantages
