# SPDX-License-Identifier: Apache-2.0
"""KL-Cov: a penalty on the tokens that would make the policy surest of itself. Cui et al., arXiv:2505.22617.

Policy gradient with a ratio and without a clip; on the tokens of the largest covariance (`covariance.covariance_top`)
the distance from the policy that the update starts from is added:

    loss_t = -A_t r_t                           and on those tokens           + ppo_kl_coef |log r_t|

Shapes: [B, T] with B sequences and T response positions, or any other, element by element.
"""

from torch import Tensor

from quadriga.algorithms.ratio import diagnostics, log_ratios
from quadriga.algorithms.registry import register_policy_loss


@register_policy_loss("kl_cov")
def kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    covariance_top: Tensor,
    *,
    ppo_kl_coef: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token.

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T]; gradient through `log_prob` alone.
        covariance_top: [B, T], 1 on the tokens that are held back.
        ppo_kl_coef: weight of the penalty, per nat.

    Returns:
        losses [B, T], 0 outside the mask; diagnostics per token: `ppo_kl`, `ppo_kl_abs`, `covariance_topfrac`.
    """
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    gain = advantages.masked_fill(~response_mask.bool(), 0)
    is_held_back = covariance_top.bool() & response_mask.bool()
    losses = -gain * log_ratio.exp() + ppo_kl_coef * log_ratio.abs() * is_held_back
    return losses, diagnostics(log_ratio, ppo_kl_abs=log_ratio.abs(), covariance_topfrac=is_held_back)
