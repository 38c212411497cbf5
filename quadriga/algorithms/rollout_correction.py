# SPDX-License-Identifier: Apache-2.0
"""Off-policy correction: importance weights and rejection for samples of another policy.

The generation engine uses other kernels, and perhaps older weights, than the policy in training.
All functions here read the log-ratio of a token, d = log p_train - log p_rollout. There are three
policies:

    rollout    has sampled the responses
    old        the policy before the update, to which the loss keeps the current one close
    current    the policy in training

`correct_rollout` corrects the difference between rollout and old by weights old / rollout and by
rejection, once per batch and before the advantages. Changes during the update are left to the loss
(the decoupled objective, arXiv:2110.00641). Without a pass for the old policy (`bypass_mode`), the
loss takes the rollout as the old policy and corrects by itself (`losses.bypass_mode`); only batch
normalisation is then done here.

Importance weights:

    token       w_t = p_train(t) / p_rollout(t)                 biased, low variance
    sequence    w   = product over the tokens of the response   unbiased, high variance

One bound truncates: w = min(w, upper) (Espeholt et al., arXiv:1802.01561). Two bounds mask: w = 0
outside [lower, upper] (IcePop: Ling team, arXiv:2510.18855).

Rejection masks tokens, or whole responses, at which the two policies are too far apart. Each rule
estimates KL(rollout || train) from the sampled tokens (John Schulman, "Approximating KL
Divergence", joschu.net/blog/kl-approx.html):

    k1    -d                bounded by the logarithms of two ratios: log lower <= k1 <= log upper
    k2    d^2 / 2           at most upper
    k3    exp(d) - 1 - d    at most upper

at one of these levels:

    token                   each token separately
    seq_sum, seq_mean       the sum or the mean over a response
    seq_max                 a response is rejected for its worst token

`seq_mean` with k1 bounds the geometric mean of a response's ratios, as GSPO does
(arXiv:2507.18071).

Shapes: B sequences, T response positions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import MAX_LOG_RATIO, masked_mean, masked_sum, zero_outside

Level = Literal["token", "sequence"]
Bounds = tuple[float | None, float]  # lower and upper bound; no lower bound: weights are truncated
Metrics = dict[str, float]


class Rejection(NamedTuple):
    """A rejection rule.

    For k1, `lower` and `upper` bound the ratio of the two policies. Other kinds use `upper` alone,
    which bounds the divergence.
    """

    level: str  # token, seq_sum, seq_mean or seq_max
    kind: str  # estimate of the divergence: k1, k2 or k3
    lower: float
    upper: float

    @property
    def limits(self) -> tuple[float, float]:
        """Smallest and largest value of the statistic that pass the rule."""
        if self.kind == "k1":
            return math.log(self.lower), math.log(self.upper)
        return -math.inf, self.upper


def correct_rollout(
    columns: Mapping[str, Tensor], correction: Any
) -> tuple[dict[str, Tensor], Metrics]:
    """Compute the importance weights and the mask of a batch.

    Args:
        columns: `old_log_probs`, `rollout_log_probs` and `response_mask` of the whole batch,
            [B, T] each. If rollouts have several rows, also `rollout_index`, the number of each
            row's rollout, [B]: a rule on responses rejects rollouts as a whole.
        correction: section `algorithm.rollout_correction`; its `bypass_mode`, `rollout_is`,
            `weight_bounds`, `rollout_is_batch_normalize` and `rejections` are read.

    Returns:
        Columns to set, [B, T] each, and metrics under `rollout_corr/`. The columns are
        `rollout_is_weights`, by which every loss is multiplied, if `rollout_is` is set; and
        `response_mask` without the rejected tokens, if there are rejections. In bypass mode the
        loss computes weights and rejection. There is then at most one column: with batch
        normalisation, `rollout_is_weights` with the same factor on every token.
    """
    mask = columns["response_mask"]
    old_log_probs = columns["old_log_probs"]
    rollout_log_probs = columns["rollout_log_probs"]
    log_ratio = old_log_probs - rollout_log_probs  # [B, T]
    # Before weights and rejection, because metrics describe the batch as it was sampled.
    metrics = divergence_metrics(old_log_probs, rollout_log_probs, mask)
    corrected = {}

    if correction.rollout_is is not None:
        level = correction.rollout_is
        bounds = correction.weight_bounds
        weights = importance_weights(log_ratio, mask, level, bounds)  # [B, T]
        metrics |= weight_metrics(log_ratio, mask, level, bounds)
        if not correction.bypass_mode:
            corrected["rollout_is_weights"] = weights
        if correction.rollout_is_batch_normalize:
            # Batch normalisation keeps the mean weight at 1, so that the step size does not change.
            factor = mean_weight(weights, mask, level)
            metrics["rollout_is_batch_norm_factor"] = float(factor)
            if correction.bypass_mode:
                # The loss computes the weights itself. Only the factor is left to apply.
                weights = mask.to(weights.dtype)
            corrected["rollout_is_weights"] = weights / factor

    if correction.rejections and not correction.bypass_mode:
        rules = [Rejection(*rule) for rule in correction.rejections]
        corrected["response_mask"], rejection_metrics = keep_mask(
            log_ratio, mask, rules, columns.get("rollout_index")
        )
        metrics |= rejection_metrics
    return corrected, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def importance_weights(
    log_ratio: Tensor, response_mask: Tensor, level: Level, bounds: Bounds = (None, math.inf)
) -> Tensor:
    """Importance weights of the tokens, without gradient.

    Args:
        log_ratio: log p_train - log p_rollout, [B, T].
        response_mask: [B, T].
        level: whether each token or each response has a weight.
        bounds: (None, upper) truncates weights to `upper`; (lower, upper) sets weights outside the
            bounds to 0.

    Returns:
        The weights, [B, T], 0 outside the mask.
    """
    log_weight = zero_outside(log_ratio.detach(), response_mask)
    if level == "sequence":
        # The weight of a response is the product of its tokens' ratios, the same for all tokens.
        log_weight = log_weight.sum(-1, keepdim=True).expand(log_ratio.shape)
    weights = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = zero_outside(weights, response_mask)
    lower, upper = bounds
    if lower is None:
        # Truncated weights are biased, but bound the variance.
        return weights.clamp(max=upper)
    is_out_of_bounds = (weights < lower) | (weights > upper)
    return weights.masked_fill(is_out_of_bounds, 0)


def mean_weight(weights: Tensor, response_mask: Tensor, level: Level) -> Tensor:
    """Mean weight of a batch, by which batch normalisation divides.

    Args:
        weights: importance weights, [B, T].
        response_mask: [B, T].
        level: whether to average over tokens or over responses.

    Returns:
        The mean, []; 1 if all weights are 0, since there is nothing to scale then.
    """
    if level == "sequence":
        # All tokens of a response share its weight: averaging over tokens would favour long ones.
        has_tokens = response_mask.bool().any(-1)
        mean_per_response = masked_mean(weights, response_mask, dim=-1)  # [B]
        mean = masked_mean(mean_per_response, has_tokens)
    else:
        mean = masked_mean(weights, response_mask)
    return mean.where(mean > 0, 1.0)


def weight_metrics(
    log_ratio: Tensor, response_mask: Tensor, level: Level, bounds: Bounds
) -> Metrics:
    """Distribution of the importance weights.

    Args:
        log_ratio: log p_train - log p_rollout, [B, T].
        response_mask: [B, T].
        level: as for `importance_weights`.
        bounds: as for `importance_weights`.

    Returns:
        No metrics if the mask is empty. Otherwise

        - of the weights that the loss uses, after the bounds are applied: `rollout_is_mean`,
          `rollout_is_std` and `rollout_is_eff_sample_size` (squared mean over mean of squares: 1 if
          all are equal);
        - of the weights before that: `rollout_is_max`, `rollout_is_min`,
          `rollout_is_ratio_fraction_high` (fraction above the upper bound),
          `rollout_is_ratio_fraction_low` (below the lower bound, or below 1 / upper without one),
          and with two bounds `rollout_is_oob_ratio` (fraction of tokens out of bounds);
        - of the responses, each with the mean weight of its tokens before the bounds:
          `rollout_is_seq_mean _std _max _min _max_deviation _fraction_high _fraction_low`.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    lower, upper = bounds
    # Without a lower bound, count weights as low that are as far from 1 as `upper` on a log scale.
    floor = 1 / upper if lower is None else lower
    unbounded_weights = importance_weights(log_ratio, mask, level)  # [B, T]
    used_weights = importance_weights(log_ratio, mask, level, bounds)[mask]
    # One mean for each response that has tokens.
    mean_per_response = masked_mean(unbounded_weights, mask, dim=-1)[mask.any(-1)]
    # A weight of a whole response counts once in extremes and fractions, not once per token.
    samples = mean_per_response if level == "sequence" else unbounded_weights[mask]

    mean = used_weights.mean()
    mean_square = used_weights.square().mean()
    # The clamp below only matters if all weights are 0.
    tiny = torch.finfo(used_weights.dtype).tiny
    values = {
        "mean": mean,
        "std": used_weights.std(correction=0),
        "eff_sample_size": mean.square() / mean_square.clamp(min=tiny),
        "max": samples.max(),
        "min": samples.min(),
        "ratio_fraction_high": (samples > upper).float().mean(),
        "ratio_fraction_low": (samples < floor).float().mean(),
        "seq_max_deviation": (mean_per_response - 1).abs().max(),
    }
    if lower is not None:
        is_out_of_bounds = (unbounded_weights < lower) | (unbounded_weights > upper)
        values["oob_ratio"] = is_out_of_bounds[mask].float().mean()
    metrics = {f"rollout_is_{name}": float(value) for name, value in values.items()}
    deviation = mean_per_response.std(correction=0)
    return metrics | _statistics("rollout_is_seq", mean_per_response, (floor, upper), deviation)


