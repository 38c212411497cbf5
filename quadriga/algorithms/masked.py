# SPDX-License-Identifier: Apache-2.0
"""Sums, means, whitening and log-ratios over the tokens under a mask.

Values outside the mask have no effect: they may be NaN, and no gradient reaches them.

Shapes: B sequences, T response positions; masks are 0/1 or bool and have the shape of the values.
"""

import torch
from torch import Tensor

# Log-ratios are clamped to this before exp(), so that one outlier gives a large number, not inf.
MAX_LOG_RATIO = 20.0


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Replace the values outside the mask by 0, without passing a gradient to them.

    Args:
        values: any shape, usually [B, T].
        mask: 0/1 or bool, of a shape that broadcasts to that of `values`.

    Returns:
        A tensor of the shape of `values`.
    """
    return values.masked_fill(~mask.bool(), 0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the positions of the mask.

    Args:
        values: [B, T].
        mask: [B, T].
        dim: dimension to reduce; None reduces all of them.

    Returns:
        A scalar, or the sums along `dim`.
    """
    inside = zero_outside(values, mask)
    return inside.sum() if dim is None else inside.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the positions of the mask; 0 where the mask is empty.

    Args:
        values: [B, T].
        mask: [B, T].
        dim: dimension to reduce; None reduces all of them.

    Returns:
        A scalar, or the means along `dim`.
    """
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    weights: Tensor | None = None,
) -> Tensor:
    """Scale the values under the mask to variance 1 and, by default, shift them to mean 0.

    A single value, or values that are all equal, have no variance: they become exactly 0 (or
    exactly the mean, without `shift_mean`).

    Args:
        values: [B, T].
        mask: [B, T].
        shift_mean: False keeps the mean.
        epsilon: added to the unbiased variance.
        weights: how often each value counts, [B, T]. None: once.

    Returns:
        The whitened values, [B, T], 0 outside the mask.
    """
    # The mean is taken of distances from the smallest value, which are exactly 0 when all values
    # are equal. With the values themselves, rounding errors would remain and the division amplify
    # them.
    lowest = values.masked_fill(~mask.bool(), float("inf")).amin()
    distance = zero_outside(values - lowest, mask)
    if weights is None:
        mean = masked_mean(distance, mask)
        centered = zero_outside(distance - mean, mask)
        degrees_of_freedom = (mask.bool().sum() - 1).clamp(min=1)
        variance = centered.square().sum() / degrees_of_freedom
    else:
        weights = zero_outside(weights, mask)
        total = weights.sum().clamp(min=1)
        mean = (distance * weights).sum() / total
        centered = zero_outside(distance - mean, mask)
        variance = (centered.square() * weights).sum() / (total - 1).clamp(min=1)
    whitened = centered * (variance + epsilon).rsqrt()
    if shift_mean:
        return whitened
    return zero_outside(whitened + mean + lowest, mask)


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Copy the value of each sequence to all of its tokens.

    Args:
        values: one value per sequence, [B].
        mask: [B, T].

    Returns:
        One value per token, [B, T], 0 outside the mask.
    """
    return zero_outside(values[:, None].expand(mask.shape), mask)


def log_ratios(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Log-ratio of each token's probability under two policies, clamped to [-20, 20].

    Args:
        log_prob: log-probabilities under the policy in training, [B, T].
        old_log_prob: log-probabilities under the policy to compare with, [B, T].
        response_mask: [B, T].

    Returns:
        log_prob - old_log_prob, [B, T], 0 outside the mask.
    """
    difference = zero_outside(log_prob - old_log_prob, response_mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, response_mask: Tensor) -> Tensor:
    """Mean over the tokens of each sequence; 0 for a sequence without tokens.

    Args:
        values: [B, T]; must already be 0 outside the mask.
        response_mask: [B, T].

    Returns:
        The means, [B, 1].
    """
    num_tokens = response_mask.bool().sum(-1, keepdim=True)
    return values.sum(-1, keepdim=True) / num_tokens.clamp(min=1)


def diagnostics(log_ratio: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """Collect the diagnostics of a policy loss, without gradient.

    Args:
        log_ratio: log-ratio of the current policy to the old one, [B, T].
        **others: further diagnostics by name, [B, T] each; masks become 0 and 1.

    Returns:
        `ppo_kl` (the k1 estimate of KL(old || current)) and `others`, [B, T] each.
    """
    tensors = {"ppo_kl": -log_ratio, **others}
    return {name: tensor.detach().to(log_ratio.dtype) for name, tensor in tensors.items()}


def log_prob_mismatch(
    log_prob: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Differences between the log-probabilities of trainer and rollout for the same weights.

    Both compute the same distribution, with different kernels and in different batches, so they
    should differ only by rounding. A larger difference means that the rollout sampled from another
    distribution: with other weights, with another temperature, or because of a bug.

    Args:
        log_prob: log-probabilities of the sampled tokens by the trainer, [B, T].
        rollout_log_probs: log-probabilities of the same tokens by the rollout, [B, T].
        response_mask: [B, T].

    Returns:
        Means over the tokens except for the maximum; all are 0 if the mask is empty:
        `log_prob_diff_mean` and `log_prob_diff_max` (absolute differences, in nats),
        `prob_diff_mean` (absolute difference of the probabilities), and KL(rollout || trainer) in
        nats per token, estimated as `kl` (log(q / p), with q the rollout's probability and p the
        trainer's) and as `kl_k3` (p / q - 1 - log(p / q), which has less noise and is never
        negative; http://joschu.net/blog/kl-approx.html).
    """
    mask = response_mask.bool()
    trainer = log_prob[mask].detach().float()
    rollout = rollout_log_probs[mask].detach().float()
    if not trainer.numel():
        # An empty mask reports zeros: the mean of an empty tensor would be NaN.
        trainer = trainer.new_zeros(1)
        rollout = trainer

    log_ratio = trainer - rollout
    distance = log_ratio.abs()
    metrics = {
        "log_prob_diff_mean": distance.mean(),
        "log_prob_diff_max": distance.max(),
        "prob_diff_mean": (trainer.exp() - rollout.exp()).abs().mean(),
        "kl": -log_ratio.mean(),
        "kl_k3": (log_ratio.expm1() - log_ratio).mean(),
    }
    # One transfer from the accelerator for all metrics.
    numbers = torch.stack(list(metrics.values())).tolist()
    return dict(zip(metrics, numbers, strict=True))
