# SPDX-License-Identifier: Apache-2.0
"""VESPO: variational sequence-level soft policy optimization. Shen et al., arXiv:2602.10693.

A smooth weight on the ratio of the whole response, instead of a clip. With W the product of the
ratios of its tokens,

    phi(W) = W^k exp(lambda (1 - W))
    loss_t = -A_t sg[phi(W)] log p_t

The weight is 1 at W = 1, has its maximum at W = k / lambda and fades for larger W. k and lambda
depend on the sign of the advantage, so that the two sides may fade differently.

If the batch has the weights of an off-policy correction, W contains their product too: it is then
the ratio to the policy that sampled.

Shapes: B sequences, T response positions.
"""

import torch
from torch import Tensor

from quadriga.algorithms.masked import MAX_LOG_RATIO, diagnostics, log_ratios, zero_outside
from quadriga.algorithms.registry import register_policy_loss
from quadriga.errors import ConfigError


@register_policy_loss("vespo", needs_advantage=True)
def vespo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with a soft, constant weight per response.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        k_pos: power of the ratio for tokens with an advantage above 0; at least 0.
        lambda_pos: how fast the weight of tokens with an advantage above 0 decays; at least 0.
        k_neg: power of the ratio for the other tokens; at least 0.
        lambda_neg: how fast the weight of the other tokens decays; at least 0.
        rollout_is_weights: importance weights of off-policy correction, [B, T]. None: 1.

    Returns:
        The loss of each token, [B, T], and the diagnostics `vespo_weight` and `ppo_kl`.

    Raises:
        ConfigError: a power or a decay is below 0.
    """
    numbers = {"k_pos": k_pos, "lambda_pos": lambda_pos, "k_neg": k_neg, "lambda_neg": lambda_neg}
    for name, value in numbers.items():
        if not value >= 0:
            key = f"actor_rollout_ref.actor.policy_loss.{name}"
            raise ConfigError(key, got=str(value), expected="a number of at least 0")
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    advantages = zero_outside(advantages, response_mask)
    # log W: the log of a product of ratios is a sum of log-ratios.
    log_product = log_ratio.detach().sum(-1, keepdim=True)  # [B, 1]
    if rollout_is_weights is not None:
        # A weight may be 0, so its log is clamped, too.
        log_weights = rollout_is_weights.log().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_product = log_product + zero_outside(log_weights, response_mask).sum(-1, keepdim=True)
    log_product = log_product.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    is_positive = advantages > 0
    power = torch.full_like(advantages, k_neg).masked_fill(is_positive, k_pos)
    decay = torch.full_like(advantages, lambda_neg).masked_fill(is_positive, lambda_pos)
    # phi(W), computed as the exponential of its log.
    weight = (power * log_product + decay * (1 - log_product.exp())).exp()
    losses = -advantages * weight * zero_outside(log_prob, response_mask)
    return losses, diagnostics(log_ratio, vespo_weight=weight.expand(log_prob.shape))