def keep_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rules: Sequence[Rejection],
    rollout_index: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute the mask of the tokens that pass every rejection rule.

    Args:
        log_ratio: log p_train - log p_rollout, [B, T].
        response_mask: [B, T].
        rules: rules that a token must pass.
        rollout_index: number of each row's rollout, [B]. If a rule rejects a response, the other
            rows of its rollout are rejected, too. None: every row is a rollout.

    Returns:
        The mask, [B, T] in the dtype of `response_mask`, 0 on rejected tokens; and metrics, none
        if the mask was empty. For all rules together

        - `rollout_rs_masked_fraction` is the fraction of tokens that were rejected;
        - `rollout_rs_seq_masked_fraction` is the fraction of responses that lost a token.

        For each rule, with LEVEL_KIND in the place of RULE,

        - `rollout_rs_RULE_masked_fraction` and `rollout_rs_RULE_seq_masked_fraction` are the same
          fractions for this rule alone;
        - `rollout_rs_RULE_mean _std _max _min _fraction_high _fraction_low` is the distribution of
          the rule's statistic over the tokens or responses that it judges;
        - `rollout_rs_RULE_seq_mean _std _max _min _max_deviation _fraction_high _fraction_low` is
          the distribution over responses. For a rule on tokens, a response has the mean of its
          tokens; `_max_deviation` is the largest absolute value.
    """
    mask = response_mask.bool()
    has_tokens = mask.any()
    difference = zero_outside(log_ratio.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Every rule judges the original mask, so the order of the rules does not matter.
    passes_all = mask
    metrics = {}
    for rule in rules:
        statistic = _statistic(rule, difference, mask)
        low, high = rule.limits
        # [B, T] at every level. A sum or a mean has the same value on all tokens of a response.
        is_within_limits = (statistic >= low) & (statistic <= high)
        # Positions outside the mask must not reject their response.
        passes = is_within_limits | ~mask
        if rule.level == "seq_max":
            # One token that fails rejects the response.
            passes = passes.all(-1, keepdim=True).expand(mask.shape)
        if rollout_index is not None and rule.level != "token":
            # A rollout passes if all of its rows do: if the smallest of 0 and 1 is 1.
            rollouts = Groups.of(rollout_index, mask)
            rollout_passes = rollouts.smallest(passes.all(-1).float()).bool()  # [B]
            passes = rollout_passes[:, None].expand(mask.shape)
        passes_all = passes_all & passes
        if has_tokens:
            metrics |= _rule_metrics(rule, statistic, passes, mask)
    if rules and has_tokens:
        metrics |= _masked_fractions("rollout_rs", passes_all, mask)
    return response_mask * passes_all, metrics


def _statistic(rule: Rejection, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Estimated divergence by which a rule judges each token, [B, T].

    Args:
        rule: the rule. For `seq_sum` and `seq_mean`, all tokens of a response have the same value.
        log_ratio: log p_train - log p_rollout, [B, T], 0 outside the mask.
        mask: [B, T] bool.
    """
    if rule.kind == "k1":
        divergence = -log_ratio
    elif rule.kind == "k2":
        divergence = log_ratio.square() / 2
    else:  # k3
        divergence = log_ratio.exp() - 1 - log_ratio
    if rule.level == "seq_sum":
        return masked_sum(divergence, mask, dim=-1)[:, None].expand(mask.shape)
    if rule.level == "seq_mean":
        return masked_mean(divergence, mask, dim=-1)[:, None].expand(mask.shape)
    # `token` and `seq_max` judge each token. For `seq_max`, the caller combines them by response.
    return divergence


