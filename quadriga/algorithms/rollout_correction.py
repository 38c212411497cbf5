# SPDX-License-Identifier: Apache-2.0
"""Off-policy correction: importance weights and rejection for samples of another policy than the one that trains.

The engine that generates computes with other kernels, and perhaps with older weights, than the one that trains. All
functions here read the log-ratio of a token, d = log p_train - log p_rollout. There are three policies:

    rollout    sampled the responses
    old        the update starts from it; the loss holds the policy to it
    current    is being trained

`correct_rollout` makes up for the difference between rollout and old, by weights old / rollout and by rejection, once
for the batch and before the advantages. What the update changes is the loss's own business (the decoupled objective,
arXiv:2110.00641). Without a pass for the old policy (`bypass_mode`) the loss takes the rollout as the old policy and
corrects by itself (`losses.bypass_mode`); what is left to do here is batch normalisation.

Importance weights:

    token       w_t = p_train(t) / p_rollout(t)                   biased, of little variance
    sequence    w   = the product over the response's tokens      unbiased, of much variance

One bound truncates: w = min(w, upper) (Espeholt et al., arXiv:1802.01561). Two bounds cut off: w = 0 outside
[lower, upper] (IcePop: Ling team, arXiv:2510.18855).

Rejection: tokens, or whole responses, at which the two policies are too far apart do not count. Each rule estimates
KL(rollout || train) from what was sampled (John Schulman, "Approximating KL Divergence",
joschu.net/blog/kl-approx.html):

    k1    -d                held between the logarithms of two ratios: log lower <= k1 <= log upper
    k2    d^2 / 2           at most upper
    k3    exp(d) - 1 - d    at most upper

    token       each token on its own          seq_sum, seq_mean    the sum or the mean over a response
    seq_max     the worst token of a response decides for all of it

`seq_mean_k1` bounds the geometric mean of a response's ratios, as GSPO does (arXiv:2507.18071).

Shapes: B sequences, T response positions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quadriga.algorithms.masked import MAX_LOG_RATIO, masked_mean, masked_sum

Level = Literal["token", "sequence"]
Bounds = tuple[float | None, float]


class Rejection(NamedTuple):
    """One rule. `lower` is read with k1 only; for k1 both are ratios."""

    level: str  # token, seq_sum, seq_mean or seq_max
    kind: str  # k1, k2 or k3
    lower: float
    upper: float

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest value of the statistic that are kept."""
        return (
            (math.log(self.lower), math.log(self.upper))
            if self.kind == "k1"
            else (-math.inf, self.upper)
        )


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - 1 - d,
}


