# SPDX-License-Identifier: Apache-2.0
"""LUSPO: length-unbiased sequence policy optimization. Liu et al., arXiv:2602.05261.

GSPO averages over the tokens of a response, so each token of a long response counts less, and
responses become shorter. LUSPO multiplies the loss of a response by its number of tokens |y|:

    loss = mean over responses of |y| max(-A s, -A clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high))

with GSPO's ratio s. As in GSPO the mean over responses is `loss_agg_mode=seq-mean-token-mean`.

Shapes: B sequences, T response positions.
"""

from torch import Tensor

from quadriga.algorithms.losses.gspo import gspo
from quadriga.algorithms.registry import register_policy_loss


@register_policy_loss("luspo", needs_advantage=True)
def luspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO's loss times the length of the response.

    Args:
        old_log_prob: log-probabilities under the policy that the update starts from, [B, T].
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].
        clip_ratio_low: the response's ratio is clipped below 1 - `clip_ratio_low`.
        clip_ratio_high: the response's ratio is clipped above 1 + `clip_ratio_high`.

    Returns:
        The loss of each token, [B, T], and the diagnostics `pg_clipfrac` and `ppo_kl`.
    """
    losses, gspo_diagnostics = gspo(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
    )
    num_tokens = response_mask.bool().sum(-1, keepdim=True)  # [B, 1]
    return losses * num_tokens, gspo_diagnostics
