# SPDX-License-Identifier: Apache-2.0
"""The bypass form of off-policy correction: the policy that sampled is the one that the update starts from.

There are two policies instead of three, and no pass for old log-probabilities. The ratio of the policy being trained
over the rollout is known only here, so importance weights and rejection (`rollout_correction`) are computed from it,
without gradient:

    ppo_clip     the clipped loss of PPO with that ratio, which is the importance weight already
    reinforce    loss_t = -w A_t log p_t, with w the importance weight; w = 1 without one

A rejected token adds nothing, and still counts where the mean is taken.

Shapes: B sequences, T response positions.
"""

from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.losses.gpg import gpg
from quadriga.algorithms.losses.vanilla import vanilla
from quadriga.algorithms.masked import log_ratios
from quadriga.algorithms.registry import register_policy_loss
from quadriga.algorithms.rollout_correction import Rejection, importance_weights, keep_mask


@register_policy_loss("bypass_mode", needs_advantage=True)
def bypass_mode(
    rollout_log_probs: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    correction: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, [B, T].
    Returns losses; diagnostics `rollout_kl` and `rollout_k3_kl` between the two policies, `rollout_rs_masked_fraction`,
    with reinforce `rollout_is_mean`, else those of `vanilla`.
    `rollout_log_probs`: [B, T] under the policy that sampled.
    `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_c`: as for `vanilla`; read with ppo_clip.
    `correction`: the section `algorithm.rollout_correction`; None: ppo_clip, and nothing is rejected."""
    log_ratio = log_ratios(log_prob, rollout_log_probs, response_mask).detach()
    rules = [Rejection(*rule) for rule in correction.rejections] if correction else []
    kept, _ = keep_mask(log_ratio, response_mask, rules)
    reported = {
        "rollout_kl": -log_ratio,
        "rollout_k3_kl": log_ratio.exp() - 1 - log_ratio,
        "rollout_rs_masked_fraction": (response_mask.bool() & ~kept.bool()).to(log_ratio.dtype),
    }
    if correction is None or correction.loss_type == "ppo_clip":
        clips = {
            "clip_ratio_low": clip_ratio_low,
            "clip_ratio_high": clip_ratio_high,
            "clip_ratio_c": clip_ratio_c,
        }
        losses, others = vanilla(rollout_log_probs, log_prob, advantages, kept, **clips)
        return losses, reported | others
    weights = torch.ones_like(log_ratio)
    if correction.rollout_is is not None:
        weights = importance_weights(
            log_ratio, response_mask, correction.rollout_is, correction.weight_bounds
        )
    losses, _ = gpg(log_prob, advantages, kept)
    return losses * weights, reported | {
        "rollout_is_mean": weights.masked_fill(~response_mask.bool(), 0)
    }
