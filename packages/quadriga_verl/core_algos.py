# SPDX-License-Identifier: Apache-2.0
"""The algorithms with verl's function and argument names.

Each function calls the implementation in `quadriga.algorithms`. Advantage functions have the
parameters of their estimator in the same order; options may also be passed by position, and the
groups (`uid`) are called `index` [B].

Shapes: B sequences, T response positions.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from torch import Tensor

from quadriga.algorithms.advantages.gae import gae
from quadriga.algorithms.advantages.gpg import gpg
from quadriga.algorithms.advantages.grpo import grpo
from quadriga.algorithms.advantages.grpo_passk import grpo_passk
from quadriga.algorithms.advantages.opo import opo
from quadriga.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from quadriga.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from quadriga.algorithms.advantages.remax import remax
from quadriga.algorithms.advantages.rloo import rloo
from quadriga.algorithms.aggregate import agg_loss
from quadriga.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    get_kl_controller,
    kl_penalty,
)
from quadriga.algorithms.losses.value import clipped_value_loss
from quadriga.algorithms.losses.vanilla import vanilla
from quadriga.algorithms.masked import masked_mean
from quadriga.algorithms.registry import (
    AdvantageEstimator,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from quadriga.errors import ConfigError


def with_verl_signature(
    estimator: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Give an estimator verl's parameters.

    Options, which are keyword-only in Quadriga, may be passed by position. `uid` is called `index`,
    and `rollout_id` keeps its default.
    """
    original = signature(estimator)
    parameters = []
    for name, parameter in original.parameters.items():
        # In verl every row is a rollout of its own.
        if name == "rollout_id":
            continue
        verl_name = "index" if name == "uid" else name
        kind = Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(parameter.replace(name=verl_name, kind=kind))

    def compute(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        arguments = compute.__signature__.bind(*args, **kwargs).arguments
        if "index" in arguments:
            arguments["uid"] = arguments.pop("index")
        return estimator(**arguments)

    # `help()` and `bind` above read the signature from this attribute.
    compute.__signature__ = original.replace(parameters=parameters)
    compute.__doc__ = estimator.__doc__
    return compute


# verl's names for the estimators.
compute_gae_advantage_return = with_verl_signature(gae)
compute_grpo_outcome_advantage = with_verl_signature(grpo)
compute_grpo_passk_outcome_advantage = with_verl_signature(grpo_passk)
compute_rloo_outcome_advantage = with_verl_signature(rloo)
compute_opo_outcome_advantage = with_verl_signature(opo)
compute_gpg_outcome_advantage = with_verl_signature(gpg)
compute_reinforce_plus_plus_outcome_advantage = with_verl_signature(reinforce_plus_plus)
compute_reinforce_plus_plus_baseline_outcome_advantage = with_verl_signature(
    reinforce_plus_plus_baseline
)
compute_remax_outcome_advantage = with_verl_signature(remax)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Aggregated clipped policy loss of a batch; see `losses.vanilla`.

    Args:
        old_log_prob: log-probabilities under the policy before the update, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        cliprange: value of `cliprange_low` and `cliprange_high` where they are None.
        cliprange_low: the ratio is clipped below 1 minus this.
        cliprange_high: the ratio is clipped above 1 plus this.
        clip_ratio_c: bound of the dual clip.
        loss_agg_mode: see `agg_loss`.

    Returns:
        The loss, and the means of three diagnostics over the response tokens, all []: share of clipped
        tokens (pg_clipfrac), estimated divergence from the old policy (ppo_kl), and share of tokens
        clipped by the dual clip (pg_clipfrac_lower).

    Raises:
        ConfigError: a side has no clip.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ConfigError(
            "compute_policy_loss",
            got="a side without a clip",
            fix="Set cliprange, or both cliprange_low and cliprange_high.",
        )
    losses, diagnostics = vanilla(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=clip_ratio_c,
    )
    loss = agg_loss(losses, response_mask, loss_agg_mode)
    clipped = masked_mean(diagnostics["pg_clipfrac"], response_mask)
    divergence = masked_mean(diagnostics["ppo_kl"], response_mask)
    bounded = masked_mean(diagnostics["pg_clipfrac_lower"], response_mask)
    return loss, clipped, divergence, bounded


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """Aggregated clipped value loss of a batch; see `losses.value`.

    Args:
        vpreds: predictions of the critic, with gradient, [B, T].
        returns: returns to predict, [B, T].
        values: predictions before the update, [B, T].
        response_mask: [B, T].
        cliprange_value: predictions are clipped to `values` plus or minus this.
        loss_agg_mode: see `agg_loss`.

    Returns:
        The loss and the share of clipped tokens, both [].
    """
    losses, diagnostics = clipped_value_loss(
        vpreds, returns, values, response_mask, cliprange_value=cliprange_value
    )
    loss = agg_loss(losses, response_mask, loss_agg_mode)
    return loss, masked_mean(diagnostics["vf_clipfrac"], response_mask)
