# SPDX-License-Identifier: Apache-2.0
"""How far the rollout's log-probabilities are from the trainer's, for the same tokens and the same weights.

Both compute one distribution, with other kernels and in other batches. What is left between them is rounding; a
larger difference says that the rollout sampled from something else: other weights, another temperature, a bug.

Shapes: B sequences, T response positions.
"""

from torch import Tensor


def log_prob_mismatch(log_prob: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Differences under the mask.

    Args:
        log_prob: [B, T] of the trainer.
        rollout_log_probs: [B, T] of the rollout.
        response_mask: [B, T]

    Returns:
        `log_prob_diff_mean`, `log_prob_diff_max`: absolute differences, in nats;
        `prob_diff_mean`: absolute difference of the probabilities;
        `kl`: divergence of the rollout from the trainer, in nats a token, estimated by the mean of log(q / p) over the
        tokens, with q the rollout's and p the trainer's probability; `kl_k3`: the same by the mean of
        p / q - 1 - log(p / q), which has less noise and is never negative (http://joschu.net/blog/kl-approx.html).
        All but the maximum are means over tokens, zero where the mask is empty.
    """
    mask = response_mask.bool()
    ours, theirs = log_prob[mask].detach().float(), rollout_log_probs[mask].detach().float()
    if not ours.numel():
        ours = theirs = ours.new_zeros(1)
    log_ratio = ours - theirs
    distance = log_ratio.abs()
    return {
        "log_prob_diff_mean": float(distance.mean()),
        "log_prob_diff_max": float(distance.max()),
        "prob_diff_mean": float((ours.exp() - theirs.exp()).abs().mean()),
        "kl": float(-log_ratio.mean()),
        "kl_k3": float((log_ratio.expm1() - log_ratio).mean()),
    }
