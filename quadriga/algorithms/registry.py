# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators and policy losses by name. A function's signature says everything else about it:

    @register_adv_est("grpo")
    def grpo(token_level_rewards, response_mask, uid, *, norm_adv_by_std_in_grpo=True): ...
             └──────── fields of the batch ─────────┘     └──────── options ───────┘

Positional parameters are fields of the batch, keyword-only ones are options of the configuration. A training step
reads from the signature what it must provide: an estimator with the field `values` needs a critic.

A function in a file of your own needs no decorator: name it in the configuration as `path/to/file.py:function`.

A field that takes the whole batch to compute, such as a token's rank among all others, is a function too:
`@register_batch_column("name")` computes it from other fields, and any algorithm may name it as a field.

Shapes: B sequences, T response positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from inspect import Parameter, signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from quadriga.errors import ConfigError, did_you_mean
from quadriga.user_file import is_reference, referred

Function = TypeVar("Function", bound=Callable[..., Any])

_FIELD_KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_ESTIMATOR = "algorithm.adv_estimator"
_AS_VERL = "A loss by verl's contract, which returns a scalar, runs with QUADRIGA_VERL=1."
_CLIPPED = "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"
_MADE_OF = {
    "dapo": f"DAPO is algorithm.adv_estimator=grpo and {_CLIPPED}, with actor_rollout_ref.actor.clip_ratio_high=0.28, "
    "actor_rollout_ref.actor.loss_agg_mode=token-mean and algorithm.filter_groups.enable=True.",
    "ppo": f"PPO is algorithm.adv_estimator=gae and {_CLIPPED}.",
    "dr_grpo": f"Dr. GRPO is algorithm.adv_estimator=grpo and {_CLIPPED}, with algorithm.norm_adv_by_std_in_grpo=False "
    "and actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm.",
}
"""What is known under one name and set by several keys."""


class AdvantageEstimator(StrEnum):
    """The estimators' names as verl's users write them; each equals its name as a string, and any other name works."""

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


def required_fields(function: Callable[..., Any]) -> tuple[str, ...]:
    """The batch fields that an algorithm reads: its positional parameters, in order.

    One called `index` gets `uid`, which tells the group of a response, as in verl: the `index` of a row is unique
    within its file at best.
    """
    names = (
        name for name, one in signature(function).parameters.items() if one.kind in _FIELD_KINDS
    )
    return tuple("uid" if name == "index" else name for name in names)


def options(function: Callable[..., Any]) -> tuple[str, ...]:
    """The options that an algorithm has: its keyword-only parameters, in order."""
    return tuple(
        name
        for name, one in signature(function).parameters.items()
        if one.kind is Parameter.KEYWORD_ONLY
    )


def bind_options(
    function: Callable[..., Any],
    given: Mapping[str, Any] | None = None,
    *,
    shared: Mapping[str, Any] | None = None,
    where: str = "algorithm",
) -> Callable[..., Any]:
    """Fix an algorithm's options, so that only its fields are left to pass.
    Raises ConfigError: an option that it does not have, with the nearest names, or one without a value.

    Args:
        function: an estimator or a policy loss.
        given: options meant for this function; each must be one that it has.
        shared: settings offered to every algorithm (a whole section of the configuration); it takes those it has.
        where: the key to name in an error.
    """
    given, shared, known = given or {}, shared or {}, options(function)
    _check_options(given, known, where)
    values = {name: shared[name] for name in known if name in shared} | dict(given)
    for name in known:
        if name not in values and signature(function).parameters[name].default is Parameter.empty:
            raise ConfigError(where, got=f"no value for the option {name!r}", fix=f"Set {name}.")
    return partial(function, **values)


@dataclass(frozen=True)
class Algorithm:
    """An estimator or a policy loss as a configuration chose it."""

    name: str  # as it was chosen
    fields: tuple[str, ...]  # what the function reads of the batch
    function: Callable[..., Any]  # its options are bound; fields are left to pass
    # Functions that compute further fields from the whole batch, by name; their options are bound too.
    columns: Mapping[str, Callable[..., Tensor]]
    needs_advantage: bool  # whether a sequence whose advantages are all 0 has no loss, so that it need not be computed

    @property
    def column_fields(self) -> frozenset[str]:
        """Fields that `columns` are computed from."""
        return frozenset(
            name for column in self.columns.values() for name in required_fields(column)
        )

    def compute_columns(self, fields: Mapping[str, Any]) -> dict[str, Tensor]:
        """The columns [B, T] of a whole batch, from its fields, [B, T] each, by name."""
        columns = self.columns.items()
        return {
            name: column(*(fields[field] for field in required_fields(column)))
            for name, column in columns
        }


