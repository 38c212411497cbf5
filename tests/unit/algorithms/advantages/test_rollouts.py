# SPDX-License-Identifier: Apache-2.0
"""Rollouts with several rows count once, and roles keep their baselines from step to step."""

import numpy as np
import pytest
import torch

from quadriga.algorithms import bind_options, estimate_advantages, options
from quadriga.algorithms.advantages.gigpo import gigpo
from quadriga.algorithms.advantages.hierarchical_grpo import hierarchical_grpo
from quadriga.algorithms.advantages.rae import rae
from quadriga.algorithms.registry import ADVANTAGES, EstimatorMemory
from quadriga.errors import ConfigError

# One weighs rollouts by their tokens, the other whitens tokens: more rows have more of them.
COUNT_TOKENS = {"opo", "reinforce_plus_plus_baseline"}
COUNT_ROLLOUTS = [
    name
    for name in ADVANTAGES
    if "rollout_id" in options(ADVANTAGES[name]) and name not in COUNT_TOKENS
]
SCORES = [1.0, 0.0, 0.25, 0.5, 2.0, 2.5]
UID = list("aaabbb")


def fields_of(rows: list[int]) -> dict:
    """Columns of one-token rows; a rollout that is named twice has two rows."""
    scores = torch.tensor([SCORES[row] for row in rows], dtype=torch.float64)
    return {
        "token_level_rewards": scores[:, None],
        "response_mask": torch.ones(len(rows), 1),
        "uid": np.array([UID[row] for row in rows]),
        "rollout_id": np.array([f"rollout {row}" for row in rows]),
        "reward_extra": np.array([{"format": SCORES[row] ** 2} for row in rows], dtype=object),
        "data_source": ["game"] * len(rows),
        "turn_spans": [[(0, 1)]] * len(rows),
        # Rows of a rollout have turns of their own, which GiGPO compares one by one.
        "turn_states": [[f"state {number}"] for number in range(len(rows))],
    }


@pytest.mark.parametrize("name", COUNT_ROLLOUTS)
def test_a_rollout_counts_once_however_many_rows_it_has(name: str) -> None:
    """Equal advantages where rollout 1 has one row and where it has three."""
    estimator = bind_options(ADVANTAGES[name], shared={"gdpo_reward_keys": ["score", "format"]})
    single, _ = estimate_advantages(estimator, fields_of([0, 1, 2, 3, 4, 5]))
    rows = [0, 1, 1, 2, 3, 1, 4, 5]
    several, _ = estimate_advantages(estimator, fields_of(rows))
    torch.testing.assert_close(several, single[rows], rtol=1e-6, atol=1e-6)


def test_an_estimator_that_counts_rows_is_refused() -> None:
    """Only if it compares rows, and a rollout has several."""
    estimator = bind_options(ADVANTAGES["optimal_token_baseline"])
    fields = fields_of([0, 0, 1]) | {
        "old_log_probs": -torch.ones(3, 1),
        "sum_pi_squared": torch.ones(3, 1),
    }
    with pytest.raises(ConfigError, match="counts each row"):
        estimate_advantages(estimator, fields)
    del fields["rollout_id"]
    estimate_advantages(estimator, fields)


def test_role_baselines_by_hand() -> None:
    """Read before the update, per environment and role; a rollout's two rows update once."""
    memory: dict = {}
    arguments = {
        "response_mask": torch.ones(4, 1),
        "data_source": ["chess", "chess", "chess", "poker"],
        "agent": ["white", "black", "white", "white"],
        "rollout_id": ["first", "first", "second", "third"],
        "decay": 0.5,
        "memory": memory,
    }
    rewards = torch.tensor([[1.0], [-1.0], [1.0], [4.0]])
    advantages, _ = rae(rewards, **arguments, row_index=torch.arange(4))
    assert advantages[:, 0].tolist() == [1.0, -1.0, 0.5, 4.0]
    assert memory == {
        ("chess", "white"): 0.75,
        ("chess", "black"): -0.5,
        ("poker", "white"): 2.0,
    }
    # The order is that of the batch, not that of the ranks; rows 0 and 1 are one score.
    arguments |= {"agent": ["white"] * 4, "rollout_id": ["second", "second", "first", "third"]}
    rewards = torch.tensor([[3.0], [3.0], [1.0], [4.0]])
    advantages, _ = rae(rewards, **arguments, row_index=torch.tensor([1, 2, 0, 3]))
    assert advantages[:, 0].tolist() == [2.125, 2.125, 0.25, 2.0]


@pytest.mark.parametrize(("solver", "episode_agent"), [("solver", "solver"), ("1", 1)])
def test_peers_of_solvers_are_in_their_rollout(solver: str, episode_agent: str | int) -> None:
    """Two tasks of one prompt: proposers 1 and 0, solvers (1, 0) and (1, 1, 0.25)."""
    scores = torch.tensor([[1.0], [1.0], [0.0], [0.0], [1.0], [1.0], [0.25]])
    advantages, _ = hierarchical_grpo(
        scores,
        torch.ones(7, 1),
        ["prompt"] * 7,
        ["proposer", solver, solver, "proposer", solver, solver, solver],
        episode_agents=[episode_agent],
        rollout_id=["one"] * 3 + ["two"] * 4,
    )
    assert advantages[:, 0].tolist() == [0.5, 0.5, -0.5, -0.5, 0.25, 0.25, -0.5]


def test_turns_from_one_state_are_compared() -> None:
    """Two rollouts of two turns; the second ones begin in different states."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]])
    advantages, _ = gigpo(
        rewards,
        torch.tensor([[1, 0, 1], [1, 0, 1]]),
        ["prompt", "prompt"],
        [[(0, 1), (2, 3)], [(0, 1), (2, 3)]],
        [["start", "left"], ["start", "right"]],
        step_gamma=0.9,
        step_advantage_weight=2.0,
        norm_adv_by_std_in_grpo=False,
    )
    # Returns of the first turns are 0.9 and 0.5; 0.7 is their mean.
    expected = torch.tensor([[0.25 + 0.4, 0.0, 0.25], [-0.25 - 0.4, 0.0, -0.25]])
    torch.testing.assert_close(advantages, expected)


def test_baselines_survive_a_checkpoint() -> None:
    """A resumed run continues with the baselines; a run without a state begins anew."""
    estimator = bind_options(ADVANTAGES["rae"], {"decay": 0.5})
    fields = fields_of([0, 0])
    memory = EstimatorMemory()
    estimate_advantages(estimator, fields, memory.values)
    resumed = EstimatorMemory()
    resumed.load_state_dict(memory.state_dict())
    advantages, _ = estimate_advantages(estimator, fields, resumed.values)
    assert advantages[:, 0].tolist() == [0.5, 0.5]
    resumed.load_state_dict(None)
    advantages, _ = estimate_advantages(estimator, fields, resumed.values)
    assert advantages[:, 0].tolist() == [1.0, 1.0]
