# SPDX-License-Identifier: Apache-2.0
"""Metrics and warnings of a step: rewards, lengths, advantages, speed, rollout-trainer mismatch.

Shapes: B sequences, P prompt positions, T response positions.
"""

import logging
import math
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from quadriga.config import RolloutConfig
from quadriga.config.multi_turn import MultiTurnConfig
from quadriga.config.trainer import TrainerConfig
from quadriga.errors import RolloutError
from quadriga.observe.machine import resident_bytes
from quadriga.observe.progress import TOOL_CALLS
from quadriga.protocol import DataProto

# Imported under their own names again because users' files may import them from here.
from quadriga.trainer.asynchronous.staleness import measure_staleness as measure_staleness
from quadriga.trainer.asynchronous.staleness import token_versions as token_versions
from quadriga.trainer.rollout_rows import scored_rows, scores_of_rows

logger = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"
_CAUSES = (
    "The rollout samples from another distribution than is trained: compare dtypes and attention "
    "kernels of both, look at rollout/log_prob_diff_max and at how the difference grows from step "
    "to step"
)
_LARGEST_EXPONENT = 709.0  # exp of more than this overflows a float64
EARLY_STOP = 1.0  # nats; with correctly loaded weights the difference is below 0.1
NUM_EARLY_STEPS = 2
MOST_CUT = 0.9  # a warning is logged if at least this share of responses is at the length limit
PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases that are also measured in milliseconds per token.

