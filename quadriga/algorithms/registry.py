# SPDX-License-Identifier: Apache-2.0
"""Registers advantage estimators and policy losses by name. Their signatures declare their inputs:

    @register_adv_est("grpo")
    def grpo(token_level_rewards, response_mask, uid, *, norm_adv_by_std_in_grpo=True): ...
             └──────── fields of the batch ─────────┘     └──────── options ───────┘

Positional parameters are fields of the batch; keyword-only ones are options of the configuration.
The signature tells a training step what it must provide: an estimator with the field `values` needs
a critic.

Two keyword-only parameters with the default None are not options. An estimator that takes
`rollout_id` gets the rollout of each row if rollouts have several rows. One that takes `memory`
gets a dictionary that is kept from step to step and in checkpoints.

A function in a user's file needs no decorator: the configuration names it as
`path/to/file.py:function`.

A field that depends on the whole batch, such as a token's rank among all tokens, is a function
too: `@register_batch_column("name")` computes it from other fields, and any algorithm may name it
as a field.

Shapes: B sequences, T response positions.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, StrEnum
from functools import partial
from inspect import Parameter, signature
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from quadriga.algorithms.masked import zero_outside
from quadriga.declared_algorithms import read_declarations
from quadriga.errors import ConfigError, did_you_mean
from quadriga.user_file import OTHER_CONTRACT, is_reference, load_reference

AlgorithmFunction: TypeAlias = Callable[..., Any]
"""An estimator, a policy loss or a batch column."""
Function = TypeVar("Function", bound=AlgorithmFunction)

# Kinds of parameters that are fields of the batch.
_FIELD_KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_ESTIMATOR = "algorithm.adv_estimator"
ROLLOUT_ID = "rollout_id"
MEMORY = "memory"
_CLIPPED_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"

# Algorithms that have one name in the literature, but several keys here.
_SET_BY_SEVERAL_KEYS = {
    "dapo": f"DAPO is algorithm.adv_estimator=grpo and {_CLIPPED_LOSS}, with "
    "actor_rollout_ref.actor.clip_ratio_high=0.28, "
    "actor_rollout_ref.actor.loss_agg_mode=token-mean and "
    "algorithm.filter_groups.enable=True.",
    "ppo": f"PPO is algorithm.adv_estimator=gae and {_CLIPPED_LOSS}.",
    "dr_grpo": f"Dr. GRPO is algorithm.adv_estimator=grpo and {_CLIPPED_LOSS}, with "
    "algorithm.norm_adv_by_std_in_grpo=False and "
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm.",
}


_ESTIMATOR_NAMES = {name.upper(): name for name in read_declarations("register_adv_est")}
AdvantageEstimator = StrEnum(  # pyrefly: ignore
    "AdvantageEstimator", _ESTIMATOR_NAMES, module=__name__
)
"""Names of the built-in estimators. A member, such as `AdvantageEstimator.GAE`, equals its name."""


def required_fields(function: AlgorithmFunction) -> tuple[str, ...]:
    """Batch fields that an algorithm reads: its positional parameters, in order.

    A parameter called `index` stands for `uid`, the group of a response. It does not read the
    batch's column `index`, which numbers rows of a data file and may repeat across files.
    """
    names = []
    for name, parameter in signature(function).parameters.items():
        if parameter.kind in _FIELD_KINDS:
            names.append("uid" if name == "index" else name)
    return tuple(names)


def options(function: AlgorithmFunction) -> tuple[str, ...]:
    """Options that an algorithm takes: its keyword-only parameters, in order."""
    parameters = signature(function).parameters.values()
    return tuple(item.name for item in parameters if item.kind is Parameter.KEYWORD_ONLY)


def _settable_options(function: AlgorithmFunction) -> tuple[str, ...]:
    """Options that a configuration may set: all but those that the training step provides."""
    return tuple(name for name in options(function) if name not in (ROLLOUT_ID, MEMORY))


def bind_options(
    function: AlgorithmFunction,
    own_values: Mapping[str, Any] | None = None,
    *,
    shared: Mapping[str, Any] | None = None,
    where: str = "algorithm",
) -> AlgorithmFunction:
    """Bind an algorithm's options, so that only its fields remain to be passed.

    Args:
        function: an estimator or a policy loss.
        own_values: values of options that were set for this function, such as the entries of
            `algorithm.adv_options`. The function must take each of them.
        shared: values for any algorithm: all keys of a section, such as `gamma` of `algorithm`.
            An option without a value in `own_values` takes the shared one of its name. Other keys
            are ignored.
        where: the key to name in an error.

    Returns:
        A function of the fields alone.

    Raises:
        ConfigError: the function does not take an option, or an option has no value.
    """
    known = _settable_options(function)
    _check_options(own_values or {}, known, where)
    # `shared` has all keys of a section. Only some of them are options of this function.
    values = {name: value for name, value in (shared or {}).items() if name in known}
    values.update(own_values or {})
    parameters = signature(function).parameters
    for name in known:
        if name not in values and parameters[name].default is Parameter.empty:
            raise ConfigError(where, got=f"no value for the option {name!r}", fix=f"Set {name}.")
    return partial(function, **values)


@dataclass(frozen=True)
class Algorithm:
    """An estimator or a policy loss chosen by a configuration, with its options bound."""

    name: str  # as in the configuration
    fields: tuple[str, ...]  # batch fields that the function reads, in order
    function: AlgorithmFunction  # takes the fields
    # Batch columns among the fields: for each, the function that computes it, with options bound.
    columns: Mapping[str, Callable[..., Tensor]]
    # Whether a sequence whose advantages are all 0 has no loss, so that an engine may skip it.
    needs_advantage: bool
    is_built_in: bool  # False for users' functions, whose results are checked

    @property
    def column_fields(self) -> frozenset[str]:
        """Fields of the batch that the functions in `columns` read."""
        return frozenset(chain.from_iterable(map(required_fields, self.columns.values())))

    def compute_columns(self, fields: Mapping[str, Any]) -> dict[str, Tensor]:
        """Compute the batch columns of this algorithm.

        Args:
            fields: fields of the whole batch by name, [B, T] each, at least `column_fields`.

        Returns:
            The columns by name, [B, T] each.
        """
        computed = {}
        for name, column in self.columns.items():
            computed[name] = column(*(fields[field] for field in required_fields(column)))
        return computed


class Registry(dict[str, AlgorithmFunction]):
    """Functions of one kind by name.

    Args:
        key: the configuration key that chooses among them, for errors.
        options_key: the key whose entries are the options of these functions, for errors.
    """

    def __init__(self, key: str, options_key: str = "") -> None:
        super().__init__()
        self.key = key
        self.options_key = options_key
        # Names of losses that were registered with `needs_advantage`.
        self.needing_advantage: set[str] = set()
        # Names that Quadriga itself registers. The packages `advantages` and `losses` set it, after
        # their last import.
        self.built_in: frozenset[str] = frozenset()

    def register(
        self, name: str, *, needs_advantage: bool = False, compares_group: bool = False
    ) -> Callable[[Function], Function]:
        """Decorator that registers an advantage estimator or a policy loss under a name.

        Args:
            name: the configuration's name for the function.
            needs_advantage: True for a policy loss that is exactly 0, with a gradient of exactly
                0, for a sequence whose advantages are all 0: engines then skip such sequences.
                False is always correct.
            compares_group: True for an estimator that compares the responses to a prompt with one
                another, so that groups of one are refused. It has an effect only for built-in
                estimators, because the check reads it from the source (`declared_algorithms`).

        Returns:
            A decorator that returns the function unchanged.

        Raises:
            ConfigError: another function has the name, or the signature does not tell what is a
                field. Raised by the decorator.
        """

        # str() of a member of `class E(str, Enum)` would be "E.NAME".
        key = str(name.value) if isinstance(name, Enum) else name

        def decorate(function: Function) -> Function:
            where = f"{self.key} {key!r}"
            _check_signature(function, where)
            # A module that runs twice registers new function objects under the same names. So full
            # names are compared, not objects. If the key is free, the function counts as the old one.
            new_name = _full_name(function)
            old_name = _full_name(self.get(key, function))
            if new_name != old_name:
                raise ConfigError(
                    where,
                    got=f"{new_name} and {old_name}",
                    expected="one function per name",
                    fix="Register yours under another name.",
                )
            self[key] = function
            if needs_advantage:
                self.needing_advantage.add(key)
            return function

        return decorate

    def find(self, name: str) -> Callable[..., Any]:
        """Find an estimator or a loss by its registered name, or load it from a user's file.

        Args:
            name: a registered name, `path/to/file.py:function` or
                `pkg://package.module:function`.

        Raises:
            ConfigError: the name is unknown, or the file or function cannot be loaded.
        """
        if name in self:
            return self[name]
        # A path without a function. It would otherwise be reported as a misspelt name.
        if name.endswith(".py"):
            raise ConfigError(
                self.key,
                got=repr(name),
                expected="file.py:function",
                fix="Append a colon and the name of the function to take.",
            )
        if not is_reference(name):
            names = sorted(self)
            fix = _SET_BY_SEVERAL_KEYS.get(str(name)) or did_you_mean(str(name), names)
            # Without a similar name, the function may be in a library that was not imported.
            raise ConfigError(
                self.key,
                got=repr(str(name)),
                expected=f"one of {', '.join(names)}, or path/to/file.py:function",
                fix=fix
                or "Name the file that registers it in actor_rollout_ref.model.external_lib.",
            )
        function = load_reference(name, self.key)
        _check_signature(function, f"{self.key} {name!r}")
        return function

    def choose(
        self, name: str, own_values: Mapping[str, Any], shared: Mapping[str, Any]
    ) -> Algorithm:
        """Find the function that a configuration names, and bind its options.

        All errors in the configuration of an algorithm are raised here, not in a training step.

        Args:
            name: as for `find`.
            own_values: values of options that were set for this function, such as the entries of
                `algorithm.adv_options`. The function, or a batch column that it reads, must take
                each of them.
            shared: values for any algorithm, as for `bind_options`.

        Returns:
            The algorithm, ready to be called with its fields.

        Raises:
            ConfigError: the name is unknown, the function does not take an option, or an option
                has no value.
        """
        function = self.find(name)
        fields = required_fields(function)
        columns = {field: BATCH_COLUMNS[field] for field in fields if field in BATCH_COLUMNS}

        # `own_values` has the options of the function and those of its columns. First check that
        # each belongs to one of them, then give each the options that it takes.
        where = f"{self.options_key} ({name})"
        known = chain.from_iterable(map(_settable_options, (function, *columns.values())))
        _check_options(own_values, list(dict.fromkeys(known)), where)

        def bind(part: AlgorithmFunction) -> AlgorithmFunction:
            """Bind the options of the function or of a column."""
            values = {key: own_values[key] for key in options(part) if key in own_values}
            return bind_options(part, values, shared=shared, where=where)

        return Algorithm(
            name=name,
            fields=fields,
            function=bind(function),
            columns={field: bind(column) for field, column in columns.items()},
            needs_advantage=name in self.needing_advantage,
            is_built_in=name in self.built_in,
        )


ADVANTAGES = Registry(_ESTIMATOR, "algorithm.adv_options")
POLICY_LOSSES = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.policy_loss"
)
# No key chooses among batch columns: they are computed if an algorithm has a field of their name.
BATCH_COLUMNS = Registry("a field of the whole batch")

register_adv_est = ADVANTAGES.register
"""Register an advantage estimator: batch fields in, (advantages, returns) out, both [B, T]."""
register_policy_loss = POLICY_LOSSES.register
"""Register a policy loss: batch fields in, (losses, diagnostics) out, [B, T] each."""
register_batch_column = BATCH_COLUMNS.register
"""Register a field computed from fields [B, T] of the whole batch: one tensor [B, T] out."""
# Names by which users look up a function.
get_adv_estimator_fn = ADVANTAGES.find
get_policy_loss_fn = POLICY_LOSSES.find
choose_estimator = ADVANTAGES.choose
choose_policy_loss = POLICY_LOSSES.choose


class EstimatorMemory:
    """State that an estimator keeps from step to step, and in checkpoints.

    Attributes:
        values: the dictionary that is passed to the estimator as `memory`.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}

    def state_dict(self) -> dict[Hashable, Any]:
        """Copy of the values."""
        return dict(self.values)

    def load_state_dict(self, state: Mapping[Hashable, Any] | None) -> None:
        """Continue from a state of `state_dict`. None: begin with no values."""
        self.values = dict(state or {})


