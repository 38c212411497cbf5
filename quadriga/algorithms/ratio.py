# SPDX-License-Identifier: Apache-2.0
"""How much likelier a policy finds a token than the one that sampled it: what most policy losses begin with.

Shapes: B sequences, T response positions.
"""

from torch import Tensor

# exp() of a log-ratio is cut here so that one wild token gives a large number instead of infinity.
MAX_LOG_RATIO = 20.0


def log_ratios(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """log_prob - old_log_prob, cut to [-20, 20] and 0 outside the mask, where nothing is read: [B, T]."""
    outside = ~response_mask.bool()
    return (log_prob - old_log_prob).masked_fill(outside, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, response_mask: Tensor) -> Tensor:
    """The mean of `values` [B, T], 0 outside the mask, over each sequence's own tokens: [B, 1]; 0 where it has none."""
    return values.sum(-1, keepdim=True) / response_mask.bool().sum(-1, keepdim=True).clamp(min=1)


def diagnostics(log_ratio: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """What a loss says about each token, without gradient: `ppo_kl` (k1 between the two policies), and `others`."""
    named = {"ppo_kl": -log_ratio, **others}
    return {name: value.detach().to(log_ratio.dtype) for name, value in named.items()}