class Registry(dict[str, Callable[..., Any]]):
    """Functions of one kind by name.
    `key`: the configuration key that chooses among them, for errors.
    `options_key`: the key whose entries are their options, for errors."""

    def __init__(self, key: str, options_key: str = "") -> None:
        super().__init__()
        self.key, self.options_key = key, options_key
        self.needing_advantage: set[str] = set()

    def register(
        self, name: str, *, needs_advantage: bool = False
    ) -> Callable[[Function], Function]:
        """A decorator that makes a function known as `name`.
        Raises ConfigError: another function has that name, or the signature leaves open what is a field.
        `name`: what the configuration calls it.
        `needs_advantage`: True of a policy loss that is 0, with a gradient of 0, wherever a sequence's advantages are
        0; the engine then leaves such sequences out. False is always right."""

        def decorate(function: Function) -> Function:
            where = f"{self.key} {str(name)!r}"
            _check_signature(function, where)
            both = (function, self.get(str(name), function))
            homes = [
                f"{one.__module__}.{getattr(one, '__qualname__', type(one).__qualname__)}"
                for one in both
            ]
            if homes[0] != homes[1]:
                fix = "Register yours under another name."
                raise ConfigError(
                    where, got=" and ".join(homes), expected="one function per name", fix=fix
                )
            self[str(name)] = function
            if needs_advantage:
                self.needing_advantage.add(str(name))
            return function

        return decorate

    def find(self, name: str) -> Callable[..., Any]:
        """The function registered as `name`, or the one that `path/to/file.py:function` names, or
        `pkg://package.module:function`. Raises ConfigError: an unknown name (with the nearest ones), or a file or
        function that cannot be loaded."""
        if name in self:
            return self[name]
        if name.endswith(".py"):
            raise ConfigError(
                self.key,
                got=repr(name),
                expected="file.py:function",
                fix="Say which function to take.",
            )
        if not is_reference(name):
            expected = f"one of {', '.join(sorted(self))}, or path/to/file.py:function"
            fix = _MADE_OF.get(str(name)) or did_you_mean(str(name), sorted(self))
            fix = fix or "A file that registers it belongs to actor_rollout_ref.model.external_lib."
            raise ConfigError(self.key, got=repr(str(name)), expected=expected, fix=fix)
        function = referred(name, self.key)
        _check_signature(function, f"{self.key} {name!r}")
        return function

    def choose(self, name: str, given: Mapping[str, Any], shared: Mapping[str, Any]) -> Algorithm:
        """The function of a configuration with its options bound; nothing that is wrong with the choice is found later.
        Raises ConfigError: an unknown name, an option that it does not have (with the nearest names), or one without a
        value.
        `name`: of a registered one, or `path/to/file.py:function`.
        `given`: options of its own, each of which it or one of its columns must have.
        `shared`: settings offered to every algorithm (a section of the configuration)."""
        function = self.find(name)
        where = f"{self.options_key} ({name})"
        columns = {
            field: BATCH_COLUMNS[field]
            for field in required_fields(function)
            if field in BATCH_COLUMNS
        }
        known = {part: options(part) for part in (function, *columns.values())}
        _check_options(
            given, tuple(dict.fromkeys(option for own in known.values() for option in own)), where
        )
        bound = {
            part: bind_options(
                part, {key: given[key] for key in own if key in given}, shared=shared, where=where
            )
            for part, own in known.items()
        }
        computed = {field: bound[column] for field, column in columns.items()}
        return Algorithm(
            name,
            required_fields(function),
            bound[function],
            computed,
            name in self.needing_advantage,
        )


ADVANTAGES = Registry(_ESTIMATOR, "algorithm.adv_options")
POLICY_LOSSES = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.policy_loss"
)
BATCH_COLUMNS = Registry("a field of the whole batch")

register_adv_est = ADVANTAGES.register
"""Make an advantage estimator known: fields of the batch in, (advantages, returns), both [B, T], out."""
register_policy_loss = POLICY_LOSSES.register
"""Make a policy loss known: fields in, (losses, diagnostics) out, [B, T] each; the engine aggregates."""
register_batch_column = BATCH_COLUMNS.register
"""Make a field known that is computed from fields [B, T] of the whole batch: one tensor [B, T] out."""
get_adv_estimator_fn = ADVANTAGES.find
get_policy_loss_fn = POLICY_LOSSES.find
choose_estimator = ADVANTAGES.choose
choose_policy_loss = POLICY_LOSSES.choose


