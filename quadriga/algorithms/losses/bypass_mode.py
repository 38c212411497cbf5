# SPDX-License-Identifier: Apache-2.0
"""Bypass mode of off-policy correction: the update starts from the policy that sampled.

There are two policies instead of three, and no pass for old log-probabilities. The ratio of the
policy in training to the rollout is only known here, so importance weights and rejection
(`rollout_correction`) are computed from it, without gradient:

    ppo_clip     the clipped loss of PPO with that ratio, which already is the importance weight
    reinforce    loss_t = -w A_t log p_t, with w the importance weight (1 if none is configured)

A rejected token adds nothing to the loss, and still counts where the mean is taken.

Shapes: B sequences, T response positions.
"""

from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.losses.gpg import gpg
from quadriga.algorithms.losses.vanilla import vanilla
from quadriga.algorithms.masked import log_ratios, zero_outside
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
    """Policy loss with off-policy correction against the policy that sampled.

    Args:
        rollout_log_probs: log-probabilities under the policy that sampled, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        clip_ratio_low: as for `vanilla`; read for ppo_clip.
        clip_ratio_high: as for `vanilla`; read for ppo_clip.
        clip_ratio_c: as for `vanilla`; read for ppo_clip.
        correction: section `algorithm.rollout_correction`; None means ppo_clip without rejection.

    Returns:
        The loss of each token, [B, T], and the diagnostics `rollout_kl` and `rollout_k3_kl`
        (estimates of KL(rollout || current)), `rollout_rs_masked_fraction` (1 on rejected tokens);
        for reinforce also `rollout_is_mean` (the importance weights), for ppo_clip those of
        `vanilla`.
    """
    log_ratio = log_ratios(log_prob, rollout_log_probs, response_mask).detach()
    rules = [Rejection(*rule) for rule in correction.rejections] if correction else []
    kept_mask, _ = keep_mask(log_ratio, response_mask, rules)
    is_rejected = response_mask.bool() & ~kept_mask.bool()
    reported = {
        "rollout_kl": -log_ratio,
        "rollout_k3_kl": log_ratio.exp() - 1 - log_ratio,
        "rollout_rs_masked_fraction": is_rejected.to(log_ratio.dtype),
    }

    if correction is None or correction.loss_type == "ppo_clip":
        losses, vanilla_diagnostics = vanilla(
            rollout_log_probs,
            log_prob,
            advantages,
            kept_mask,
            clip_ratio_low=clip_ratio_low,
            clip_ratio_high=clip_ratio_high,
            clip_ratio_c=clip_ratio_c,
        )
        return losses, reported | vanilla_diagnostics

    # Reinforce.
    weights = torch.ones_like(log_ratio)
    if correction.rollout_is is not None:
        level = correction.rollout_is
        weights = importance_weights(log_ratio, response_mask, level, correction.weight_bounds)
    losses, _ = gpg(log_prob, advantages, kept_mask)
    reported["rollout_is_mean"] = zero_outside(weights, response_mask)
    return losses * weights, reported
