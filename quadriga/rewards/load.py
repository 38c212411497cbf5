# SPDX-License-Identifier: Apache-2.0
"""From the configuration to the reward manager of a run."""

from typing import Any

from quadriga.config import Config
from quadriga.rewards.base import RewardManager
from quadriga.rewards.registry import get_reward_manager_cls


def load_reward_manager(config: Config, tokenizer: Any) -> RewardManager:
    """The manager that `reward_model.reward_manager` names, ready to grade; the caller closes it.

    Raises:
        RewardError: if no manager has that name.
        ConfigError: if its options or the custom score function do not fit.
    """
    return get_reward_manager_cls(config.reward_model.reward_manager)(config, tokenizer)
