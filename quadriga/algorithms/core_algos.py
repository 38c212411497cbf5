# SPDX-License-Identifier: Apache-2.0
"""The algorithms under the function and argument names that verl's users know.

Each of these calls the one implementation elsewhere in this package; code of ours uses that one directly.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable

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
from quadriga.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty
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

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_policy_loss",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Whitened advantages and returns, [B, T] each; see `advantages.gae`."""
    return gae(token_level_rewards, values, response_mask, gamma=gamma, lam=lam)


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages, [B, T], twice; `index` [B] names the groups; see `advantages.grpo`."""
    return grpo(
        token_level_rewards,
        response_mask,
        index,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        epsilon=epsilon,
    )


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantages of the best answers, [B, T], twice; `index` [B] names the groups; see `advantages.grpo_passk`."""
    options = {"norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo, "epsilon": epsilon}
    return grpo_passk(token_level_rewards, response_mask, index, **options)


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Hashable]
) -> tuple[Tensor, Tensor]:
    """Leave-one-out advantages, [B, T], twice; `index` [B] names the groups; see `advantages.rloo`."""
    return rloo(token_level_rewards, response_mask, index)


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Hashable]
) -> tuple[Tensor, Tensor]:
    """Advantages over a length-weighted mean, [B, T], twice; `index` [B] names the groups; see `advantages.opo`."""
    return opo(token_level_rewards, response_mask, index)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Hashable], f_norm: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Scaled group advantages, [B, T], twice; `index` [B] names the groups; see `advantages.gpg`."""
    return gpg(token_level_rewards, response_mask, index, f_norm=f_norm)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Whitened rewards to go, and these as returns, [B, T] each; see `advantages.reinforce_plus_plus`."""
    return reinforce_plus_plus(token_level_rewards, response_mask, gamma=gamma)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Hashable]
) -> tuple[Tensor, Tensor]:
    """Whitened group advantages, [B, T], twice; `index` [B] names the groups."""
    return reinforce_plus_plus_baseline(token_level_rewards, response_mask, index)


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Rewards to go less a baseline [B], and they themselves, [B, T] each; see `advantages.remax`."""
    return remax(token_level_rewards, reward_baselines, response_mask)


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
    """The clipped policy loss of a batch as scalars; see `losses.vanilla`.

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T].
        cliprange: used for the side that is not given.
        cliprange_low, cliprange_high: the two sides of the clip.
        clip_ratio_c: the bound of the dual clip.
        loss_agg_mode: see `agg_loss`.

    Returns:
        pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower.
    """
    low, high = (cliprange if side is None else side for side in (cliprange_low, cliprange_high))
    if low is None or high is None:
        raise ConfigError("compute_policy_loss", got="a side without a clip", fix="Give cliprange or both sides of it.")
    losses, diagnostics = vanilla(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=clip_ratio_c,
    )
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
    """The clipped value loss of a batch, [B, T] in, and the share of tokens clipped; see `losses.value`."""
    losses, diagnostics = clipped_value_loss(vpreds, returns, values, response_mask, cliprange_value=cliprange_value)
    return agg_loss(losses, response_mask, loss_agg_mode), masked_mean(diagnostics["vf_clipfrac"], response_mask)
