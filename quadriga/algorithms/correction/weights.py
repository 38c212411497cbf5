# SPDX-License-Identifier: Apache-2.0
"""Importance weights: what an answer of another policy counts.

    token       w_t = p_train(t) / p_rollout(t)                  biased, of little variance
    sequence    w   = the product over the answer's tokens       unbiased, of much variance

One bound truncates: w = min(w, upper) (Espeholt et al., arXiv:1802.01561). Two bounds cut off: w = 0 outside
[lower, upper] (IcePop: Ling team, arXiv:2510.18855).

Shapes: B sequences, T response positions.
"""

from typing import Literal

import torch
from torch import Tensor

from quadriga.algorithms.masked import masked_mean
from quadriga.algorithms.ratio import MAX_LOG_RATIO

Level = Literal["token", "sequence"]
Bounds = tuple[float | None, float]


def raw_weights(log_ratio: Tensor, response_mask: Tensor, level: Level) -> Tensor:
    """Weights before any bound, [B, T], 0 outside the mask."""
    is_outside = ~response_mask.bool()
    log_weight = log_ratio.masked_fill(is_outside, 0)
    if level == "sequence":
        log_weight = log_weight.sum(-1, keepdim=True).expand(log_ratio.shape)
    return log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().masked_fill(is_outside, 0)


def importance_weights(log_ratio: Tensor, response_mask: Tensor, level: Level, bounds: Bounds) -> Tensor:
    """What each token counts, without gradient.

    Args:
        log_ratio, response_mask: [B, T].
        level: one weight for each token, or one for each answer.
        bounds: None and the largest weight, which larger ones become; or two, outside which a weight becomes 0.

    Returns:
        [B, T], 0 outside the mask.
    """
    weights = raw_weights(log_ratio.detach(), response_mask, level)
    lower, upper = bounds
    if lower is None:
        return weights.clamp(max=upper)
    return weights.masked_fill((weights < lower) | (weights > upper), 0)


def mean_weight(weights: Tensor, response_mask: Tensor, level: Level) -> Tensor:
    """The mean of the weights of a batch, over tokens or over answers: what batch normalisation divides by.

    1 where all weights are 0: there is then nothing to scale.
    """
    of_answers = masked_mean(weights, response_mask, dim=-1)
    mean = masked_mean(weights, response_mask)
    if level == "sequence":
        mean = masked_mean(of_answers, response_mask.bool().any(-1))
    return mean.where(mean > 0, 1.0)


def weight_metrics(log_ratio: Tensor, response_mask: Tensor, level: Level, bounds: Bounds) -> dict[str, float]:
    """How the weights are spread.

    Args:
        log_ratio, response_mask, level, bounds: as for `importance_weights`.

    Returns:
        Of the weights that count, `rollout_is_mean`, `rollout_is_std` and `rollout_is_eff_sample_size` (mean squared
        over mean of squares: 1 if all are alike); of those before the bounds, `rollout_is_max` and `rollout_is_min`,
        `rollout_is_ratio_fraction_high` and `_low` (above the upper bound; below the lower one, or 1 / upper where
        there is none) and, with two bounds, `rollout_is_oob_ratio`. The same of answers, whose weight is the mean of
        their tokens': `rollout_is_seq_mean _std _max _min _max_deviation _fraction_high _fraction_low`. Without a
        token: none.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    lower, upper = bounds
    floor = 1 / upper if lower is None else lower
    raw, weights = raw_weights(log_ratio, mask, level), importance_weights(log_ratio, mask, level, bounds)
    has_tokens = mask.any(-1)
    of_answers = masked_mean(raw, mask, dim=-1)[has_tokens]
    # Weights of whole answers are counted once for each answer where extremes and shares are told.
    counted = of_answers if level == "sequence" else raw[mask]
    used = weights[mask]
    told = {
        "mean": used.mean(),
        "std": used.std(correction=0),
        "eff_sample_size": used.mean().square() / used.square().mean().clamp(min=torch.finfo(used.dtype).tiny),
        "max": counted.max(),
        "min": counted.min(),
        "ratio_fraction_high": (counted > upper).float().mean(),
        "ratio_fraction_low": (counted < floor).float().mean(),
        "seq_mean": of_answers.mean(),
        "seq_std": of_answers.std(correction=0),
        "seq_max": of_answers.max(),
        "seq_min": of_answers.min(),
        "seq_max_deviation": (of_answers - 1).abs().max(),
        "seq_fraction_high": (of_answers > upper).float().mean(),
        "seq_fraction_low": (of_answers < floor).float().mean(),
    }
    if lower is not None:
        told["oob_ratio"] = ((raw < lower) | (raw > upper))[mask].float().mean()
    return {f"rollout_is_{name}": float(value) for name, value in told.items()}
