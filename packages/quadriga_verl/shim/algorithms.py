# SPDX-License-Identifier: Apache-2.0
"""Adapters between verl's interfaces of estimators and policy losses and those of Quadriga.

    verl's estimator   (token_level_rewards, response_mask, index, config, **kwargs)
                           -> (advantages, returns)
    verl's loss        (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
                           -> (scalar, metrics ...)

`to_quadriga_estimator` and `to_quadriga_loss` adapt users' functions that are written for verl, when they are
registered. `to_verl_estimator` and `to_verl_loss` adapt the functions here for users who look them up.

Shapes: B sequences, T response positions, V token ids.
"""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms import masked
from quadriga.algorithms.aggregate import agg_loss as _agg_loss
from quadriga.algorithms.pf_ppo import pf_ppo_rows
from quadriga.algorithms.registry import (
    ADVANTAGES,
    POLICY_LOSSES,
    AlgorithmFunction,
    Registry,
)
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto
from quadriga.user_file import accepted_arguments
from quadriga_verl import core_algos
from quadriga_verl.shim import is_before

VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)  # kinds of `*args` and `**kwargs`
_LOSS_FIELDS = ("old_log_prob", "log_prob", "advantages", "response_mask")
_USUAL_FIELDS = ("token_level_rewards", "response_mask", "index")
"""Fields that verl also passes to optional parameters of an estimator. Others only to required ones."""
_METRICS_BEFORE_0_7 = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
"""Metrics that a loss returns as scalars before verl 0.7, in this order."""


# ---- users' functions for Quadriga --------------------------------------------------------------


def to_quadriga_estimator(function: AlgorithmFunction) -> AlgorithmFunction:
    """Adapt an estimator with verl's interface to that of Quadriga.

    `index` gets the column `uid`, and `config` the section `algorithm`.
    """
    names = []
    for name, parameter in signature(function).parameters.items():
        is_required = parameter.kind not in VARIADIC and parameter.default is Parameter.empty
        if is_required and name != "config":
            names.append(name)
    # Add the usual fields for which the function has an optional parameter or `**kwargs`.
    usual_names = accepted_arguments(function, dict.fromkeys(_USUAL_FIELDS))
    names += [name for name in usual_names if name not in names]

    def estimate(*fields: Any, config: Any) -> Any:
        arguments = dict(zip(names, fields, strict=True))
        return function(**arguments, **accepted_arguments(function, {"config": config}))

    fields = ["uid" if name == "index" else name for name in names]
    return _with_signature(estimate, function, fields, {"config": Parameter.empty})


def to_quadriga_loss(function: AlgorithmFunction) -> AlgorithmFunction:
    """Adapt a policy loss with verl's interface to that of Quadriga.

    verl's loss returns a scalar for a micro-batch. Quadriga's returns a loss for each token, which
    the engine aggregates by `loss_agg_mode`. The adapter gives each token the same loss, scaled so
    that the aggregate over the micro-batch is the scalar. If verl's loss has aggregated by the same
    mode, the sum over all micro-batches and ranks is then exactly the mean over the mini-batch.

    The adapter raises a ConfigError if the function does not return a scalar, if it does not take
    importance weights that are configured, or for a `loss_agg_mode` that verl does not have.
    """
    name = getattr(function, "__name__", "the policy loss")

    def loss(*, config: Any, rollout_is_weights: Tensor | None = None, **fields: Tensor) -> Any:
        if config.loss_agg_mode == "rollout-mean-token-mean":
            raise ConfigError(
                name,
                got="loss_agg_mode='rollout-mean-token-mean', for a loss that does not see rollouts",
                expected="a mode of verl",
                fix="Set it to seq-mean-token-mean, or register a loss per token.",
            )
        # In verl a loss may pass these to `agg_loss`. Here they have no counts of the mini-batch (None),
        # which the engine applies later.
        batch_info = {
            "dp_size": 1,
            "batch_num_tokens": None,
            "global_batch_size": None,
            "loss_scale_factor": config.loss_scale_factor,
        }
        offered = {
            "loss_agg_mode": config.loss_agg_mode,
            "rollout_is_weights": rollout_is_weights,
            "config": config.model_copy(update={"global_batch_info": batch_info}),
        }
        arguments = accepted_arguments(function, offered)
        if rollout_is_weights is not None and "rollout_is_weights" not in arguments:
            raise ConfigError(
                name,
                got="importance weights of the rollout, which it does not take",
                fix="Add the parameter rollout_is_weights=None and multiply the loss of each token by it.",
            )
        scalar, *results = function(**fields, **arguments)
        _check_scalar(scalar, name)
        metrics = dict(_read_metrics(results, name))

        log_prob = fields["log_prob"]
        mask = fields["response_mask"]
        # The aggregation is linear, so a loss of c for each token becomes c * unit_loss.
        unit_loss = _agg_loss(
            torch.ones_like(log_prob),
            mask,
            config.loss_agg_mode,
            loss_scale_factor=config.loss_scale_factor,
        )
        # If the mask leaves out every token, `unit_loss` is 0, and the losses have no effect.
        smallest = torch.finfo(unit_loss.dtype).tiny
        per_token = scalar.reshape(()) / unit_loss.clamp(min=smallest)
        diagnostics = {key: torch.full_like(log_prob, value) for key, value in metrics.items()}
        return per_token.expand(mask.shape), diagnostics

    # `config` is required; importance weights are passed only with off-policy correction.
    options = {"config": Parameter.empty, "rollout_is_weights": None}
    return _with_signature(loss, function, _LOSS_FIELDS, options)


