# SPDX-License-Identifier: Apache-2.0
"""Validation: respond to every held-out prompt with its own sampling options, and grade.

The metrics are computed exactly, without random draws. A prompt has n responses. For each data
source and variable (the reward, an accuracy, ...):

    mean@N         the mean of a prompt's responses, averaged over prompts
    std@N          their standard deviation (over n, not n - 1), averaged over prompts
    best@k/mean    expected maximum of k of the n responses, drawn without replacement, averaged
                   over prompts
    best@k/std     standard deviation of that maximum over the draws, averaged over prompts
    worst@k/...    the same for the minimum
    maj@k/...      the same for the score of the answer that is most frequent among the k

These are expectations over all draws, not averages over some of them. With x_1 <= ... <= x_n
sorted, the maximum is x_j in C(j-1, k-1) of C(n, k) draws. For the majority, draws are counted by
how often each distinct answer occurs in them. Answers that tie win equally often, the score of an
answer is the mean over the responses that gave it, and "no answer" (None) is an answer like any
other.

N is the largest number of responses that a prompt of the data source has; k is 2, 4, 8, ... and N.
If prompts have different numbers of responses, mean@N takes all prompts, std@N those with at least
2 responses, and k those with at least k.

Names are `val-core/<data source>/<variable>/<metric>` for mean@N, best@N/mean and maj@N/mean of the
core variable (`acc` if there is one, else `reward`), and `val-aux/...` for all others. At k = N
there is only one draw, so the standard deviation over draws is left out.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from quadriga.config import Config
from quadriga.observe.metrics import reduce_metrics
from quadriga.observe.timing import Tally
from quadriga.observe.watchdog import watched
from quadriga.protocol import DataProto
from quadriga.protocol.fields import RESERVED
from quadriga.rewards import RewardManager
from quadriga.trainer.prompts import assign_row_uids
from quadriga.trainer.responses import generate_responses, grade, sample_rows, write_samples
from quadriga.trainer.rollout_pool import RolloutPool
from quadriga.trainer.rollout_record import RolloutRecorder
from quadriga.workers import ActorRolloutRefWorker

CORE_VARIABLES = ("acc", "reward")
CORE_METRICS = ("mean@{}", "best@{}/mean", "maj@{}/mean")
_SHOWN = ("input", "output", "ground_truth", "score")
_NOT_MEASURED = (RESERVED - {"num_turns"}) | {
    *_SHOWN,
    *("uid", "data_source", "output_with_special_tokens", "reward_error", "pred"),
}


@dataclass
class Validator:
    """Runs a policy over the validation data.

    Args:
        config: the resolved configuration; `actor_rollout_ref.rollout.val_kwargs` has the sampling
            options.
        tokenizer: tokenizer of the policy.
        rollout: generates the responses.
        reward: grades the responses.
        dataloader: batches of prompts; None if there is nothing to validate.
        recorder: records the responses; None: they are not recorded.
    """

    config: Config
    tokenizer: Any
    rollout: ActorRolloutRefWorker | RolloutPool
    reward: RewardManager
    dataloader: Any
    recorder: RolloutRecorder | None = None

    def run(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Validate the policy of a step.

        Args:
            step: number of the step, under which the responses are recorded.

        Returns:
            Metrics, and sample rows for trackers to show; both are empty without validation data.
        """
        tally = nullcontext()
        dataset = getattr(self.dataloader, "dataset", None)
        # Without a known number of responses, each batch has a progress display of its own.
        if hasattr(dataset, "__len__"):
            num_samples = self.config.actor_rollout_ref.rollout.val_kwargs.n
            tally = Tally.opened(len(dataset) * num_samples)
        with tally:
            rows, error_counts = self.grade_all(step)
        if not rows:
            return {}, []
        metrics = means(sample_values(rows)) | error_counts
        return metrics, first_samples(rows, self.config.trainer.log_val_generations)

    def grade_all(self, step: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Respond to all prompts and grade the responses.

        If `trainer.validation_data_dir` is set, the rows are also written there.

        Returns:
            A row for each response with its grades; and a metric with the number of responses that
            could not be graded, if the reward manager counts them.
        """
        rows = []
        error_counts = {}
        sampling = self.config.actor_rollout_ref.rollout.val_kwargs
        dataset = getattr(self.dataloader, "dataset", None)
        num_prompts = 0

        for columns in watched(self.dataloader or (), "a batch of validation prompts"):
            # Seeds depend on the uids of rows, so responses do not depend on the batch size.
            prompts = assign_row_uids(DataProto.from_single_dict(columns), dataset, num_prompts)
            num_prompts += len(prompts)
            prompts.meta_info["global_steps"] = step
            prompts.meta_info["validate"] = True
            prompts.meta_info["do_sample"] = sampling.do_sample

            batch = generate_responses(self.rollout, self.config, prompts, sampling.n)
            reward_metrics = reduce_metrics(grade(self.reward, batch).metrics)
            rows += sample_rows(batch, self.tokenizer, self.config.data)
            if self.recorder is not None:
                self.recorder.add_validation(batch)
            # Only some reward managers count the responses that they could not grade.
            if "reward/errors" in reward_metrics:
                num_before = error_counts.get("val-aux/reward/errors", 0.0)
                num_errors = num_before + reward_metrics["reward/errors"]
                error_counts["val-aux/reward/errors"] = num_errors

        if self.recorder is not None:
            self.recorder.end_validation(step)
        if rows and self.config.trainer.validation_data_dir:
            write_samples(self.config.trainer.validation_data_dir, step, rows)
        return rows, error_counts


def first_samples(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first response to each of the first `count` prompts, reduced to the columns to show."""
    samples = {}
    for row in rows:
        if row["uid"] not in samples:
            samples[row["uid"]] = {name: row[name] for name in _SHOWN}
    return list(samples.values())[:count]


def sample_values(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Compute the `validation_values` of scores, and of all numbers that graders have added.

    Args:
        rows: graded responses with `data_source`, `uid` and `score`, and possibly the answer
            `pred`. Rows with the same `rollout_id` count once, with the means of their numbers.
    """
    rows = _merge_rollouts(rows)
    names = dict.fromkeys(name for row in rows for name in row if name not in _NOT_MEASURED)
    variables = {"reward": [row["score"] for row in rows]}
    for name in names:
        # A grader's number called "reward" does not replace the score.
        variables.setdefault(name, [row.get(name) for row in rows])
    predictions = None
    if any("pred" in row for row in rows):
        predictions = [_hashable(row.get("pred")) for row in rows]
    data_sources = [row["data_source"] for row in rows]
    uids = [row["uid"] for row in rows]
    return validation_values(data_sources, uids, variables, predictions)


def _merge_rollouts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rows of each rollout into one: the first row, with numbers averaged over all."""
    rows_of_rollout = defaultdict(list)
    for number, row in enumerate(rows):
        rows_of_rollout[row.get("rollout_id", number)].append(row)
    merged = []
    for members in rows_of_rollout.values():
        first = dict(members[0])
        # A name may be missing in the first row. A rollout of one row stays as it is.
        for name in dict.fromkeys(name for row in members[1:] for name in row):
            column = _numbers([row.get(name) for row in members])
            if column is not None and not np.isnan(column).all():
                first[name] = float(np.nanmean(column))
        merged.append(first)
    return merged


def _hashable(prediction: Any) -> Hashable:
    """A prediction, or its text if it cannot be a key, such as a list."""
    try:
        hash(prediction)
    except TypeError:
        return repr(prediction)
    return prediction


def means(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means of the values [prompts] of each metric."""
    return {name: float(values_of_prompts.mean()) for name, values_of_prompts in values.items()}


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of values [prompts], as a sample of many prompts.

    If all values are in [0, 1], it is Wilson's interval for an effective number of prompts: the
    number of values of 0 or 1 whose mean would have the same variance. Otherwise it is the mean plus
    and minus 1.96 standard errors.
    """
    mean = float(values.mean())
    num_prompts = len(values)
    variance_of_mean = 0.0
    if num_prompts > 1:
        variance_of_mean = float(values.var(ddof=1)) / num_prompts

    if values.min() < 0 or values.max() > 1:
        half = 1.96 * math.sqrt(variance_of_mean) if num_prompts > 1 else math.inf
        return mean - half, mean + half

    # The effective number of prompts, n: the mean of n values of 0 or 1 has the variance
    # mean * (1 - mean) / n.
    bernoulli_variance = mean * (1 - mean)
    n = num_prompts
    # Without a variance, such as that of a single prompt, the number of prompts is taken.
    if bernoulli_variance and variance_of_mean:
        n = bernoulli_variance / variance_of_mean
    # Wilson's interval: (mean + z²/2n ± z sqrt(mean (1 - mean) / n + z²/4n²)) / (1 + z²/n).
    z_squared_over_n = 1.96**2 / n
    middle = mean + 1.96**2 / (2 * n)
    half = 1.96 * math.sqrt(bernoulli_variance / n + z_squared_over_n / (4 * n))
    low = (middle - half) / (1 + z_squared_over_n)
    high = (middle + half) / (1 + z_squared_over_n)
    # Rounding may carry a limit out of the range.
    return max(0.0, low), min(1.0, high)


def validation_values(
    data_sources: Sequence[str],
    uids: Sequence[Hashable],
    variables: Mapping[str, Sequence[Any]],
    predictions: Sequence[Hashable | None] | None = None,
) -> dict[str, np.ndarray]:
    """Compute all validation metrics, as one value per prompt; a metric is the mean of its values.

    Args:
        data_sources: data source of each response.
        uids: uid of each response, equal for responses to the same prompt.
        variables: for each name, "reward" among them, the number of each response; None or NaN if
            a response has none. Variables with other values, such as texts, are left out.
        predictions: the final answer extracted from each response, compared by equality; None if
            there is none. Without predictions there is no maj@k.

    Returns:
        Values by the metric's full name, float64 [prompts]. Data sources are in order of
        appearance.
    """
    columns = {}
    for name, values in variables.items():
        column = _numbers(values)
        if column is not None:
            columns[name] = column

    rows_of_source = defaultdict(list)
    for row, source in enumerate(data_sources):
        rows_of_source[source].append(row)

    metrics = {}
    for source, rows in rows_of_source.items():
        # For each variable, the rows that have a number.
        measured_rows = {}
        for name, column in columns.items():
            rows_with_number = [row for row in rows if not np.isnan(column[row])]
            if rows_with_number:
                measured_rows[name] = rows_with_number
        # The first of `CORE_VARIABLES` that this data source has.
        core_variable = next((name for name in CORE_VARIABLES if name in measured_rows), None)
        for name, rows_with_number in measured_rows.items():
            values_by_metric, num_most = _variable_values(
                columns[name], rows_with_number, uids, predictions
            )
            core_metrics = []
            if name == core_variable:
                core_metrics = [form.format(num_most) for form in CORE_METRICS]
            for metric, values_of_prompts in values_by_metric.items():
                group = "val-core" if metric in core_metrics else "val-aux"
                metrics[f"{group}/{source}/{name}/{metric}"] = values_of_prompts
    return metrics


def _variable_values(
    column: np.ndarray,
    rows: Sequence[int],
    uids: Sequence[Hashable],
    predictions: Sequence[Hashable | None] | None,
) -> tuple[dict[str, np.ndarray], int]:
    """Metrics of one variable of one data source.

    Args:
        column: the variable's value for each response of all data sources; NaN if it has none.
        rows: row numbers of the data source's responses that have a value.
        uids, predictions: as for `validation_values`.

    Returns:
        The values [prompts] of each metric, and N.
    """
    rows_of_prompt = defaultdict(list)
    for row in rows:
        rows_of_prompt[uids[row]].append(row)
    prompts = list(rows_of_prompt.values())
    scores = [column[prompt] for prompt in prompts]
    values = score_values(scores)
    if predictions is not None and any(predictions[row] is not None for row in rows):
        answers = [[predictions[row] for row in prompt] for prompt in prompts]
        values |= majority_values(scores, answers)
    return values, max(map(len, prompts))


def score_values(scores: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Mean, std, best and worst of the scores of each prompt.

    Args:
        scores: one array of floats per prompt, of any length from 1.

    Returns:
        Values [prompts] of each metric, such as "best@4/mean".
    """
    num_most = max(map(len, scores))
    metrics = {f"mean@{num_most}": np.array([prompt.mean() for prompt in scores])}
    if num_most == 1:
        return metrics
    metrics[f"std@{num_most}"] = np.array([prompt.std() for prompt in scores if len(prompt) > 1])

    # Prompts with equally many responses share a block [prompts, responses], sorted by score.
    prompts_of_length = defaultdict(list)
    for prompt in scores:
        prompts_of_length[len(prompt)].append(prompt)
    blocks = [np.sort(np.stack(prompts), axis=1) for prompts in prompts_of_length.values()]
    for k in _draw_sizes(num_most):
        moments = {"best": [], "worst": []}
        for block in blocks:
            n = block.shape[1]
            if n < k:
                continue
            # [n]: the chance that the score at place j, which has j smaller ones, is the largest of k
            # drawn without replacement: the other k - 1 are drawn from these j. The smallest of k is
            # the same in reversed order.
            chances = np.array([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)])
            moments["best"].append(_moments(block, chances))
            moments["worst"].append(_moments(block[:, ::-1], chances))
        for kind, moments_of_blocks in moments.items():
            metrics |= _summary(f"{kind}@{k}", moments_of_blocks, is_only_draw=k == num_most)
    return metrics


def majority_values(
    scores: Sequence[np.ndarray], predictions: Sequence[Sequence[Hashable]]
) -> dict[str, np.ndarray]:
    """Score of the answer that is most frequent among k of a prompt's responses, for each k.

    Args:
        scores: one array of floats per prompt.
        predictions: the final answers to each prompt, as many as it has scores.

    Returns:
        Values [prompts] of each metric, such as "maj@4/mean"; empty if no prompt has 2 responses.
    """
    num_most = max(map(len, scores))
    moments = defaultdict(list)
    for scores_of_prompt, answers in zip(scores, predictions, strict=True):
        # Number the distinct answers, and compute the count and the mean score of each.
        numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
        answer_numbers = np.array([numbers[answer] for answer in answers])
        counts = np.bincount(answer_numbers)
        mean_scores = np.bincount(answer_numbers, weights=scores_of_prompt) / counts
        # In ascending order, prompts with the same counts share an entry of the cache.
        order = np.argsort(counts, kind="stable")
        chances = majority_chances(tuple(counts[order].tolist()))
        for k in _draw_sizes(num_most):
            if k <= len(scores_of_prompt):
                moments[k].append(_moments(mean_scores[order][None], chances[k]))
    metrics = {}
    for k, moments_of_prompts in moments.items():
        metrics |= _summary(f"maj@{k}", moments_of_prompts, is_only_draw=k == num_most)
    return metrics


@lru_cache(maxsize=4096)
def majority_chances(counts: tuple[int, ...]) -> np.ndarray:
    """The probability of each answer to be the most frequent among k drawn responses, for every k.

    A draw in which answer a occurs v times and wins consists of v of the counts[a] responses with
    a, and of s other responses, among which no answer occurs more than v times. If t answers occur
    v times as well, each of the 1 + t answers gets an equal part of the win. `ways[t, s]` is the
    number of choices of such s responses.

    Args:
        counts: how often each distinct answer was given, ascending; their sum is at most 1000, for
            float64 to hold the numbers of draws.

    Returns:
        [n + 1, len(counts)] for k = 0 to n; each row from k = 1 on sums to 1.
    """
    n = sum(counts)
    wins = np.zeros((n + 1, len(counts)))
    # Answers with the same count have the same chances.
    for count in set(counts):
        is_alike = np.array(counts) == count
        other_counts = list(counts)
        other_counts.remove(count)
        for v in range(1, count + 1):
            ways = _count_draws_of_others(other_counts, v, n)
            # [n + 1], by s: the number of draws that this answer wins; a draw with t ties counts as
            # 1 / (1 + t).
            num_winners = np.arange(1, len(ways) + 1)
            shares = (ways / num_winners[:, None]).sum(0)
            # The draw has k = v + s responses.
            wins[v:, is_alike] += (math.comb(count, v) * shares[: n + 1 - v])[:, None]
    num_draws = np.array([float(math.comb(n, k)) for k in range(n + 1)])
    return wins / num_draws[:, None]


def _count_draws_of_others(other_counts: Sequence[int], v: int, n: int) -> np.ndarray:
    """Count the choices of responses among which no answer occurs more than v times.

    Args:
        other_counts: number of responses with each answer.
        v: largest number of responses with the same answer in a choice.
        n: largest number of responses in a choice.

    Returns:
        [ties + 1, n + 1], float64: the number of choices, by the number of answers that occur
        exactly v times, and by the number of chosen responses.
    """
    # Answers with fewer than v responses cannot even tie, so their responses are one pool.
    num_below = sum(count for count in other_counts if count < v)
    ways = np.array([[float(math.comb(num_below, s)) for s in range(n + 1)]])
    for count in other_counts:
        if count < v:
            continue
        # Add another answer, of which `num_drawn` responses are chosen. It ties if that is v.
        extended_ways = np.zeros((len(ways) + 1, n + 1))
        for num_drawn in range(v + 1):
            choices = math.comb(count, num_drawn) * ways[:, : n + 1 - num_drawn]
            if num_drawn == v:
                extended_ways[1:, num_drawn:] += choices
            else:
                extended_ways[:-1, num_drawn:] += choices
        ways = extended_ways
    return ways


def _moments(values: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Mean and standard deviation, [2, prompts], of a draw from each row of values.

    Args:
        values: [prompts, n].
        chances: [n], probability of each column.
    """
    mean = values @ chances
    variance = np.square(values - mean[:, None]) @ chances
    return np.stack([mean, np.sqrt(variance)])


def _summary(
    name: str, moments: Sequence[np.ndarray], *, is_only_draw: bool
) -> dict[str, np.ndarray]:
    """Metrics `NAME/mean` and, unless there is only one draw, `NAME/std`.

    Args:
        name: first part of the metrics' names, such as "best@4".
        moments: results of `_moments`, [2, prompts] each.
        is_only_draw: whether k is the number of all responses, so that only one draw is possible.
    """
    mean, deviation = np.concatenate(moments, axis=1)
    metrics = {f"{name}/mean": mean}
    if not is_only_draw:
        metrics[f"{name}/std"] = deviation
    return metrics


def _draw_sizes(num_most: int) -> list[int]:
    """The values of k: powers of 2 below `num_most`, and `num_most`; none for a single response."""
    if num_most == 1:
        return []
    num_powers = (num_most - 1).bit_length()
    return [*(2**exponent for exponent in range(1, num_powers)), num_most]


def _numbers(values: Sequence[Any]) -> np.ndarray | None:
    """The values as float64, with NaN for None; None if any of them is not a number."""
    numbers = [math.nan if value is None else value for value in values]
    if not all(isinstance(value, bool | int | float | np.bool_ | np.number) for value in numbers):
        return None
    return np.array(numbers, dtype=np.float64)