def _rule_metrics(rule: Rejection, statistic: Tensor, passes: Tensor, mask: Tensor) -> Metrics:
    """Metrics of a single rule; see `keep_mask`.

    Args:
        rule: the rule.
        statistic: value by which the rule judges each token, [B, T].
        passes: whether each token passes the rule, [B, T].
        mask: the response mask, [B, T] bool; not empty.
    """
    if rule.level == "token":
        per_response = masked_mean(statistic, mask, dim=-1)
    else:
        # With `seq_max` the worst token decides. A sum or a mean is equal on all tokens, so the
        # largest value is that value.
        per_response = statistic.masked_fill(~mask, -math.inf).amax(-1)
    per_response = per_response[mask.any(-1)]
    # A statistic of a whole response counts once, not once per token.
    judges_responses = rule.level in ("seq_sum", "seq_mean")
    values = per_response if judges_responses else statistic[mask]

    prefix = f"rollout_rs_{rule.level}_{rule.kind}"
    metrics = _statistics(prefix, values, rule.limits, values.std(correction=0))
    # The unbiased deviation of a single response would be NaN.
    deviation = per_response.std(correction=int(len(per_response) > 1))
    metrics |= _statistics(f"{prefix}_seq", per_response, rule.limits, deviation)
    metrics[f"{prefix}_seq_max_deviation"] = float(per_response.abs().max())
    return metrics | _masked_fractions(prefix, passes, mask)


