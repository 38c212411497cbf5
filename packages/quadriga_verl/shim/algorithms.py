# SPDX-License-Identifier: Apache-2.0
"""verl's contracts of estimators and policy losses, in both directions.

    a user's estimator   (token_level_rewards, response_mask, index, config, **kwargs)  -> (advantages, returns)
    a user's loss        (old_log_prob, ..., loss_agg_mode, config)                     -> (scalar, metrics ...)

Registered, each becomes a function of our contract; ours appear under verl's names with verl's arguments.

Shapes: B sequences, T response positions.
"""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms import masked
from quadriga.algorithms.aggregate import agg_loss as _agg_loss
from quadriga.algorithms.pf_ppo import pf_ppo_rows
from quadriga.algorithms.registry import ADVANTAGES, POLICY_LOSSES, Registry
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto
from quadriga.user_file import taken
from quadriga_verl.shim import core_algos, is_before

_LOSS_FIELDS = ("old_log_prob", "log_prob", "advantages", "response_mask")
_ALWAYS = ("token_level_rewards", "response_mask", "index")
"""What every estimator of verl's may take; other fields of the batch only where it has no default for them."""
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def our_estimator(function: Callable[..., Any]) -> Callable[..., Any]:
    """An estimator of verl's contract as one of ours: `index` is the column `uid`, `config` the section `algorithm`."""
    parameters = signature(function).parameters.values()
    names = [
        one.name
        for one in parameters
        if one.kind not in _VARIADIC and one.default is Parameter.empty
    ]
    names += taken(function, dict.fromkeys(_ALWAYS))
    names = [name for name in dict.fromkeys(names) if name != "config"]

    def estimate(*fields: Any, config: Any) -> Any:
        return function(
            **dict(zip(names, fields, strict=True)), **taken(function, {"config": config})
        )

    fields = ["uid" if name == "index" else name for name in names]
    return _like(function, estimate, fields, {"config": Parameter.empty})


def our_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A policy loss of verl's contract as one of ours.

    Its scalar stands for the rows of a micro-batch. It becomes the same number on each of their tokens, so large that
    it counts as much as these rows do by `loss_agg_mode`: for a mean of that mode the sum over all micro-batches and
    ranks is exactly the mean over the mini-batch."""
    name = getattr(function, "__name__", "the policy loss")

    def loss(*, config: Any, rollout_is_weights: Tensor | None = None, **fields: Tensor) -> Any:
        # verl's losses may spread these over the arguments of agg_loss; the counts of the mini-batch come in later.
        counts = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
        counts["loss_scale_factor"] = config.loss_scale_factor
        offered = {"loss_agg_mode": config.loss_agg_mode, "rollout_is_weights": rollout_is_weights}
        offered["config"] = config.model_copy(update={"global_batch_info": counts})
        given = taken(function, offered)
        if rollout_is_weights is not None and "rollout_is_weights" not in given:
            fix = "Add the parameter rollout_is_weights=None and multiply the loss of each token by it."
            raise ConfigError(
                name, got="importance weights of the rollout, which it does not take", fix=fix
            )
        scalar, *rest = function(**fields, **given)
        mask = fields["response_mask"]
        if not isinstance(scalar, Tensor) or scalar.numel() != 1:
            got = (
                f"a loss of shape {list(scalar.shape)}"
                if isinstance(scalar, Tensor)
                else type(scalar).__name__
            )
            fix = "Aggregate it by agg_loss; a loss per token is registered by quadriga.algorithms."
            raise ConfigError(name, got=got, expected="a scalar tensor first, as in verl", fix=fix)
        ones, scale = torch.ones_like(fields["log_prob"]), config.loss_scale_factor
        whole = _agg_loss(ones, mask, config.loss_agg_mode, loss_scale_factor=scale)
        per_token = (scalar.reshape(()) / whole.clamp(min=torch.finfo(whole.dtype).tiny)).expand(
            mask.shape
        )
        return per_token, {
            key: torch.full_like(fields["log_prob"], value) for key, value in _metrics(rest, name)
        }

    return _like(
        function, loss, list(_LOSS_FIELDS), {"config": Parameter.empty, "rollout_is_weights": None}
    )


def _metrics(rest: list[Any], name: str) -> Iterator[tuple[str, float]]:
    """The metrics behind a loss: a dict, or the three scalars of verl before 0.7."""
    named = rest[0] if rest and isinstance(rest[0], Mapping) else None
    if named is None:
        named = dict(zip(("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"), rest, strict=False))
    for key, value in named.items():
        try:
            yield (
                str(key).removeprefix("actor/"),
                float(value.detach() if isinstance(value, Tensor) else value),
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name}, metric {key!r}", got=repr(value)[:80], expected="a number"
            ) from error


def _like(
    function: Callable[..., Any],
    adapted: Callable[..., Any],
    fields: list[str],
    options: dict[str, Any],
) -> Callable[..., Any]:
    """The adapted function under the name of the original one, which knows it, with a signature of our contract."""
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in fields]
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in options.items()
    ]
    adapted.__signature__ = signature(adapted).replace(parameters=parameters)
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(adapted, attribute, getattr(function, attribute, None))
    function.quadriga_form = adapted
    return adapted


def verl_estimator(estimator: Callable[..., Any]) -> Callable[..., Any]:
    """One of our estimators with verl's arguments: `index`, options by position, and `config` for options not given."""
    compute = core_algos.in_verls_form(estimator)
    names = signature(compute).parameters

    def compute_advantage(*args: Any, config: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = (
            signature(compute)
            .bind_partial(*args, **{key: kwargs[key] for key in kwargs if key in names})
            .arguments
        )
        of_config = (
            {name: config.get(name) for name in names if name not in given}
            if config is not None
            else {}
        )
        return compute(
            **given, **{name: value for name, value in of_config.items() if value is not None}
        )

    return compute_advantage


def verl_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of our policy losses with verl's arguments and return: a scalar, and the metrics of the version."""

    def compute_policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
        **others: Tensor,
    ) -> tuple[Any, ...]:
        given: dict[str, Any] = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, **dict(config or {})}
        policy = dict(given.get("policy_loss") or {})
        shared = {**policy, **(policy.get("options") or {}), **given}
        for side in ("clip_ratio_low", "clip_ratio_high"):
            shared[side] = shared["clip_ratio"] if shared.get(side) is None else shared[side]
        (name,) = (name for name, one in POLICY_LOSSES.items() if one is function)
        chosen = POLICY_LOSSES.choose(name, {}, shared)
        values = (old_log_prob, log_prob, advantages, response_mask)
        fields = {**dict(zip(_LOSS_FIELDS, values, strict=True)), **others}
        fields |= chosen.compute_columns(fields)
        losses, found = chosen.function(**{field: fields[field] for field in chosen.fields})
        losses = losses if rollout_is_weights is None else losses * rollout_is_weights
        loss = _agg_loss(losses, response_mask, loss_agg_mode)
        means = {key: masked.masked_mean(value, response_mask) for key, value in found.items()}
        if is_before(0, 7):
            names = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
            return loss, *(means.get(key, torch.zeros(())) for key in names)
        return loss, {f"actor/{key}": value.item() for key, value in means.items()}

    return compute_policy_loss


