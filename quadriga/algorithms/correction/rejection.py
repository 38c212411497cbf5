# SPDX-License-Identifier: Apache-2.0
"""Rejection: tokens, or whole answers, at which the two policies are too far apart do not count.

Each rule estimates KL(rollout || train) from what was sampled; d = log p_train - log p_rollout of a token:

    k1    -d                held between the logarithms of two ratios: log lower <= k1 <= log upper
    k2    d^2 / 2           at most upper
    k3    exp(d) - 1 - d    at most upper

    token       each token on its own          seq_sum, seq_mean    the sum or the mean over an answer
    seq_max     the worst token of an answer decides for all of it

From John Schulman, "Approximating KL Divergence" (2020), joschu.net/blog/kl-approx.html; the geometric mean of an
answer's ratios (`seq_mean_k1`) is that of GSPO, arXiv:2507.18071.

Shapes: B sequences, T response positions.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from quadriga.algorithms.masked import masked_mean, masked_sum
from quadriga.algorithms.ratio import MAX_LOG_RATIO


class Rejection(NamedTuple):
    """One rule. `lower` is read with k1 only; for k1 both are ratios."""

    level: str
    """token, seq_sum, seq_mean or seq_max."""
    kind: str
    """k1, k2 or k3."""
    lower: float
    upper: float

    @property
    def name(self) -> str:
        """As it is written in the configuration."""
        return f"{self.level}_{self.kind}"

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest value of the statistic that are kept."""
        return (math.log(self.lower), math.log(self.upper)) if self.kind == "k1" else (-math.inf, self.upper)


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - 1 - d,
}


def keep_mask(log_ratio: Tensor, response_mask: Tensor, rules: Sequence[Rejection]) -> tuple[Tensor, dict[str, float]]:
    """What every rule lets pass.

    Args:
        log_ratio, response_mask: [B, T].
        rules: all of them must be kept.

    Returns:
        The mask, [B, T] of its own dtype, 0 on what is rejected; and as metrics the shares of tokens and of answers
        that lost a token, `rollout_rs_masked_fraction` and `rollout_rs_seq_masked_fraction`, in all and for each rule
        (`rollout_rs_RULE_masked_fraction`, ...), with the rule's statistic over what it judges (tokens or answers):
        `rollout_rs_RULE_mean _std _max _min _fraction_high _fraction_low`. Without a token: no metrics.
    """
    mask = response_mask.bool()
    difference = log_ratio.detach().masked_fill(~mask, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept, metrics = mask, {}
    for rule in rules:
        judged = _statistic(rule, difference, mask)
        low, high = rule.limits
        passes = ((judged >= low) & (judged <= high)) | ~mask
        if rule.level == "seq_max":
            passes = passes.all(-1, keepdim=True).expand(mask.shape)
        kept = kept & passes
        metrics |= _metrics(rule, judged, passes, mask)
    if rules and mask.any():
        metrics |= _masked_fractions("rollout_rs", kept, mask)
    return response_mask * kept, metrics


def _statistic(rule: Rejection, difference: Tensor, mask: Tensor) -> Tensor:
    """[B, T]; that of an answer on each of its tokens."""
    per_token = _KINDS[rule.kind](difference)
    if rule.level == "seq_sum":
        return masked_sum(per_token, mask, dim=-1)[:, None].expand(mask.shape)
    if rule.level == "seq_mean":
        return masked_mean(per_token, mask, dim=-1)[:, None].expand(mask.shape)
    return per_token


def _metrics(rule: Rejection, judged: Tensor, passes: Tensor, mask: Tensor) -> dict[str, float]:
    if not mask.any():
        return {}
    low, high = rule.limits
    is_of_answers = rule.level in ("seq_sum", "seq_mean")
    values = judged[:, 0][mask.any(-1)] if is_of_answers else judged[mask]
    told = {
        "mean": values.mean(),
        "std": values.std(correction=0),
        "max": values.max(),
        "min": values.min(),
        "fraction_high": (values > high).float().mean(),
        "fraction_low": (values < low).float().mean(),
    }
    prefix = f"rollout_rs_{rule.name}"
    return {f"{prefix}_{name}": float(value) for name, value in told.items()} | _masked_fractions(
        prefix, passes & mask, mask
    )


def _masked_fractions(prefix: str, kept: Tensor, mask: Tensor) -> dict[str, float]:
    is_lost = mask & ~kept
    return {
        f"{prefix}_masked_fraction": float(is_lost.sum() / mask.sum()),
        f"{prefix}_seq_masked_fraction": float(is_lost.any(-1).sum() / mask.any(-1).sum()),
    }