def correct_rollout(
    columns: Mapping[str, Tensor], correction: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights and mask of a batch.
    Returns columns to set, [B, T] each: `rollout_is_weights` with `rollout_is`, which every loss is multiplied by, and
    `response_mask` where something is rejected; and metrics under `rollout_corr/`, of the batch before rejection. In
    bypass form: the weights of its losses' normalisation only, the same number everywhere.
    `columns`: of the whole batch: `old_log_probs`, `rollout_log_probs`, `response_mask`, [B, T] each.
    `correction`: the section `algorithm.rollout_correction`: its `bypass_mode`, `rollout_is`, `weight_bounds`,
    `rollout_is_batch_normalize` and `rejections` are read."""
    mask, rollout = columns["response_mask"], columns["rollout_log_probs"]
    log_ratio = columns["old_log_probs"] - rollout
    metrics = divergence_metrics(columns["old_log_probs"], rollout, mask)
    changed: dict[str, Tensor] = {}
    if correction.rollout_is is not None:
        level, bounds = correction.rollout_is, correction.weight_bounds
        weights = importance_weights(log_ratio, mask, level, bounds)
        metrics |= weight_metrics(log_ratio, mask, level, bounds)
        factor = torch.ones((), dtype=weights.dtype, device=weights.device)
        if correction.rollout_is_batch_normalize:
            factor = mean_weight(weights, mask, level)
            metrics["rollout_is_batch_norm_factor"] = float(factor)
        if correction.bypass_mode:
            weights = mask.to(weights.dtype)
        if not correction.bypass_mode or correction.rollout_is_batch_normalize:
            changed["rollout_is_weights"] = weights / factor
    if correction.rejections and not correction.bypass_mode:
        rules = [Rejection(*rule) for rule in correction.rejections]
        changed["response_mask"], rejected = keep_mask(log_ratio, mask, rules)
        metrics |= rejected
    return changed, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def importance_weights(
    log_ratio: Tensor, response_mask: Tensor, level: Level, bounds: Bounds = (None, math.inf)
) -> Tensor:
    """Importance weights of tokens, without gradient.
    Returns [B, T], 0 outside the mask.
    `log_ratio`, `response_mask`: [B, T].
    `level`: one weight for each token, or one for each response.
    `bounds`: None and the largest weight, which larger ones become; or two, outside which a weight becomes 0."""
    is_outside = ~response_mask.bool()
    log_weight = log_ratio.detach().masked_fill(is_outside, 0)
    if level == "sequence":
        log_weight = log_weight.sum(-1, keepdim=True).expand(log_ratio.shape)
    weights = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().masked_fill(is_outside, 0)
    lower, upper = bounds
    if lower is None:
        return weights.clamp(max=upper)
    return weights.masked_fill((weights < lower) | (weights > upper), 0)


def mean_weight(weights: Tensor, response_mask: Tensor, level: Level) -> Tensor:
    """The mean of the weights [B, T] of a batch, over tokens or over responses, []: batch normalisation divides by it.

    1 where all weights are 0: there is then nothing to scale.
    """
    mean = masked_mean(weights, response_mask)
    if level == "sequence":
        mean = masked_mean(
            masked_mean(weights, response_mask, dim=-1), response_mask.bool().any(-1)
        )
    return mean.where(mean > 0, 1.0)


def weight_metrics(
    log_ratio: Tensor, response_mask: Tensor, level: Level, bounds: Bounds
) -> dict[str, float]:
    """How the weights are spread.
    Returns of the weights within the bounds, `rollout_is_mean`, `rollout_is_std` and `rollout_is_eff_sample_size` (mean
    squared over mean of squares: 1 if all are alike); of those before the bounds, `rollout_is_max` and
    `rollout_is_min`, `rollout_is_ratio_fraction_high` and `_low` (above the upper bound; below the lower one, or 1 /
    upper where there is none) and, with two bounds, `rollout_is_oob_ratio`. The same of responses, whose weight is the
    mean of their tokens': `rollout_is_seq_mean _std _max _min _max_deviation _fraction_high _fraction_low`. Without a
    token: none.
    `log_ratio`, `response_mask`: [B, T].
    `level`, `bounds`: as for `importance_weights`."""
    mask = response_mask.bool()
    if not mask.any():
        return {}
    lower, upper = bounds
    floor = 1 / upper if lower is None else lower
    raw, weights = (
        importance_weights(log_ratio, mask, level),
        importance_weights(log_ratio, mask, level, bounds),
    )
    of_responses = masked_mean(raw, mask, dim=-1)[mask.any(-1)]
    # A weight of a whole response is counted once in extremes and fractions.
    counted = of_responses if level == "sequence" else raw[mask]
    used = weights[mask]
    values = {
        "mean": used.mean(),
        "std": used.std(correction=0),
        "eff_sample_size": used.mean().square()
        / used.square().mean().clamp(min=torch.finfo(used.dtype).tiny),
        "max": counted.max(),
        "min": counted.min(),
        "ratio_fraction_high": (counted > upper).float().mean(),
        "ratio_fraction_low": (counted < floor).float().mean(),
        "seq_max_deviation": (of_responses - 1).abs().max(),
    }
    if lower is not None:
        values["oob_ratio"] = ((raw < lower) | (raw > upper))[mask].float().mean()
    of_sequences = _statistics(
        "rollout_is_seq", of_responses, (floor, upper), of_responses.std(correction=0)
    )
    return {f"rollout_is_{name}": float(value) for name, value in values.items()} | of_sequences


def keep_mask(
    log_ratio: Tensor, response_mask: Tensor, rules: Sequence[Rejection]
) -> tuple[Tensor, dict[str, float]]:
    """The mask of what every rule keeps.

    Args:
        log_ratio, response_mask: [B, T].
        rules: a token must pass all of them.

    Returns:
        The mask, [B, T] of its own dtype, 0 on what is rejected; and as metrics the fractions of tokens and of
        responses that lost a token, `rollout_rs_masked_fraction` and `rollout_rs_seq_masked_fraction`, in all and for
        each rule (`rollout_rs_RULE_masked_fraction`, ...), with the rule's statistic over what it judges (tokens or
        responses): `rollout_rs_RULE_mean _std _max _min _fraction_high _fraction_low`; and over responses in any case
        (of a rule on tokens their mean): `rollout_rs_RULE_seq_mean _std _max _min _max_deviation _fraction_high
        _fraction_low`, the deviation from 0. Without a token: no metrics.
    """
    mask = response_mask.bool()
    difference = log_ratio.detach().masked_fill(~mask, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept, metrics = mask, {}
    for rule in rules:
        judged = _KINDS[rule.kind](difference)
        if rule.level in ("seq_sum", "seq_mean"):
            reduce = masked_sum if rule.level == "seq_sum" else masked_mean
            judged = reduce(judged, mask, dim=-1)[:, None].expand(mask.shape)
        low, high = rule.limits
        passes = ((judged >= low) & (judged <= high)) | ~mask
        if rule.level == "seq_max":
            passes = passes.all(-1, keepdim=True).expand(mask.shape)
        kept = kept & passes
        if mask.any():
            of_responses = judged.masked_fill(~mask, -math.inf).amax(-1)
            if rule.level == "token":
                of_responses = masked_mean(judged, mask, dim=-1)
            of_responses = of_responses[mask.any(-1)]
            values = of_responses if rule.level in ("seq_sum", "seq_mean") else judged[mask]
            prefix = f"rollout_rs_{rule.level}_{rule.kind}"
            metrics |= _statistics(prefix, values, rule.limits, values.std(correction=0))
            deviation = of_responses.std(correction=int(len(of_responses) > 1))
            metrics |= _statistics(f"{prefix}_seq", of_responses, rule.limits, deviation)
            metrics[f"{prefix}_seq_max_deviation"] = float(of_responses.abs().max())
            metrics |= _masked_fractions(prefix, passes & mask, mask)
    if rules and mask.any():
        metrics |= _masked_fractions("rollout_rs", kept, mask)
    return response_mask * kept, metrics


def _statistics(
    prefix: str, values: Tensor, limits: tuple[float, float], deviation: Tensor
) -> dict[str, float]:
    low, high = limits
    statistics = {
        "mean": values.mean(),
        "std": deviation,
        "max": values.max(),
        "min": values.min(),
        "fraction_high": (values > high).float().mean(),
        "fraction_low": (values < low).float().mean(),
    }
    return {f"{prefix}_{name}": float(value) for name, value in statistics.items()}


def _masked_fractions(prefix: str, kept: Tensor, mask: Tensor) -> dict[str, float]:
    is_lost = mask & ~kept
    return {
        f"{prefix}_masked_fraction": float(is_lost.sum() / mask.sum()),
        f"{prefix}_seq_masked_fraction": float(is_lost.any(-1).sum() / mask.any(-1).sum()),
    }


def divergence_metrics(
    log_prob: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """How far the policy that trains is from the one that sampled, before anything is corrected.
    Returns means over tokens: `kl` (KL(rollout || train), k1) and `k3_kl`; `chi2_token`, mean of exp(2 d), less 1.
    Means over responses, with a perplexity of exp(-mean log p): `training_ppl`, `rollout_ppl`, their logarithms
    `training_log_ppl` and `rollout_log_ppl`, `ppl_ratio` (training over rollout), `chi2_seq` (of products over
    responses); of a response's log training_ppl - log rollout_ppl the mean, mean size and extremes: `log_ppl_diff`,
    `log_ppl_abs_diff`, `log_ppl_diff_max`, `log_ppl_diff_min`. Without a token: none.
    `log_prob`: [B, T] of the trainer.
    `rollout_log_probs`: [B, T] of the rollout.
    `response_mask`: [B, T]."""
    mask = response_mask.bool()
    has_tokens = mask.any(-1)
    if not has_tokens.any():
        return {}
    ours = log_prob.detach().masked_fill(~mask, 0).double()
    theirs = rollout_log_probs.detach().masked_fill(~mask, 0).double()
    difference = (ours - theirs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    training, rollout = (-masked_mean(each, mask, dim=-1)[has_tokens] for each in (ours, theirs))
    gap = training - rollout
    of_response = masked_sum(difference, mask, dim=-1)[has_tokens].clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    values = {
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
        "chi2_seq": (2 * of_response).exp().mean() - 1,
    }
    return {name: float(value) for name, value in values.items()}
