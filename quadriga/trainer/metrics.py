# SPDX-License-Identifier: Apache-2.0
"""The metrics of a step: rewards, lengths, advantages, speed, and how far rollout and trainer disagree.

Shapes: B sequences, P prompt positions, T response positions.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from quadriga.config import RolloutConfig
from quadriga.errors import RolloutError
from quadriga.observe.machine import resident_bytes
from quadriga.protocol import DataProto

# Their old place, from which users' files may import them.
from quadriga.trainer.asynchronous.staleness import measure_staleness as measure_staleness
from quadriga.trainer.asynchronous.staleness import token_versions as token_versions

logger = logging.getLogger(__name__)

_LIMITS = "actor_rollout_ref.rollout"
_CAUSES = (
    "The rollout samples from another distribution than is trained: compare dtypes and attention kernels of both, look "
    "at rollout/log_prob_diff_max and at how the difference grows from step to step"
)
_LARGEST_EXPONENT = 709.0
MOST_CUT = 0.9
PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases that are also told in milliseconds a token: of the responses for `gen`, of the whole batch for the others."""


def data_metrics(batch: DataProto) -> dict[str, float]:
    """Rewards, advantages, returns, values and lengths of a batch that an update has seen."""
    mask = batch.batch["response_mask"].bool()
    width = mask.shape[1]
    attention = batch.batch["attention_mask"].bool()
    lengths, prompt_lengths = (
        attention[:, -width:].sum(-1).float(),
        attention[:, :-width].sum(-1).float(),
    )
    # An aborted response is empty: its score is nobody's, unless all are.
    has_tokens = lengths > 0
    counted = has_tokens if has_tokens.any() else ~has_tokens
    metrics = spread("critic/score", batch.batch["token_level_scores"].sum(-1)[counted])
    metrics |= spread("critic/rewards", batch.batch["token_level_rewards"].sum(-1)[counted])
    for name in ("advantages", "returns", "values"):
        if name in batch.batch.keys() and bool(mask.any()):
            metrics |= spread(f"critic/{name}", batch.batch[name][mask])
    if "values" in batch.batch.keys():
        # Share of the returns' variance that the values account for: 1 is all of it, 0 no better than a constant.
        values, returns = batch.batch["values"][mask], batch.batch["returns"][mask]
        variance, error = returns.var(correction=0), (returns - values).var(correction=0)
        metrics["critic/vf_explained_var"] = float(1 - error / variance) if variance > 0 else 0.0
    if "num_turns" in batch.non_tensor_batch:
        metrics |= spread("num_turns", torch.tensor(batch.non_tensor_batch["num_turns"].tolist()))
    for name, numbers, limit in (
        ("response_length", lengths, width),
        ("response_length_non_aborted", lengths[has_tokens], width),
        ("prompt_length", prompt_lengths, attention.shape[1] - width),
    ):
        if len(numbers):
            metrics |= spread(name, numbers)
            metrics[f"{name}/clip_ratio"] = float((numbers == limit).float().mean())
    metrics["response/aborted_ratio"] = float((~has_tokens).float().mean())
    return metrics


def dead_signals(batch: DataProto) -> dict[str, str]:
    """What leaves a step nothing to learn from, by kind: alike or too large rewards, responses that were cut."""
    found, scores = {}, batch.batch["token_level_scores"].sum(-1).tolist()
    groups: dict[Any, set[float]] = defaultdict(set)
    for uid, score in zip(batch.non_tensor_batch["uid"], scores, strict=True):
        groups[uid].add(score)
    if len(groups) == len(scores):
        groups = {"": set(scores)}
    if len(scores) > 1 and all(len(group) == 1 for group in groups.values()):
        where = "all responses" if len(groups) == 1 else "all responses of every group"
        fix = "Read them with their scores: trainer.rollout_data_dir=DIR writes them."
        found["scores"] = (
            f"{where} scored alike (mean {sum(scores) / len(scores):g}): no reward to learn from. {fix}"
        )
    width = batch.batch["responses"].shape[1]
    share = float((batch.batch["attention_mask"][:, -width:].sum(-1) == width).float().mean())
    if share >= MOST_CUT:
        fix = "Raise it if the score depends on what comes last."
        found["length"] = (
            f"{share:.0%} of responses hit the limit, data.max_response_length={width}. {fix}"
        )
    largest = max(scores, key=abs, default=0.0)
    if largest**2 * len(scores) > torch.finfo(torch.float32).max:
        row = scores.index(largest)
        places = batch.non_tensor_batch.get("source_row")
        place = f"row {row} of the batch" if places is None else places[row]
        problem = "too large: float32 cannot hold its square, so advantages are 0 or not finite"
        found["size"] = f"the score {largest:g} of {place} is {problem}. Scale the rewards."
    return found


