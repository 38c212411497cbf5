# SPDX-License-Identifier: Apache-2.0
"""Rewards: managers that grade batches, graders that know data sets, and the processes they run in.

Names load on first use: a grading process imports from here and must not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.rewards.managers.batch import BatchRewardManager
    from quadriga.rewards.managers.dapo import DapoRewardManager
    from quadriga.rewards.managers.judge import JudgeRewardManager
    from quadriga.rewards.managers.naive import NaiveRewardManager
    from quadriga.rewards.managers.prime import PrimeRewardManager
    from quadriga.rewards.outcome import Outcome
    from quadriga.rewards.pool import GradingPool
    from quadriga.rewards.registry import (
        Grading,
        RewardManager,
        RewardOutput,
        early_grader,
        get_reward_manager_cls,
        load_reward_manager,
        register,
    )
    from quadriga.rewards.scoring import ScoreFunction, default_compute_score

_HOMES = {
    **{f"{name.title()}RewardManager": f"managers.{name}" for name in ("batch", "dapo", "judge", "naive", "prime")},
    **dict.fromkeys(("Grading", "RewardManager", "RewardOutput", "early_grader"), "registry"),
    **dict.fromkeys(("get_reward_manager_cls", "load_reward_manager", "register"), "registry"),
    **dict.fromkeys(("ScoreFunction", "default_compute_score"), "scoring"),
    "GradingPool": "pool",
    "Outcome": "outcome",
}

__all__ = [
    "BatchRewardManager", "DapoRewardManager", "Grading", "GradingPool", "JudgeRewardManager", "NaiveRewardManager",
    "Outcome", "PrimeRewardManager", "RewardManager", "RewardOutput", "ScoreFunction", "default_compute_score",
    "early_grader", "get_reward_manager_cls", "load_reward_manager", "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
