# SPDX-License-Identifier: Apache-2.0
"""Rewards: managers that grade batches, graders for known data sets, and grading processes.

Names load on first use: a grading process imports from here and must not load torch.
"""

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.rewards.managers.naive import NaiveRewardManager
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

__all__, __getattr__ = lazy_names(__name__)
