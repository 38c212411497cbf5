# SPDX-License-Identifier: Apache-2.0
"""RAE: role-conditioned advantage estimation. Liu et al., SPIRAL, arXiv:2506.24119.

The score of an agent minus a moving average of the scores of its role in the same environment:

    A_i = r_i - b[environment, role]
    b[environment, role] <- decay b[environment, role] + (1 - decay) r_i

In self-play the mean over both players says nothing, and one seat may have an advantage. A baseline
for each role measures progress against what the role usually gets.

Each baseline is read before the score updates it, rollout after rollout in the order of the batch.
Baselines begin at 0, and are kept from step to step and in checkpoints.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable, MutableMapping

from torch import Tensor

from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est
from quadriga.errors import ConfigError


@register_adv_est("rae")
def rae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    data_source: Iterable[str],
    agent: Iterable[str],
    row_index: Tensor,
    *,
    decay: float = 0.95,
    rollout_id: Iterable[Hashable] | None = None,
    memory: MutableMapping[Hashable, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores minus the baseline of the agent's role.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        data_source: environment of each row, [B].
        agent: role of each row, [B].
        row_index: number of each row before the rows were ordered for the ranks, [B].
        decay: share of a baseline that remains after a score, 0 to 1.
        rollout_id: rollout of each row, [B]. None: every row is a rollout.
        memory: baselines by environment and role, which are updated. None: they begin at 0.

    Returns:
        Advantages and returns, [B, T] each: the row's advantage on each of its tokens.

    Raises:
        ConfigError: `decay` is not between 0 and 1.
    """
    if not 0 <= decay <= 1:
        key = "algorithm.adv_options.decay"
        raise ConfigError(key, got=str(decay), expected="a number from 0 to 1")
    scores = token_level_rewards.sum(-1)  # [B]
    rollouts = list(range(len(scores)) if rollout_id is None else rollout_id)
    roles = list(zip(data_source, agent, strict=True))
    # Rows of each score, in the original order of the batch, so that the baselines do not depend on
    # the number of ranks. A role has one score per rollout, however many rows it has there.
    rows_of_score = {}
    for row in row_index.argsort().tolist():
        rows_of_score.setdefault((rollouts[row], roles[row]), []).append(row)

    baselines = {} if memory is None else memory
    values = scores.tolist()
    baseline_of_row = [0.0] * len(values)
    for rows in rows_of_score.values():
        role = roles[rows[0]]
        baseline = baselines.get(role, 0.0)
        score = sum(values[row] for row in rows) / len(rows)
        for row in rows:
            baseline_of_row[row] = baseline
        baselines[role] = decay * baseline + (1 - decay) * score
    advantages = spread(scores - scores.new_tensor(baseline_of_row), response_mask)
    return advantages, advantages
