# SPDX-License-Identifier: Apache-2.0
"""The algorithms by name: advantage estimators and policy losses, ours and yours.

An algorithm is one function. `@register_adv_est("name")` or `@register_policy_loss("name")` makes it known, and its
signature says the rest (see `signature`). A function in a file of your own needs no decorator: name it in the
configuration as `path/to/file.py:function`.

A field that takes the whole batch to compute, such as how a token stands among all others, is a function too:
`@register_batch_column("name")` makes it, once, from other fields, and any algorithm may name it as a field.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, TypeVar

from quadriga.algorithms.signature import bind_options, check_signature, did_you_mean, options, required_fields
from quadriga.algorithms.user_file import is_file_reference, load_from_file
from quadriga.errors import ConfigError

__all__ = [
    "ADVANTAGES",
    "BATCH_COLUMNS",
    "POLICY_LOSSES",
    "AdvantageEstimator",
    "Registry",
    "bind_options",
    "get_adv_estimator_fn",
    "get_policy_loss_fn",
    "options",
    "register_adv_est",
    "register_batch_column",
    "register_policy_loss",
    "required_fields",
]

Function = TypeVar("Function", bound=Callable[..., Any])


class AdvantageEstimator(StrEnum):
    """The estimators that come with Quadriga; each equals its name as a string."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


class Registry:
    """Functions of one kind by name.

    Args:
        key: the configuration key that chooses among them, for errors.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._functions: dict[str, Callable[..., Any]] = {}
        self._traits: dict[str, frozenset[str]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._functions))

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def register(self, name: str, *traits: str) -> Callable[[Function], Function]:
        """A decorator that makes a function known as `name`.

        Args:
            name: what the configuration calls it.
            traits: what is true of it and cannot be read from its signature.

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
            self._traits[str(name)] = frozenset(traits)
            return function

        return decorate

    def has(self, name: str, trait: str) -> bool:
        """Whether something was said of a function when it was registered; nothing is known of one in a file."""
        return trait in self._traits.get(str(name), ())

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
BATCH_COLUMNS = Registry("a field of the whole batch")

# A trait of a policy loss: a sequence without an advantage has no loss, so that it need not be computed.
NEEDS_ADVANTAGE = "needs advantage"


def register_adv_est(name: str | AdvantageEstimator) -> Callable[[Function], Function]:
    """Make an advantage estimator known: fields of the batch in, (advantages, returns), both [B, T], out."""
    return ADVANTAGES.register(name)


def get_adv_estimator_fn(name: str | AdvantageEstimator) -> Callable[..., Any]:
    """The advantage estimator of a name, or of `path/to/file.py:function`."""
    return ADVANTAGES.get(name)


def register_policy_loss(name: str, *, needs_advantage: bool = False) -> Callable[[Function], Function]:
    """Make a policy loss known: fields in, (losses per token, diagnostics per token) out; the engine aggregates.

    Args:
        name: what the configuration calls it.
        needs_advantage: True of a loss that is 0 wherever a sequence's advantages are; the engine then leaves such
            sequences out. False is always right.
    """
    return POLICY_LOSSES.register(name, *([NEEDS_ADVANTAGE] if needs_advantage else []))


def get_policy_loss_fn(name: str) -> Callable[..., Any]:
    """The policy loss of a name, or of `path/to/file.py:function`."""
    return POLICY_LOSSES.get(name)


def register_batch_column(name: str) -> Callable[[Function], Function]:
    """Make a field known that is computed from the fields of the whole batch, [B, T] each: one tensor of B rows out."""
    return BATCH_COLUMNS.register(name)