def _check_scalar(scalar: Any, name: str) -> None:
    """Raise a ConfigError if the result of the loss `name` is no scalar tensor."""
    if isinstance(scalar, Tensor) and scalar.numel() == 1:
        return
    got = type(scalar).__name__
    if isinstance(scalar, Tensor):
        got = f"a loss of shape {list(scalar.shape)}"
    raise ConfigError(
        name,
        got=got,
        expected="a scalar tensor first, as in verl",
        fix="Aggregate it by agg_loss; a loss per token is registered by quadriga.algorithms.",
    )


def _read_metrics(results: Sequence[Any], name: str) -> Iterator[tuple[str, float]]:
    """Yield name and value of the metrics that a user's loss has returned.

    Args:
        results: what the loss returned after the scalar: a dictionary, or the three scalars of verl
            before 0.7.
        name: name of the loss, for errors.

    Raises:
        ConfigError: a metric is no number.
    """
    if results and isinstance(results[0], Mapping):
        metrics = results[0]
    else:
        metrics = dict(zip(_METRICS_BEFORE_0_7, results, strict=False))
    for key, value in metrics.items():
        number = value.detach() if isinstance(value, Tensor) else value
        try:
            yield str(key).removeprefix("actor/"), float(number)
        except (TypeError, ValueError) as error:
            where = f"{name}, metric {key!r}"
            raise ConfigError(where, got=repr(value)[:80], expected="a number") from error


def _with_signature(
    adapter: AlgorithmFunction,
    function: AlgorithmFunction,
    fields: Sequence[str],
    options: Mapping[str, Any],
) -> AlgorithmFunction:
    """Give an adapter the name of the user's function, and a signature that registries can read.

    Args:
        adapter: the adapter, which takes any fields.
        function: the user's function. Its attribute `quadriga_form` becomes the adapter, so that a
            configuration may also name the function as `file.py:function`.
        fields: positional parameters of the signature.
        options: keyword-only parameters with their defaults.

    Returns:
        The adapter.
    """
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in fields]
    for name, default in options.items():
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
    adapter.__signature__ = signature(adapter).replace(parameters=parameters)
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(adapter, attribute, getattr(function, attribute, None))
    function.quadriga_form = adapter
    return adapter


# ---- functions here with verl's interface -------------------------------------------------------


