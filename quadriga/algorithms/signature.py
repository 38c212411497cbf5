# SPDX-License-Identifier: Apache-2.0
"""An algorithm is described by its signature alone: positional parameters are fields, keyword-only ones are options.

So a name, a type and a default stand in one place, and what a training step must provide can be asked:

    def grpo(token_level_rewards, response_mask, uid, *, norm_adv_by_std_in_grpo=True): ...
             └───────────────── fields ────────────┘     └──────── options ───────┘
"""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from quadriga.errors import ConfigError

_FIELD_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OPEN_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def required_fields(function: Callable[..., Any]) -> tuple[str, ...]:
    """The batch fields that an algorithm reads: its positional parameters, in order."""
    return tuple(p.name for p in _parameters(function) if p.kind in _FIELD_KINDS)


def options(function: Callable[..., Any]) -> tuple[str, ...]:
    """The options that an algorithm has: its keyword-only parameters, in order."""
    return tuple(p.name for p in _parameters(function) if p.kind is inspect.Parameter.KEYWORD_ONLY)


def check_signature(function: Callable[..., Any], where: str) -> None:
    """Refuse a signature that does not say plainly what is a field and what is an option.

    Raises:
        ConfigError: for `*args`, `**kwargs` or a positional parameter with a default.
    """
    for parameter in _parameters(function):
        if parameter.kind in _OPEN_KINDS:
            stars = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "**"
            raise ConfigError(
                where,
                got=f"a function with {stars}{parameter.name}",
                expected="named parameters only",
                fix="Name the batch fields it reads as positional parameters and its options after a `*`.",
            )
        if parameter.kind in _FIELD_KINDS and parameter.default is not inspect.Parameter.empty:
            raise ConfigError(
                where,
                got=f"the positional parameter {parameter.name!r} with a default",
                expected="positional parameters without one, since they are fields of the batch",
                fix=f"Put a `*` before {parameter.name!r} to make it an option.",
            )


def bind_options(
    function: Callable[..., Any],
    given: Mapping[str, Any] | None = None,
    *,
    shared: Mapping[str, Any] | None = None,
    where: str = "algorithm",
) -> Callable[..., Any]:
    """Fix an algorithm's options, so that only its fields are left to pass.

    Args:
        function: an estimator or a policy loss.
        given: options meant for this function; each must be one that it has.
        shared: settings offered to every algorithm (a whole section of the configuration); it takes those it has.
        where: the key to name in an error.

    Returns:
        The function with its options bound.

    Raises:
        ConfigError: an option that it does not have, with the nearest names, or one without a value.
    """
    given, shared, known = given or {}, shared or {}, options(function)
    check_options(given, known, where)
    values = {name: shared[name] for name in known if name in shared} | dict(given)
    for parameter in _parameters(function):
        if parameter.name in known and parameter.default is inspect.Parameter.empty and parameter.name not in values:
            raise ConfigError(where, got=f"no value for the option {parameter.name!r}", fix=f"Set {parameter.name}.")
    return partial(function, **values)


def check_options(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse options that an algorithm does not have.

    Raises:
        ConfigError: with the nearest names.
    """
    for name in given:
        if name not in known:
            raise ConfigError(
                where,
                got=f"the option {name!r}",
                expected=f"one of {', '.join(known)}" if known else "no option: this algorithm has none",
                fix=did_you_mean(name, known) or "Leave it out.",
            )


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """A sentence with the nearest known names, or "" if none is near."""
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(repr(match) for match in near)}?" if near else ""


def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())