class RegistryOfVerl(MutableMapping[str, Callable[..., Any]]):
    """verl's dictionaries of functions: what is read has verl's arguments, what is written becomes one of ours."""

    def __init__(
        self, registry: Registry, ours: Callable[..., Any], verls: Callable[..., Any]
    ) -> None:
        self._registry, self._ours, self._verls = registry, ours, verls
        self._originals: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """verl's decorator: the function itself comes back."""

        def decorate(function: Any) -> Any:
            self[name] = function
            return function

        return decorate

    def __getitem__(self, name: str) -> Callable[..., Any]:
        name = _plain(name)
        return (
            self._originals[name] if name in self._originals else self._verls(self._registry[name])
        )

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        self._registry.register(_plain(name))(self._ours(function))
        self._originals[_plain(name)] = function

    def __delitem__(self, name: str) -> None:
        del self._registry[_plain(name)]
        self._originals.pop(_plain(name), None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    def find(self, name: str) -> Callable[..., Any]:
        """The function with verl's arguments; verl's ValueError where there is none."""
        if _plain(name) not in self:
            raise ValueError(
                f"{self._registry.key}: got {_plain(name)!r}, expected one of {', '.join(self)}"
            )
        return self[name]


def _plain(name: Any) -> str:
    return str(name.value if isinstance(name, Enum) else name)


ADV_ESTIMATOR_REGISTRY = RegistryOfVerl(ADVANTAGES, our_estimator, verl_estimator)
POLICY_LOSS_REGISTRY = RegistryOfVerl(POLICY_LOSSES, our_loss, verl_loss)
register_adv_est, get_adv_estimator_fn = (
    ADV_ESTIMATOR_REGISTRY.register,
    ADV_ESTIMATOR_REGISTRY.find,
)
register_policy_loss, get_policy_loss_fn = POLICY_LOSS_REGISTRY.register, POLICY_LOSS_REGISTRY.find

_ESTIMATOR = re.compile(r"compute_(\w+?)(?:_outcome)?_advantage(?:_return)?")
_OTHER_NAMES = {"multi_turn_optimal_token_baseline": "tir_optimal_token_baseline"}


def __getattr__(name: str) -> Any:
    """verl's `compute_...` functions, each made of the one implementation."""
    loss, found = name.removeprefix("compute_policy_loss_"), _ESTIMATOR.fullmatch(name)
    if loss != name and loss in POLICY_LOSSES:
        return POLICY_LOSS_REGISTRY[loss]
    estimator = found and _OTHER_NAMES.get(found[1], found[1])
    if estimator in ADVANTAGES:
        return ADV_ESTIMATOR_REGISTRY[estimator]
    raise AttributeError(name)


def agg_loss(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, dp_size: int = 1, **counts: Any
) -> Tensor:
    """`aggregate.agg_loss` [], times the number of ranks over which a backend averages gradients."""
    return dp_size * _agg_loss(loss_mat, loss_mask, loss_agg_mode, **counts)


def compute_entropy_loss(
    logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean"
) -> Tensor:
    """The entropy [] of logits [B, T, V], aggregated as a loss is."""
    return _agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Scores less the estimated divergence (k1) of each token, [B, T]."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0
) -> DataProto:
    """As many rows as there are, drawn by their scores; torch's generator decides which."""
    scores, seed = data.batch["token_level_scores"].sum(-1), int(torch.randint(2**31, ()))
    return data.select_idxs(pf_ppo_rows(scores, reweight_method, weight_pow, seed=seed))


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """The mean where `mask` is set, over everything or along `axis`."""
    return masked.masked_mean(values, mask, axis)


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """The sum where `mask` is set, over everything or along `axis`."""
    return masked.masked_sum(values, mask, axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """The variance [] of what stands under the mask."""
    return values[mask.bool()].var(unbiased=unbiased)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats over the last dimension: [..., V] -> [...]."""
    return torch.distributions.Categorical(logits=logits).entropy()


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probabilities of labels [...] under logits [..., V]."""
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