The time of `gen` is divided by the number of response tokens, that of the others by all tokens."""


def data_metrics(batch: DataProto) -> dict[str, float]:
    """Rewards, advantages, returns, values and lengths of a batch after its update."""
    tensors = batch.batch
    mask = tensors["response_mask"].bool()
    attention = tensors["attention_mask"].bool()
    response_width = mask.shape[1]
    prompt_width = attention.shape[1] - response_width
    prompt_lengths = attention[:, :prompt_width].sum(-1).float()
    response_lengths = attention[:, prompt_width:].sum(-1).float()

    # An aborted response is empty, so nothing is learned from its score. Scores of aborted
    # responses count only if there are no others.
    has_tokens = response_lengths > 0
    is_scored = scored_rows(batch).to(has_tokens.device)
    is_counted = has_tokens & is_scored
    if not is_counted.any():
        is_counted = is_scored
    metrics = spread("critic/score", tensors["token_level_scores"].sum(-1)[is_counted])
    metrics |= spread("critic/rewards", tensors["token_level_rewards"].sum(-1)[is_counted])
    for name in ("advantages", "returns", "values"):
        if name in tensors.keys() and bool(mask.any()):
            metrics |= spread(f"critic/{name}", tensors[name][mask])
    if "values" in tensors.keys():
        # 1 if the values predict the returns exactly, 0 if no better than a constant.
        returns = tensors["returns"][mask]
        variance = returns.var(correction=0)
        error = (returns - tensors["values"][mask]).var(correction=0)
        metrics["critic/vf_explained_var"] = float(1 - error / variance) if variance > 0 else 0.0
    if "num_turns" in batch.non_tensor_batch:
        metrics |= spread("num_turns", torch.tensor(batch.non_tensor_batch["num_turns"].tolist()))
    metrics |= _length_metrics("response_length", response_lengths, response_width)
    metrics |= _length_metrics(
        "response_length_non_aborted", response_lengths[has_tokens], response_width
    )
    metrics |= _length_metrics("prompt_length", prompt_lengths, prompt_width)
    metrics["response/aborted_ratio"] = float((~has_tokens).float().mean())
    return metrics


def _length_metrics(name: str, lengths: torch.Tensor, limit: int) -> dict[str, float]:
    """Mean, max and min of some lengths, and the share of them that is at the limit."""
    if not len(lengths):
        return {}
    clip_ratio = float((lengths == limit).float().mean())
    return {**spread(name, lengths), f"{name}/clip_ratio": clip_ratio}


def dead_signals(batch: DataProto, trainer: TrainerConfig) -> dict[str, str]:
    """Warn about a batch from which little can be learned.

    Args:
        batch: graded responses.
        trainer: the section that says where responses are written.

    Returns:
        Warnings by kind: `scores`, which are equal in every group; `length`, at the limit in most
        responses; `size` of a score, too large for float32.
    """
    warnings = {}
    columns = batch.non_tensor_batch
    scores = scores_of_rows(batch)
    # Rows without a score are neither learned from nor part of a group.
    known_scores = [score for score in scores if score is not None]
    num_groups = _count_equal_groups(batch, scores)
    if num_groups:
        advice = "trainer.rollout_record=all records them."
        if trainer.rollout_data_dir is not None:
            advice = f"they are in {trainer.rollout_data_dir}."
        elif trainer.rollout_record != "off":
            advice = f"quadriga show {shlex.quote(str(trainer.directory))}"
        where = "all responses" if num_groups == 1 else "all responses of every group"
        warnings["scores"] = (
            f"{where} scored alike (mean {sum(known_scores) / len(known_scores):g}): no reward to "
            f"learn from. Read them with their scores: {advice}"
        )

    width = batch.batch["responses"].shape[1]
    lengths = batch.batch["attention_mask"][:, -width:].sum(-1)
    share_cut = float((lengths == width).float().mean())
    if share_cut >= MOST_CUT:
        warnings["length"] = (
            f"{share_cut:.0%} of responses hit the limit, data.max_response_length={width}. "
            "Raise it if the score depends on what comes last."
        )

    # Computing the variance of the batch adds up the squares of its scores.
    largest = max(known_scores, key=abs, default=0.0)
    if largest**2 * len(known_scores) > torch.finfo(torch.float32).max:
        row = scores.index(largest)
        # File and row of each prompt, if the data come from files.
        places = columns.get("source_row")
        place = f"row {row} of the batch" if places is None else places[row]
        warnings["size"] = (
            f"the score {largest:g} of {place} is too large: float32 cannot hold its square, "
            "so advantages are 0 or not finite. Scale the rewards."
        )
    return warnings


def _count_equal_groups(batch: DataProto, scores: Sequence[float | None]) -> int:
    """Count the groups of a batch if the scores are equal within each of them.

    Args:
        batch: graded responses.
        scores: [B], None for a row without a score.

    Returns:
        The number of groups with scores; 0 if a group has different scores, or if the batch has
        fewer than two scores.
    """
    columns = batch.non_tensor_batch
    scores_of_group = defaultdict(set)
    num_scores = 0
    for uid, score in zip(columns["uid"], scores, strict=True):
        if score is not None:
            scores_of_group[uid].add(score)
            num_scores += 1
    groups = list(scores_of_group.values())
    # With one rollout per prompt, all rows of the batch form one group.
    rollout_ids = columns.get("rollout_id", range(len(scores)))
    if len(set(columns["uid"])) == len(set(rollout_ids)):
        groups = [set().union(*groups)]
    is_equal = num_scores > 1 and all(len(group) == 1 for group in groups)
    return len(groups) if is_equal else 0


def lost_gradients(metrics: Mapping[str, float]) -> dict[str, str]:
    """Warn about models whose update was skipped because a gradient was not finite.

    With float16 this is normal, because the search for its loss scale causes such gradients.

    Args:
        metrics: metrics of the step.

    Returns:
        Warnings by the name of the metric.
    """
    warnings = {}
    for name, count in metrics.items():
        model, _, kind = name.partition("/")
        if kind == "nonfinite_steps" and count and f"{model}/loss_scale" not in metrics:
            warnings[name] = (
                f"{name}={count:g}: updates were skipped because a gradient was not finite. Look for "
                "rewards or losses that are too large or NaN. This warning is not repeated; the metric "
                "counts on."
            )
    return warnings


def unused_tools(metrics: Mapping[str, float], turns: MultiTurnConfig) -> dict[str, str]:
    """Warn about a step with tools in which no response called one.

    Args:
        metrics: metrics of the step.
        turns: the section `rollout.multi_turn`.

    Returns:
        The warning by the name of its metric; empty if there is none.
    """
    name = TOOL_CALLS
    has_tools = turns.enable and (turns.function_tool_path or turns.tool_config_path)
    if not has_tools or metrics.get(name) != 0:
        return {}
    text = (
        f"{name}=0: no response of this step called a tool. Look at the responses: the chat "
        f"template may not write the tools, multi_turn.format={turns.format} may not be how the "
        "model writes calls, or the model was not taught to call tools."
    )
    return {name: text}


def spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, max and min of some values, as metrics whose names begin with `name`."""
    values = values.float()
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in ("mean", "max", "min")}