def to_verl_estimator(estimator: AlgorithmFunction) -> AlgorithmFunction:
    """Give an estimator verl's parameters; see `core_algos.with_verl_signature`.

    Options that are not passed are read from `config`. Unknown keyword arguments are ignored.
    """
    compute = core_algos.with_verl_signature(estimator)
    parameters = signature(compute).parameters

    def compute_advantage(*args: Any, config: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        known = {name: value for name, value in kwargs.items() if name in parameters}
        arguments = signature(compute).bind_partial(*args, **known).arguments
        if config is not None:
            # An option may be in `adv_options`, or in the section itself.
            options = config.get("adv_options") or {}
            for name in parameters:
                value = options.get(name, config.get(name))
                if name not in arguments and value is not None:
                    arguments[name] = value
        return compute(**arguments)

    # `compute_advantage` in trainer.py reads from the signature which columns to pass.
    config_parameter = Parameter("config", Parameter.KEYWORD_ONLY, default=None)
    all_parameters = [*parameters.values(), config_parameter]
    compute_advantage.__signature__ = signature(compute_advantage).replace(
        parameters=all_parameters
    )
    return compute_advantage


def to_verl_loss(function: AlgorithmFunction) -> AlgorithmFunction:
    """Give a registered policy loss verl's parameters and results.

    Options are read from `config`, which may be verl's section `actor` or a dictionary. The results are
    the aggregated loss and a dictionary of metrics, or before verl 0.7 the loss and three scalars.
    """

    def compute_policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
        **columns: Tensor,
    ) -> tuple[Any, ...]:
        # Options may be in the section `actor`, in its `policy_loss`, or in `policy_loss.options`.
        settings: dict[str, Any] = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, **dict(config or {})}
        policy = dict(settings.get("policy_loss") or {})
        shared = {**policy, **(policy.get("options") or {}), **settings}
        # `clip_ratio` is the clip of both sides, unless they have their own.
        for side in ("clip_ratio_low", "clip_ratio_high"):
            if shared.get(side) is None:
                shared[side] = shared["clip_ratio"]
        # `choose` finds a function by name, and binds its options: none of its own ({}), all of `shared`.
        (name,) = (name for name, loss in POLICY_LOSSES.items() if loss is function)
        algorithm = POLICY_LOSSES.choose(name, {}, shared)

        fields = {
            "old_log_prob": old_log_prob,
            "log_prob": log_prob,
            "advantages": advantages,
            "response_mask": response_mask,
            **columns,
        }
        # Some losses read columns that are computed from the fields of a batch.
        fields |= algorithm.compute_columns(fields)
        losses, diagnostics = algorithm.function(*(fields[name] for name in algorithm.fields))
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        loss = _agg_loss(losses, response_mask, loss_agg_mode)
        means = {}
        for key, values in diagnostics.items():
            means[key] = masked.masked_mean(values, response_mask)
        if is_before(0, 7):
            return loss, *(means.get(key, torch.zeros(())) for key in _METRICS_BEFORE_0_7)
        return loss, {f"actor/{key}": mean.item() for key, mean in means.items()}

    return compute_policy_loss


# ---- registries ---------------------------------------------------------------------------------


