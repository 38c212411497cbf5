# SPDX-License-Identifier: Apache-2.0
"""Reward managers by name, and the one that a configuration names.

A built-in manager is a file in `managers/` and a name in `BUILT_IN`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from quadriga.errors import RewardError
from quadriga.rewards.base import RewardManager, RewardOutput

if TYPE_CHECKING:
    from quadriga.config import Config
    from quadriga.protocol import DataProto

ManagerClass = TypeVar("ManagerClass", bound=type)

BUILT_IN = {name: f"quadriga.rewards.managers.{name}" for name in ("naive", "batch", "dapo", "prime", "judge")}


class RewardManagerRegistry:
    """A name for each reward manager class.

    Args:
        modules: name -> module that registers it, loaded when the name is first used.
    """

    def __init__(self, modules: dict[str, str] | None = None) -> None:
        self._classes: dict[str, type] = {}
        self._modules = dict(modules or {})

    def register(self, name: str) -> Callable[[ManagerClass], ManagerClass]:
        """Class decorator: make a reward manager known as `reward_model.reward_manager=NAME`."""

        def add(cls: ManagerClass) -> ManagerClass:
            home = self._modules.get(name)
            taken = self._classes.get(name)
            if taken not in (None, cls) or (home is not None and home != cls.__module__):
                owner = home if taken is None else f"{taken.__module__}.{taken.__qualname__}"
                raise RewardError(f"register({name!r})", got=cls.__qualname__, expected=f"a free name, it is {owner}'s")
            self._classes[name] = cls
            return cls

        return add

    def get(self, name: str) -> type:
        """The class registered as `name`.

        Raises:
            RewardError: if there is none.
        """
        if name not in self._classes and name in self._modules:
            import_module(self._modules[name])
        if name not in self._classes:
            raise RewardError(
                "reward_model.reward_manager",
                got=name,
                expected=f"one of {', '.join(self.names())}",
                fix="Your own class needs @quadriga.rewards.register(name), in a module that has been imported.",
            )
        return self._classes[name]

    def names(self) -> list[str]:
        """Every name that `get` knows."""
        return sorted({*self._classes, *self._modules})


REGISTRY = RewardManagerRegistry(BUILT_IN)
register = REGISTRY.register
get_reward_manager_cls = REGISTRY.get


class _Called(RewardManager):
    """A user's manager that has `__call__` and `close`, and is no `RewardManager`."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.close = manager, manager.close

    def __call__(self, data: "DataProto") -> RewardOutput:
        return self.manager(data)


def load_reward_manager(config: "Config", tokenizer: Any) -> RewardManager:
    """The manager that `reward_model.reward_manager` names, ready to grade; the caller closes it.

    Raises:
        RewardError: if no manager has that name.
        ConfigError: if its options or the custom score function do not fit.
    """
    manager = get_reward_manager_cls(config.reward_model.reward_manager)(config, tokenizer)
    return manager if isinstance(manager, RewardManager) else _Called(manager)


def early_grader(config: "Config", tokenizer: Any, num_processes: int = 1) -> RewardManager | None:
    """A manager to grade single responses in the rollout's process, or None where all are graded together afterwards.

    They are with `rollout.mode=sync`, with a manager that grades batches only or is registered on the driver alone, and
    where a reward model alone grades.

    Args:
        config: the run's.
        tokenizer: decodes the responses.
        num_processes: how many processes generate: they share `reward_model.num_workers`, at least one each.

    Returns:
        The manager; the caller closes it.
    """
    settings = config.reward_model
    is_model_alone = settings.enable and config.custom_reward_function.path is None
    if config.actor_rollout_ref.rollout.mode == "sync" or is_model_alone:
        return None
    is_known = settings.reward_manager in REGISTRY.names()
    manager_class = get_reward_manager_cls(settings.reward_manager) if is_known else None
    if not getattr(manager_class, "grades_early", False):
        return None
    share = settings.model_copy(update={"num_workers": max(1, settings.num_workers // num_processes)})
    return load_reward_manager(config.model_copy(update={"reward_model": share}), tokenizer)
