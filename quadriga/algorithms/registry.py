# SPDX-License-Identifier: Apache-2.0
"""The algorithms by name: advantage estimators and policy losses, ours and yours.

An algorithm is one function. `@register_adv_est("name")` or `@register_policy_loss("name")` makes it known, and its
signature says the rest (see `signature`). A function in a file of your own needs no decorator: name it in the
configuration as `path/to/file.py:function`.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, TypeVar

from quadriga.algorithms.signature import bind_options, check_signature, did_you_mean, options, required_fields
from quadriga.algorithms.user_file import is_file_reference, load_from_file
from quadriga.errors import ConfigError

__all__ = [
    "ADVANTAGES",
    "POLICY_LOSSES",
    "AdvantageEstimator",
    "Registry",
    "bind_options",
    "get_adv_estimator_fn",
    "get_policy_loss_fn",
    "options",
    "register_adv_est",
    "register_policy_loss",
    "required_fields",
]

Function = TypeVar("Function", bound=Callable[..., Any])


class AdvantageEstimator(StrEnum):
    """The estimators that come with Quadriga; each equals its name as a string."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"


class Registry:
    """Functions of one kind by name.

    Args:
        key: the configuration key that chooses among them, for errors.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._functions: dict[str, Callable[..., Any]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._functions))

    def register(self, name: str) -> Callable[[Function], Function]:
        """A decorator that makes a function known as `name`.

        Raises:
            ConfigError: another function has that name, or the signature leaves open what is a field.
        """

        def decorate(function: Function) -> Function:
            check_signature(function, f"{self.key} {str(name)!r}")
            known = self._functions.get(str(name))
            if known is not None and _home(known) != _home(function):
                raise ConfigError(
                    f"{self.key} {str(name)!r}",
                    got=f"{_home(function)} beside {_home(known)}",
                    expected="one function per name",
                    fix="Register yours under another name.",
                )
            self._functions[str(name)] = function
            return function

        return decorate

    def get(self, name: str) -> Callable[..., Any]:
        """The function registered as `name`, or the one that `path/to/file.py:function` names.

        Raises:
            ConfigError: an unknown name (with the nearest ones), or a file or function that cannot be loaded.
        """
        if is_file_reference(name):
            function = load_from_file(name, self.key)
            check_signature(function, f"{self.key} {name!r}")
            return function
        if name not in self._functions:
            names = tuple(self)
            raise ConfigError(
                self.key,
                got=repr(str(name)),
                expected=f"one of {', '.join(names)}, or path/to/file.py:function",
                fix=did_you_mean(str(name), names),
            )
        return self._functions[str(name)]


def _home(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


ADVANTAGES = Registry("algorithm.adv_estimator")
POLICY_LOSSES = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


def register_adv_est(name: str | AdvantageEstimator) -> Callable[[Function], Function]:
    """Make an advantage estimator known: fields of the batch in, (advantages, returns), both [B, T], out."""
    return ADVANTAGES.register(name)


def get_adv_estimator_fn(name: str | AdvantageEstimator) -> Callable[..., Any]:
    """The advantage estimator of a name, or of `path/to/file.py:function`."""
    return ADVANTAGES.get(name)


def register_policy_loss(name: str) -> Callable[[Function], Function]:
    """Make a policy loss known: fields in, (losses per token, diagnostics per token) out; the engine aggregates."""
    return POLICY_LOSSES.register(name)


def get_policy_loss_fn(name: str) -> Callable[..., Any]:
    """The policy loss of a name, or of `path/to/file.py:function`."""
    return POLICY_LOSSES.get(name)
