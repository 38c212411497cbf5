# SPDX-License-Identifier: Apache-2.0
"""The roles that models play in a run; each is a worker group."""

from enum import StrEnum


class Role(StrEnum):
    """A worker group's role, under the name that errors and logs use."""

    ActorRolloutRef = "actor_rollout_ref"
    ActorRollout = "actor_rollout"
    Actor = "actor"
    Rollout = "rollout"
    RefPolicy = "ref"
    Critic = "critic"
    RewardModel = "reward_model"