def estimate_advantages(
    estimator: Callable[..., tuple[Tensor, Tensor]],
    fields: Mapping[str, Any],
    memory: dict[Hashable, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run an estimator on the fields that it names, and check its result.

    Args:
        estimator: an estimator with bound options, from `choose_estimator` or `bind_options`.
        fields: columns of the batch by name, tensors and arrays; `response_mask` [B, T] must be
            one of them. Missing columns have defaults: 1 for `rollout_is_weights`, "" for `agent`,
            and the number of the row for `row_index`.
        memory: state of the estimator, which it may update. None: it begins empty.

    Returns:
        Advantages and returns, both [B, T] and 0 outside the mask.

    Raises:
        ConfigError: the estimator names a field that the batch does not have; rollouts have several
            rows, which the estimator would take for separate responses; or it does not return two
            finite tensors of the mask's shape.
    """
    mask = fields["response_mask"].bool()
    defaults = {
        # Without off-policy correction every token has the importance weight 1.
        "rollout_is_weights": torch.ones(mask.shape),
        "agent": [""] * len(mask),
        "row_index": torch.arange(len(mask)),
    }
    fields = {**defaults, **fields}
    names = required_fields(estimator)
    missing_fields = [name for name in names if name not in fields]
    if missing_fields:
        raise ConfigError(
            _ESTIMATOR,
            got=f"an estimator that reads {', '.join(missing_fields)}",
            expected=f"fields of the batch: {', '.join(sorted(fields))}",
            fix="Name its positional parameters after fields; put options after a `*`. Fields of "
            "turns are there with actor_rollout_ref.rollout.mode=async.",
        )

    inputs = [fields[name] for name in names]
    # Check the result, because a user's estimator may return anything.
    result = estimator(*inputs, **_step_arguments(estimator, fields, memory))
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not all(isinstance(part, Tensor) for part in result):
        raise ConfigError(
            _ESTIMATOR,
            got=f"a {type(result).__name__}",
            expected="two tensors: advantages, returns",
        )
    advantages, returns = result
    _check_per_token("advantages", advantages, mask)
    _check_per_token("returns", returns, mask)
    return zero_outside(advantages, mask), zero_outside(returns, mask)


def _step_arguments(
    estimator: AlgorithmFunction, fields: Mapping[str, Any], memory: dict[Hashable, Any] | None
) -> dict[str, Any]:
    """Keyword arguments that a training step, not the configuration, passes to an estimator.

    These are `memory`, and `rollout_id` if a rollout has several rows; each only if the estimator
    has a parameter of that name.

    Raises:
        ConfigError: rollouts have several rows, and the estimator compares rows by `uid` alone.
    """
    taken = options(estimator)
    arguments = {}
    if MEMORY in taken:
        arguments[MEMORY] = {} if memory is None else memory
    rollout_id = list(fields.get(ROLLOUT_ID, ()))
    has_several_rows = len(set(rollout_id)) < len(rollout_id)
    if has_several_rows and ROLLOUT_ID in taken:
        arguments[ROLLOUT_ID] = rollout_id
    elif has_several_rows and "uid" in required_fields(estimator):
        raise ConfigError(
            _ESTIMATOR,
            got="an estimator that counts each row, and rollouts with several rows",
            expected="an estimator that takes rollout_id, such as grpo, rloo, maxrl or gigpo",
        )
    return arguments


def _check_per_token(name: str, values: Tensor, mask: Tensor) -> None:
    """Raise a ConfigError unless values are of the mask's shape [B, T], and finite in the mask.

    Args:
        name: what the values are, for errors.
        values: the values.
        mask: the response mask, [B, T] bool.
    """
    # A common mistake is a value per sequence, [B], which might even broadcast.
    if values.shape != mask.shape:
        raise ConfigError(
            _ESTIMATOR,
            got=f"{name} of shape {list(values.shape)}",
            expected=f"{list(mask.shape)}, one value per token of the response",
            fix="A value per sequence becomes one per token by `values[:, None] * response_mask`.",
        )
    is_bad = ~torch.isfinite(zero_outside(values, mask))
    num_bad = int(is_bad.any(-1).sum())
    if num_bad:
        raise ConfigError(
            _ESTIMATOR,
            got=f"{name} that are not finite in {num_bad} of {len(mask)} sequences",
            expected="finite numbers",
            fix="Look for a division by zero, such as by the standard deviation of a group whose "
            "scores are all equal.",
        )


def check_losses(name: str, result: Any, mask: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Check the result of a policy loss.

    Args:
        name: name of the loss in the configuration.
        result: the value that the loss returned.
        mask: the response mask, [B, T].

    Returns:
        The result: losses [B, T], and diagnostics by name, [B, T] each.

    Raises:
        ConfigError: the result is something else, such as a loss that is already a scalar, or a
            diagnostic that is a number.
    """
    where = f"{POLICY_LOSSES.key} {name!r}, its result"
    is_tuple = isinstance(result, tuple)
    if not (is_tuple and len(result) == 2 and isinstance(result[1], Mapping)):
        raise ConfigError(
            where,
            got=f"a tuple of {len(result)}" if is_tuple else f"a {type(result).__name__}",
            expected="(losses, diagnostics): a tensor, and a dict of tensors",
            fix=OTHER_CONTRACT,
        )
    # Diagnostics must be per token, too, because the engine aggregates them like losses.
    for part, values in {"losses": result[0], **result[1]}.items():
        is_tensor = isinstance(values, Tensor)
        if is_tensor and values.shape == mask.shape:
            continue
        shape = f" of shape {list(values.shape)}" if is_tensor else ""
        raise ConfigError(
            where,
            got=f"{part}, a {type(values).__name__}{shape}",
            expected=f"a tensor of shape {list(mask.shape)}, one value per token of the response",
            fix="Leave the mean to the engine, which counts over all micro-batches and ranks. "
            f"{OTHER_CONTRACT}",
        )
    return result


def check_fields(algorithm: Algorithm, known: Iterable[str], key: str) -> None:
    """Refuse a field of a user's function whose name resembles that of a known field.

    Other unknown names are accepted, because they may be columns of the user's data.

    Args:
        algorithm: the estimator or loss.
        known: names of the fields of the training loop.
        key: the configuration key that chose the algorithm, for the error.

    Raises:
        ConfigError: a name is probably misspelt.
    """
    if algorithm.is_built_in:
        return
    known_fields = {*known, *BATCH_COLUMNS}
    for name in algorithm.fields:
        near_fields = get_close_matches(name, known_fields, n=1, cutoff=0.85)
        if near_fields and near_fields[0] != name:
            raise ConfigError(
                f"{key} {algorithm.name!r}",
                got=f"the positional parameter {name!r}",
                expected="a field",
                fix=f"Did you mean {near_fields[0]!r}? A column of your data needs another name.",
            )


def _full_name(function: AlgorithmFunction) -> str:
    """Module and qualified name of a function, or of the class of a callable object."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def _check_signature(function: AlgorithmFunction, where: str) -> None:
    """Raise a ConfigError for parameters that could be either fields or options.

    These are `*args`, `**kwargs`, and positional parameters with a default.

    Args:
        function: an algorithm.
        where: the key or name to show in the error.
    """
    for parameter in signature(function).parameters.values():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            raise ConfigError(
                where,
                got=f"a function with {parameter}",
                expected="named parameters only",
                fix="Make the batch fields it reads positional parameters, and put its options "
                f"after a `*`. {OTHER_CONTRACT}",
            )
        if parameter.kind in _FIELD_KINDS and parameter.default is not Parameter.empty:
            raise ConfigError(
                where,
                got=f"the positional parameter {parameter.name!r} with a default",
                expected="positional parameters without a default, since they are batch fields",
                fix=f"Put a `*` before {parameter.name!r} to make it an option.",
            )


def _check_options(names: Iterable[str], known: Collection[str], where: str) -> None:
    """Raise a ConfigError for an option that an algorithm does not take.

    Args:
        names: names of options that were set.
        known: names of the options that the algorithm takes.
        where: the key to name in the error.
    """
    for name in names:
        if name in known:
            continue
        raise ConfigError(
            where,
            got=f"the option {name!r}",
            expected=f"one of {', '.join(known)}"
            if known
            else "no option: this algorithm has none",
            fix=did_you_mean(name, known) or "Leave it out.",
        )
