# SPDX-License-Identifier: Apache-2.0
"""Sums, means, whitening, log-ratios over the tokens that count.

What stands under a zero of the mask is never read: it may be NaN, and no gradient reaches it.

Shapes: B sequences, T response positions; masks are 0/1 or bool, of the shape of the values.
"""

import torch
from torch import Tensor

# exp() of a log-ratio is cut here so that one outlying token gives a large number instead of infinity.
MAX_LOG_RATIO = 20.0


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of `values` [B, T] where `mask` is set, over everything, [], or along `dim`."""
    return _kept(values, mask).sum() if dim is None else _kept(values, mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of `values` [B, T] where `mask` is set, over everything, [], or along `dim`; 0 where nothing is set."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, epsilon: float = 1e-8
) -> Tensor:
    """Scale the values under the mask to variance 1 and, by default, to mean 0.
    Returns [B, T]. A single value, or values that are all alike, have no variance and become exactly 0 (or stay the
    mean).

    Args:
        values: [B, T].
        mask: [B, T]; positions outside it are 0 in the result.
        shift_mean: False keeps the mean where it was.
        epsilon: added to the variance (the unbiased one).
    """
    # Distances from the smallest value are exactly 0 when all values are alike; distances from a computed mean
    # would be rounding errors, blown up by the division.
    lowest = values.masked_fill(~mask.bool(), float("inf")).amin()
    distance = _kept(values - lowest, mask)
    mean = masked_mean(distance, mask)
    centered = _kept(distance - mean, mask)
    variance = centered.square().sum() / (mask.bool().sum() - 1).clamp(min=1)
    whitened = centered * (variance + epsilon).rsqrt()
    return whitened if shift_mean else _kept(whitened + mean + lowest, mask)


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """One value per sequence, [B], set on each of its tokens: [B, T], 0 outside the mask."""
    return _kept(values[:, None].expand(mask.shape), mask)


def log_ratios(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """log_prob - old_log_prob, cut to [-20, 20] and 0 outside the mask, where nothing is read: [B, T]."""
    difference = (log_prob - old_log_prob).masked_fill(~response_mask.bool(), 0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, response_mask: Tensor) -> Tensor:
    """The mean of `values` [B, T], 0 outside the mask, over each sequence's own tokens: [B, 1]; 0 where it has none."""
    return values.sum(-1, keepdim=True) / response_mask.bool().sum(-1, keepdim=True).clamp(min=1)


def diagnostics(log_ratio: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """Diagnostics of a policy loss, [B, T] each, without gradient: `ppo_kl` (k1 of the two policies) and `others`."""
    named = {"ppo_kl": -log_ratio, **others}
    return {name: value.detach().to(log_ratio.dtype) for name, value in named.items()}


def log_prob_mismatch(
    log_prob: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Differences between the log-probabilities of trainer and rollout, for the same tokens and the same weights.

    Both compute one distribution, with other kernels and in other batches: what is left between them is rounding. A
    larger difference says that the rollout sampled from something else: other weights, another temperature, a bug.
    Returns `log_prob_diff_mean`, `log_prob_diff_max`: absolute differences, in nats; `prob_diff_mean`: absolute
    difference of the probabilities; `kl`: divergence of the rollout from the trainer, in nats a token, estimated by the
    mean of log(q / p) over the tokens, with q the rollout's and p the trainer's probability; `kl_k3`: the same by the
    mean of p / q - 1 - log(p / q), which has less noise and is never negative (http://joschu.net/blog/kl-approx.html).
    All but the maximum are means over tokens, zero where the mask is empty.

    `log_prob`: [B, T] of the trainer.
    `rollout_log_probs`: [B, T] of the rollout.
    `response_mask`: [B, T]"""
    mask = response_mask.bool()
    ours, theirs = log_prob[mask].detach().float(), rollout_log_probs[mask].detach().float()
    if not ours.numel():
        ours = theirs = ours.new_zeros(1)
    log_ratio = ours - theirs
    distance = log_ratio.abs()
    numbers = {
        "log_prob_diff_mean": distance.mean(),
        "log_prob_diff_max": distance.max(),
        "prob_diff_mean": (ours.exp() - theirs.exp()).abs().mean(),
        "kl": -log_ratio.mean(),
        "kl_k3": (log_ratio.expm1() - log_ratio).mean(),
    }
    # From an accelerator at once.
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask.bool(), 0)
