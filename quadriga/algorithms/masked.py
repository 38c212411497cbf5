# SPDX-License-Identifier: Apache-2.0
"""Sums, means, whitening and log-ratios over the tokens that count.

What stands under a zero of the mask is never read: it may be NaN, and no gradient reaches it.

Shapes: B sequences, T response positions; masks are 0/1 or bool, of the shape of the values.
"""

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


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Scale the values under the mask to variance 1 and, by default, to mean 0.

    Args:
        values: [B, T].
        mask: [B, T]; positions outside it are 0 in the result.
        shift_mean: False keeps the mean where it was.
        epsilon: added to the variance (the unbiased one).

    Returns:
        [B, T]. A single value, or values that are all alike, have no variance and become exactly 0 (or stay the mean).
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


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask.bool(), 0)
