# SPDX-License-Identifier: Apache-2.0
"""From the configuration to the reward manager of a run."""

from typing import Any

from quadriga.config import Config
from quadriga.rewards.base import EarlyRewardManager, RewardManager
from quadriga.rewards.registry import REGISTRY, get_reward_manager_cls


def load_reward_manager(config: Config, tokenizer: Any) -> RewardManager:
    """The manager that `reward_model.reward_manager` names, ready to grade; the caller closes it.

    Raises:
        RewardError: if no manager has that name.
        ConfigError: if its options or the custom score function do not fit.
    """
    return get_reward_manager_cls(config.reward_model.reward_manager)(config, tokenizer)


def early_grader(config: Config, tokenizer: Any, num_processes: int = 1) -> EarlyRewardManager | None:
    """A manager to grade single samples beside an engine, or None where all are graded together afterwards.

    They are with `rollout.mode=sync`, with a manager that grades batches only or is registered on the driver alone, and
    where a reward model alone grades.

    Args:
        config: of the run.
        tokenizer: see `load_reward_manager`.
        num_processes: how many processes generate: they share `reward_model.num_workers`, at least one each.

    Returns:
        The manager; the caller closes it.
    """
    settings = config.reward_model
    is_model_alone = settings.enable and config.custom_reward_function.path is None
    if config.actor_rollout_ref.rollout.mode == "sync" or is_model_alone:
        return None
    share = settings.model_copy(update={"num_workers": max(1, settings.num_workers // num_processes)})
    is_known = settings.reward_manager in REGISTRY.names()
    manager_class = get_reward_manager_cls(settings.reward_manager) if is_known else None
    if manager_class is None or not issubclass(manager_class, EarlyRewardManager):
        return None
    return manager_class(config.model_copy(update={"reward_model": share}), tokenizer)
