# SPDX-License-Identifier: Apache-2.0
"""Sums, means and whitening over the tokens that count.

What stands under a zero of the mask is never read: it may be NaN, and no gradient reaches it.

Shapes: B sequences, T response positions; masks are 0/1 or bool, of the shape of the values.
"""

from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of `values` where `mask` is set, over everything or along `dim`."""
    return _kept(values, mask).sum() if dim is None else _kept(values, mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of `values` where `mask` is set, over everything or along `dim`; 0 where nothing is set."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Scale the values under the mask to variance 1 and, unless told otherwise, to mean 0.

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


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask.bool(), 0)