def lost_gradients(metrics: Mapping[str, float]) -> dict[str, str]:
    """Which models had a gradient that is not finite, and so did not learn; float16's loss scale looks for these."""
    found = {}
    for name, count in metrics.items():
        model, _, kind = name.partition("/")
        if kind == "nonfinite_steps" and count and f"{model}/loss_scale" not in metrics:
            fix = "Look for rewards or losses that are too large or NaN; later steps are counted in this metric alone."
            found[name] = f"{name}={count:g}: gradients that are not finite were dropped. {fix}"
    return found


def spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, max and min of some numbers."""
    values = values.float()
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in ("mean", "max", "min")}


def performance_metrics(
    batch: DataProto, seconds: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of each phase (`step` is their whole), milliseconds a token, tokens a second, and memory.

    `measured` has the metrics of the step so far: seconds of what overlapped, tokens that were generated, those of
    groups that were left out included, and whether the responses come from the rollout cache.
    """
    num_tokens = int(batch.batch["attention_mask"].sum())
    num_generated = measured.get("rollout/num_response_tokens", 0.0)
    num_of_responses = int(
        batch.batch["attention_mask"][:, -batch.batch["response_mask"].shape[1] :].sum()
    )
    metrics = {f"timing_s/{phase}": duration for phase, duration in seconds.items()}
    told = {**measured, **metrics}
    for phase in PER_TOKEN:
        if (duration := told.get(f"timing_s/{phase}")) is not None:
            divisor = num_of_responses if phase == "gen" else num_tokens
            metrics[f"timing_per_token_ms/{phase}"] = 1000 * duration / max(divisor, 1)
    metrics["perf/total_num_tokens"] = float(num_tokens)
    metrics["perf/time_per_step"] = seconds["step"]
    metrics["perf/throughput"] = num_tokens / seconds["step"]
    if seconds.get("gen") and num_generated and not measured.get("rollout/replayed"):
        metrics["perf/generated_tokens_per_s"] = num_generated / seconds["gen"]
    resident, peak = resident_bytes()
    metrics["perf/memory_resident_gib"], metrics["perf/memory_peak_gib"] = (
        resident / 2**30,
        peak / 2**30,
    )
    return metrics


def check_log_probs(
    metrics: Mapping[str, float], config: RolloutConfig, step: int
) -> dict[str, float]:
    """Judge how far the rollout's log-probabilities are from the trainer's; a step that did not measure it passes.

    The differences come from the pass that computes old log-probabilities; where that is left out, from the forward
    pass of the one update, which computes the same numbers at no cost. Returns `rollout/ppl_ratio`: perplexity of the
    responses under the trainer over that under the rollout; 1 where both agree. Raises RolloutError: the mean
    difference is above `log_prob_diff_stop`, or not a number."""
    mean, stop, warn = (
        metrics.get("rollout/log_prob_diff_mean"),
        config.log_prob_diff_stop,
        config.log_prob_diff_warn,
    )
    if mean is None:
        return {}
    most = metrics["rollout/log_prob_diff_max"]
    found = f"a mean difference of {mean:.3g} nats (at most {most:.3g}) from the trainer's"
    if math.isnan(mean) or (stop is not None and mean > stop):
        limit = "a number" if stop is None else f"at most {stop:g} ({_LIMITS}.log_prob_diff_stop)"
        raise RolloutError(
            f"rollout log-probabilities, step {step}: got {found}, expected {limit}",
            fix=f"{_CAUSES}.",
        )
    if mean > warn:
        text = (
            "step %d: the rollout's log-probabilities have %s, above %s.log_prob_diff_warn=%g. %s."
        )
        logger.warning(text, step, found, _LIMITS, warn, _CAUSES)
    # The mean of log(q / p) over tokens is the difference of the logarithms of the two perplexities.
    divergence = metrics["rollout/kl"]
    return {
        "rollout/ppl_ratio": math.exp(divergence) if divergence < _LARGEST_EXPONENT else math.inf
    }