class VerlRegistryView(MutableMapping[str, AlgorithmFunction]):
    """A view of one of Quadriga's registries, in which functions have verl's interface.

    Args:
        registry: the registry.
        to_quadriga: adapts a function with verl's interface, to be registered.
        to_verl: adapts a registered function to verl's interface, to be read.
    """

    def __init__(
        self, registry: Registry, to_quadriga: AlgorithmFunction, to_verl: AlgorithmFunction
    ) -> None:
        self._registry = registry
        self._to_quadriga = to_quadriga
        self._to_verl = to_verl
        # Functions that were registered by this view. They are returned as they were given.
        self._originals: dict[str, AlgorithmFunction] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """Make a decorator that registers a function and returns it unchanged."""

        def decorate(function: Any) -> Any:
            self[name] = function
            return function

        return decorate

    def __getitem__(self, name: str) -> AlgorithmFunction:
        name = _name_as_text(name)
        if name in self._originals:
            return self._originals[name]
        return self._to_verl(self._registry[name])

    def __setitem__(self, name: str, function: AlgorithmFunction) -> None:
        name = _name_as_text(name)
        self._registry.register(name)(self._to_quadriga(function))
        self._originals[name] = function

    def __delitem__(self, name: str) -> None:
        del self._registry[_name_as_text(name)]
        self._originals.pop(_name_as_text(name), None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    def find(self, name: str) -> AlgorithmFunction:
        """Find a function, with verl's interface.

        Raises:
            ValueError: no function has that name.
        """
        name = _name_as_text(name)
        if name not in self:
            expected = f"one of {', '.join(self)}"
            raise ValueError(f"{self._registry.key}: got {name!r}, expected {expected}")
        return self[name]


def _name_as_text(name: Any) -> str:
    """Convert a name to text. verl's names may be members of an enum."""
    return str(name.value if isinstance(name, Enum) else name)


ADV_ESTIMATOR_REGISTRY = VerlRegistryView(ADVANTAGES, to_quadriga_estimator, to_verl_estimator)
POLICY_LOSS_REGISTRY = VerlRegistryView(POLICY_LOSSES, to_quadriga_loss, to_verl_loss)
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
get_adv_estimator_fn = ADV_ESTIMATOR_REGISTRY.find
register_policy_loss = POLICY_LOSS_REGISTRY.register
get_policy_loss_fn = POLICY_LOSS_REGISTRY.find

_ESTIMATOR = re.compile(r"compute_(\w+?)(?:_outcome)?_advantage(?:_return)?")
_RENAMED = {"multi_turn_optimal_token_baseline": "tir_optimal_token_baseline"}


def __getattr__(name: str) -> Any:
    """Return verl's function `compute_policy_loss_LOSS` or `compute_ESTIMATOR_advantage`.

    In verl, names of estimators may also end with `_outcome_advantage` or `_advantage_return`.
    """
    loss = name.removeprefix("compute_policy_loss_")
    if loss != name and loss in POLICY_LOSSES:
        return POLICY_LOSS_REGISTRY[loss]
    match = _ESTIMATOR.fullmatch(name)
    estimator = _RENAMED.get(match[1], match[1]) if match else None
    if estimator in ADVANTAGES:
        return ADV_ESTIMATOR_REGISTRY[estimator]
    raise AttributeError(name)


# ---- functions of tensors -----------------------------------------------------------------------


def agg_loss(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, dp_size: int = 1, **counts: Any
) -> Tensor:
    """Aggregate losses, and multiply by the number of ranks over which gradients are averaged.

    Args:
        loss_mat: loss of each token, [B, T].
        loss_mask: tokens that count, [B, T].
        loss_agg_mode: how to aggregate.
        dp_size: number of data-parallel ranks.
        counts: counts of the mini-batch, as for `aggregate.agg_loss`.

    Returns:
        The loss, [].
    """
    return dp_size * _agg_loss(loss_mat, loss_mask, loss_agg_mode, **counts)


def compute_entropy_loss(
    logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean"
) -> Tensor:
    """Entropy of logits [B, T, V], aggregated as a loss: []."""
    return _agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Scores minus the estimated divergence (k1) of each token: [B, T]."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0
) -> DataProto:
    """Draw as many rows as the batch has, weighted by their scores.

    Args:
        data: the batch, with `token_level_scores` [B, T].
        reweight_method: how weights depend on scores; see `pf_ppo_rows`.
        weight_pow: exponent of the method "pow".

    Returns:
        A batch of B rows, some of them repeated. torch's random generator decides which.
    """
    scores = data.batch["token_level_scores"].sum(-1)
    seed = int(torch.randint(2**31, ()))
    return data.select_idxs(pf_ppo_rows(scores, reweight_method, weight_pow, seed=seed))


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean of the values under a mask, over all dimensions or along `axis`."""
    return masked.masked_mean(values, mask, axis)


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum of the values under a mask, over all dimensions or along `axis`."""
    return masked.masked_sum(values, mask, axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the values under a mask: []."""
    return values[mask.bool()].var(unbiased=unbiased)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats over the last dimension: [..., V] -> [...]."""
    return torch.distributions.Categorical(logits=logits).entropy()


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probabilities of labels [...] under logits [..., V]."""
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
