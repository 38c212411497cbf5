# SPDX-License-Identifier: Apache-2.0
"""The algorithms under the function and argument names that verl's users know.

Each of these calls the one implementation elsewhere in this package; code of ours uses that one directly. Advantage
functions take the arguments of the estimator, in its order, options by position too; the groups are called `index` [B].

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


def in_verls_form(
    estimator: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The estimator with options that may be given by position, and with `index` for `uid`."""
    form, kind = signature(estimator), Parameter.POSITIONAL_OR_KEYWORD
    named = [("index" if name == "uid" else name, one) for name, one in form.parameters.items()]
    parameters = [one.replace(name=name, kind=kind) for name, one in named]

    def compute(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = compute.__signature__.bind(*args, **kwargs).arguments
        return estimator(
            **{"uid" if name == "index" else name: value for name, value in given.items()}
        )

    compute.__signature__ = form.replace(parameters=parameters)
    compute.__doc__ = estimator.__doc__
    return compute


compute_gae_advantage_return = in_verls_form(gae)
compute_grpo_outcome_advantage = in_verls_form(grpo)
compute_grpo_passk_outcome_advantage = in_verls_form(grpo_passk)
compute_rloo_outcome_advantage = in_verls_form(rloo)
compute_opo_outcome_advantage = in_verls_form(opo)
compute_gpg_outcome_advantage = in_verls_form(gpg)
compute_reinforce_plus_plus_outcome_advantage = in_verls_form(reinforce_plus_plus)
compute_reinforce_plus_plus_baseline_outcome_advantage = in_verls_form(reinforce_plus_plus_baseline)
compute_remax_outcome_advantage = in_verls_form(remax)


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
    """The clipped policy loss of a batch (`losses.vanilla`) as scalars, [].
    Returns pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower.

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T].
        cliprange: used for the side that is not given.
        cliprange_low, cliprange_high: the two sides of the clip.
        clip_ratio_c: the bound of the dual clip.
        loss_agg_mode: see `agg_loss`.
    """
    low, high = (cliprange if side is None else side for side in (cliprange_low, cliprange_high))
    if low is None or high is None:
        raise ConfigError(
            "compute_policy_loss",
            got="a side without a clip",
            fix="Give cliprange or both sides of it.",
        )
    clips = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": clip_ratio_c}
    losses, diagnostics = vanilla(old_log_prob, log_prob, advantages, response_mask, **clips)
    means = {name: masked_mean(value, response_mask) for name, value in diagnostics.items()}
    loss = agg_loss(losses, response_mask, loss_agg_mode)
    return loss, means["pg_clipfrac"], means["ppo_kl"], means["pg_clipfrac_lower"]


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """The clipped value loss of a batch (`losses.value`), [B, T] in, and the share of tokens clipped, both []."""
    losses, diagnostics = clipped_value_loss(
        vpreds, returns, values, response_mask, cliprange_value=cliprange_value
    )
    return agg_loss(losses, response_mask, loss_agg_mode), masked_mean(
        diagnostics["vf_clipfrac"], response_mask
    )
