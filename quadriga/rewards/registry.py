# SPDX-License-Identifier: Apache-2.0
"""Reward managers by name."""

from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from quadriga.errors import RewardError
from quadriga.rewards.base import RewardManager

ManagerClass = TypeVar("ManagerClass", bound=type)

BUILT_IN = {name: f"quadriga.rewards.managers.{name}" for name in ("naive", "batch", "dapo", "prime", "judge")}


class RewardManagerRegistry:
    """A name for each reward manager class.

    Args:
        modules: name -> module that registers it, loaded when the name is first asked for.
    """

    def __init__(self, modules: dict[str, str] | None = None) -> None:
        self._classes: dict[str, type[RewardManager]] = {}
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

    def get(self, name: str) -> type[RewardManager]:
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