def performance_metrics(
    batch: DataProto, seconds: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of each phase, milliseconds per token, tokens per second, and memory.

    Args:
        batch: all rows of the step.
        seconds: seconds of each phase of the driver; `step` is the whole step.
        measured: metrics of the step so far. They have the seconds of overlapping phases, the
            number of generated tokens (including those of groups that were filtered out), and
            whether the responses come from the rollout cache.
    """
    attention = batch.batch["attention_mask"]
    num_tokens = int(attention.sum())
    num_response_tokens = int(attention[:, -batch.batch["response_mask"].shape[1] :].sum())

    metrics = {f"timing_s/{phase}": duration for phase, duration in seconds.items()}
    # Phases that overlapped were measured by the workers.
    all_metrics = {**measured, **metrics}
    for phase in PER_TOKEN:
        duration = all_metrics.get(f"timing_s/{phase}")
        if duration is not None:
            divisor = num_response_tokens if phase == "gen" else num_tokens
            metrics[f"timing_per_token_ms/{phase}"] = 1000 * duration / max(divisor, 1)

    metrics["perf/total_num_tokens"] = float(num_tokens)
    metrics["perf/time_per_step"] = seconds["step"]
    metrics["perf/throughput"] = num_tokens / seconds["step"]
    # Responses from the rollout cache were not generated in this step.
    num_generated = measured.get("rollout/num_response_tokens", 0.0)
    if seconds.get("gen") and num_generated and not measured.get("rollout/replayed"):
        metrics["perf/generated_tokens_per_s"] = num_generated / seconds["gen"]
    resident, peak = resident_bytes()
    metrics["perf/memory_resident_gib"] = resident / 2**30
    metrics["perf/memory_peak_gib"] = peak / 2**30
    return metrics


def check_log_probs(
    metrics: Mapping[str, float], config: RolloutConfig, step: int, num_steps: int
) -> dict[str, float]:
    """Check how much the rollout's log-probabilities differ from the trainer's; compute a metric.

    The difference was measured by the pass for old log-probabilities or, without one, by the
    forward pass of the only update, which computes the same numbers at no cost. If it is above
    `log_prob_diff_warn`, a warning is logged.

    Args:
        metrics: metrics of the step; if the difference is not among them, nothing is checked.
        config: limits of the difference.
        step: number of the step, for messages.
        num_steps: number of steps that this process has taken, this one included.

    Returns:
        `rollout/ppl_ratio`: perplexity of the responses under the trainer over that under the
        rollout; 1 if both agree.

    Raises:
        RolloutError: the mean difference is NaN or above `log_prob_diff_stop`. If that is null,
            the limit is 1 nat in the first two steps of this process with vLLM or SGLang, and
            there is none later or with other engines.
    """
    mean = metrics.get("rollout/log_prob_diff_mean")
    if mean is None:
        return {}
    largest = metrics["rollout/log_prob_diff_max"]
    got = f"a mean difference of {mean:.3g} nats (at most {largest:.3g}) from the trainer's"

    stop = config.log_prob_diff_stop
    if stop is None and num_steps <= NUM_EARLY_STEPS and config.traits.package is not None:
        # An external engine rearranges the weights for its kernels. Fingerprints compare only what
        # it received; its log-probabilities show whether it computes the same model. The second
        # step is the first one after weights were replaced during training.
        stop = EARLY_STOP

    if math.isnan(mean) or (stop is not None and mean > stop):
        expected = "a number"
        if stop is not None:
            expected = f"at most {stop:g} ({_ROLLOUT}.log_prob_diff_stop)"
        raise RolloutError(
            f"rollout log-probabilities, step {step}",
            got=got,
            expected=expected,
            fix=f"{_CAUSES}.",
        )
    if mean > config.log_prob_diff_warn:
        logger.warning(
            "step %d: the rollout's log-probabilities have %s, above %s.log_prob_diff_warn=%g. %s.",
            step,
            got,
            _ROLLOUT,
            config.log_prob_diff_warn,
            _CAUSES,
        )
    # The mean of log(q / p) over tokens is the difference between the log-perplexities.
    divergence = metrics["rollout/kl"]
    ratio = math.exp(divergence) if divergence < _LARGEST_EXPONENT else math.inf
    return {"rollout/ppl_ratio": ratio}