def _statistics(
    prefix: str, values: Tensor, limits: tuple[float, float], deviation: Tensor
) -> Metrics:
    """Metrics of the distribution of a statistic.

    Args:
        prefix: beginning of the metrics' names.
        values: values of the statistic, [N].
        limits: lower and upper limit; metrics are the fractions of values beyond each.
        deviation: standard deviation of the values, biased or unbiased as the caller chose.
    """
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


def _masked_fractions(prefix: str, passes: Tensor, mask: Tensor) -> Metrics:
    """Fraction of the tokens that were rejected, and of the responses that lost a token.

    Args:
        prefix: beginning of the metrics' names.
        passes: whether each token passes, [B, T].
        mask: the response mask, [B, T] bool; not empty.
    """
    is_rejected = mask & ~passes
    lost_a_token = is_rejected.any(-1)
    has_tokens = mask.any(-1)
    return {
        f"{prefix}_masked_fraction": float(is_rejected.sum() / mask.sum()),
        f"{prefix}_seq_masked_fraction": float(lost_a_token.sum() / has_tokens.sum()),
    }


def divergence_metrics(
    log_prob: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> Metrics:
    """Divergence of the policy in training from the policy that sampled, before any correction.

    Args:
        log_prob: log-probabilities by the trainer, [B, T].
        rollout_log_probs: log-probabilities by the rollout, [B, T].
        response_mask: [B, T].

    Returns:
        No metrics if the mask is empty. Otherwise

        - means over tokens: `kl` and `k3_kl` (k1 and k3 estimates of KL(rollout || train)), and
          `chi2_token` (mean of exp(2 d), minus 1);
        - means over responses, whose perplexity is exp(-mean log p): `training_ppl`, `rollout_ppl`,
          their logarithms `training_log_ppl` and `rollout_log_ppl`, `ppl_ratio` (training over
          rollout), and `chi2_seq` (like `chi2_token`, with d summed over a response);
        - of log training_ppl - log rollout_ppl of each response, the mean, the mean absolute value
          and the extremes: `log_ppl_diff`, `log_ppl_abs_diff`, `log_ppl_diff_max`,
          `log_ppl_diff_min`.
    """
    mask = response_mask.bool()
    has_tokens = mask.any(-1)
    if not has_tokens.any():
        return {}
    # In double precision: perplexities and chi^2 take the exponential of sums over a response.
    trainer = zero_outside(log_prob.detach(), mask).double()
    rollout = zero_outside(rollout_log_probs.detach(), mask).double()
    difference = (trainer - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    # One value for each response with tokens. The log of its perplexity is its negative mean log p.
    training_log_ppl = -masked_mean(trainer, mask, dim=-1)[has_tokens]
    rollout_log_ppl = -masked_mean(rollout, mask, dim=-1)[has_tokens]
    log_ppl_diff = training_log_ppl - rollout_log_ppl
    sequence_log_ratio = masked_sum(difference, mask, dim=-1)[has_tokens]
    # A sum over a long response may overflow exp(), although each token is clamped.
    sequence_log_ratio = sequence_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = {
        "kl": masked_mean(-difference, mask),
        "k3_kl": masked_mean(difference.exp() - 1 - difference, mask),
        "training_ppl": training_log_ppl.exp().mean(),
        "training_log_ppl": training_log_ppl.mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "ppl_ratio": log_ppl_diff.exp().mean(),
        "log_ppl_diff": log_ppl_diff.mean(),
        "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "log_ppl_diff_max": log_ppl_diff.max(),
        "log_ppl_diff_min": log_ppl_diff.min(),
        "chi2_token": masked_mean((2 * difference).exp(), mask) - 1,
        "chi2_seq": (2 * sequence_log_ratio).exp().mean() - 1,
    }
    return {name: float(value) for name, value in values.items()}