def estimate_advantages(
    estimator: Callable[..., tuple[Tensor, Tensor]], fields: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Run an estimator whose options are bound on the fields that it names, and check what it returns.
    Returns advantages and returns, both [B, T] and 0 outside the mask. Raises ConfigError: the estimator names a field
    that the batch does not have, or what it returns is not two finite tensors of the shape of the mask.
    `estimator`: from `choose_estimator` or `bind_options`.
    `fields`: the columns of the batch by name, tensors and arrays alike; `response_mask` [B, T] must be among them.
    Without off-policy correction `rollout_is_weights` are 1."""
    names = required_fields(estimator)
    fields = {"rollout_is_weights": torch.ones(fields["response_mask"].shape), **fields}
    if missing := [name for name in names if name not in fields]:
        got = f"an estimator that reads {', '.join(missing)}"
        fix = "Name its positional parameters after fields; put options after a `*`."
        raise ConfigError(
            _ESTIMATOR,
            got=got,
            expected=f"fields of the batch: {', '.join(sorted(fields))}",
            fix=fix,
        )
    result, mask = estimator(*(fields[name] for name in names)), fields["response_mask"].bool()
    if not (
        isinstance(result, tuple)
        and len(result) == 2
        and all(isinstance(part, Tensor) for part in result)
    ):
        raise ConfigError(
            _ESTIMATOR,
            got=f"a {type(result).__name__}",
            expected="two tensors: advantages, returns",
        )
    for name, values in zip(("advantages", "returns"), result, strict=True):
        if values.shape != mask.shape:
            expected = f"{list(mask.shape)}, one value per token of the response"
            fix = "A value per sequence becomes one per token by `values[:, None] * response_mask`."
            raise ConfigError(
                _ESTIMATOR, got=f"{name} of shape {list(values.shape)}", expected=expected, fix=fix
            )
        if num_bad := int((~torch.isfinite(values.masked_fill(~mask, 0))).any(-1).sum()):
            got = f"{name} that are not finite in {num_bad} of {len(mask)} sequences"
            fix = "Look for a division by zero, such as by the deviation of a group whose scores are all alike."
            raise ConfigError(_ESTIMATOR, got=got, expected="finite numbers", fix=fix)
    return result[0].masked_fill(~mask, 0), result[1].masked_fill(~mask, 0)


def check_losses(name: str, result: Any, mask: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """What the policy loss `name` returned, losses [B, T] and diagnostics [B, T] each by name; `mask` is [B, T].
    Raises ConfigError: it is something else, such as a loss that is a scalar already, or a diagnostic that is a number.
    """
    where = f"{POLICY_LOSSES.key} {name!r}, its result"
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        got = (
            f"a tuple of {len(result)}"
            if isinstance(result, tuple)
            else f"a {type(result).__name__}"
        )
        expected = "(losses, diagnostics): a tensor, and a dict of tensors"
        raise ConfigError(where, got=got, expected=expected, fix=_AS_VERL)
    for part, values in {"losses": result[0], **result[1]}.items():
        if not isinstance(values, Tensor) or values.shape != mask.shape:
            shape = f" of shape {list(values.shape)}" if isinstance(values, Tensor) else ""
            expected = f"a tensor of shape {list(mask.shape)}, one value per token of the response"
            fix = f"Leave the mean to the engine, which counts over all micro-batches and ranks. {_AS_VERL}"
            raise ConfigError(
                where, got=f"{part}, a {type(values).__name__}{shape}", expected=expected, fix=fix
            )
    return result


def _check_signature(function: Callable[..., Any], where: str) -> None:
    """Refuse `*args`, `**kwargs` and positional parameters with a default: they leave open what is a field."""
    for parameter in signature(function).parameters.values():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            form = "Name the batch fields it reads as positional parameters and its options after a `*`."
            got, fix = (
                f"a function with {parameter}",
                f"{form} One by verl's contract runs with QUADRIGA_VERL=1.",
            )
            raise ConfigError(where, got=got, expected="named parameters only", fix=fix)
        if parameter.kind in _FIELD_KINDS and parameter.default is not Parameter.empty:
            got = f"the positional parameter {parameter.name!r} with a default"
            expected = "positional parameters without one, since they are fields of the batch"
            fix = f"Put a `*` before {parameter.name!r} to make it an option."
            raise ConfigError(where, got=got, expected=expected, fix=fix)


def _check_options(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in known:
            got = f"the option {name!r}"
            expected = (
                f"one of {', '.join(known)}" if known else "no option: this algorithm has none"
            )
            raise ConfigError(
                where, got=got, expected=expected, fix=did_you_mean(name, known) or "Leave it out."
            )
