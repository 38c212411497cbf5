# SPDX-License-Identifier: Apache-2.0
"""How far the policy that trains is from the one that sampled, before anything is corrected.

Estimated from the sampled tokens; d = log p_train - log p_rollout, and an answer's perplexity is exp(-mean log p).

Shapes: B sequences, T response positions.
"""

from torch import Tensor

from quadriga.algorithms.masked import masked_mean, masked_sum
from quadriga.algorithms.ratio import MAX_LOG_RATIO


def divergence_metrics(log_prob: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Metrics of a batch; none where no token is under the mask.

    Args:
        log_prob: [B, T] of the trainer.
        rollout_log_probs: [B, T] of the rollout.
        response_mask: [B, T].

    Returns:
        Means over tokens: `kl` (KL(rollout || train), k1) and `k3_kl`; `chi2_token`, mean of exp(2 d), less 1.
        Means over answers: `training_ppl`, `rollout_ppl`, their logarithms `training_log_ppl` and `rollout_log_ppl`,
        `ppl_ratio` (training over rollout), `chi2_seq` (of products over answers); of log training_ppl - log
        rollout_ppl of an answer the mean, mean size and extremes: `log_ppl_diff`, `log_ppl_abs_diff`,
        `log_ppl_diff_max`, `log_ppl_diff_min`.
    """
    mask = response_mask.bool()
    has_tokens = mask.any(-1)
    if not has_tokens.any():
        return {}
    ours = log_prob.detach().masked_fill(~mask, 0).double()
    theirs = rollout_log_probs.detach().masked_fill(~mask, 0).double()
    difference = (ours - theirs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    training, rollout = (-masked_mean(each, mask, dim=-1)[has_tokens] for each in (ours, theirs))
    gap = training - rollout
    of_answer = masked_sum(difference, mask, dim=-1)[has_tokens].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    told = {
        "kl": masked_mean(-difference, mask),
        "k3_kl": masked_mean(difference.exp() - 1 - difference, mask),
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": rollout.exp().mean(),
        "rollout_log_ppl": rollout.mean(),
        "ppl_ratio": gap.exp().mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "chi2_token": masked_mean((2 * difference).exp(), mask) - 1,
        "chi2_seq": (2 * of_answer).exp().mean() - 1,
    }
    return {name: float(value) for name, value in told.items()}
