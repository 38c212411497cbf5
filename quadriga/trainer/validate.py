# SPDX-License-Identifier: Apache-2.0
"""Validation: respond to every held-out prompt with the validation's own sampling, grade, and count.

The metrics are exact, quick, and without a random draw. A prompt has n responses. Per data source and per variable (the
reward, an accuracy, ...):

    mean@N         the mean of a prompt's responses, averaged over prompts
    std@N          their standard deviation (over n, not n - 1), averaged over prompts
    best@k/mean    expected maximum of k of the n responses, drawn without replacement, averaged over prompts
    best@k/std     standard deviation of that maximum over the draws, averaged over prompts
    worst@k/...    the same of the minimum
    maj@k/...      the same of the score of the answer given most often among the k

These are expectations over all draws, not averages over some of them. With x_1 <= ... <= x_n sorted, the maximum is x_j
in C(j-1, k-1) of C(n, k) draws. For the majority the draws are counted by how often each distinct answer occurs in
them; answers that tie win equally often, an answer's score is the mean of the responses that gave it, and "no answer"
(None) is an answer like any other.

N is the largest number of responses that a prompt of the data source has; k is 2, 4, 8, ... and N. Where prompts have
different numbers of responses, mean@N takes all of them, std@N those with at least 2, and k those with at least k.

Names are `val-core/<data source>/<variable>/<metric>` for mean@N, best@N/mean and maj@N/mean of the variable that
matters (`acc` where there is one, else `reward`), and `val-aux/...` for all others. The standard deviation is left out
at k = N, where only one draw exists.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from quadriga.config import Config
from quadriga.observe.metrics import reduce_metrics
from quadriga.observe.watchdog import watched
from quadriga.protocol import DataProto
from quadriga.protocol.fields import RESERVED
from quadriga.rewards import RewardManager
from quadriga.trainer.prompts import assign_row_uids
from quadriga.trainer.responses import generate_responses, grade, sample_rows, write_samples
from quadriga.trainer.rollout_pool import RolloutPool
from quadriga.workers import ActorRolloutRefWorker

CORE_VARIABLES = ("acc", "reward")
CORE_METRICS = ("mean@{}", "best@{}/mean", "maj@{}/mean")
_SHOWN = (
    "uid",
    "data_source",
    "input",
    "output",
    "output_with_special_tokens",
    "ground_truth",
    "score",
)
_NOT_MEASURED = (RESERVED - {"num_turns"}) | {*_SHOWN, "reward_error", "pred"}


class Validator:
    """Runs a policy over the validation data.

    `config.actor_rollout_ref.rollout.val_kwargs` has the sampling; without a `dataloader` there is nothing to validate.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        rollout: ActorRolloutRefWorker | RolloutPool,
        reward: RewardManager,
        dataloader: Any,
    ) -> None:
        self.config, self.tokenizer, self.rollout = config, tokenizer, rollout
        self.reward, self.dataloader = reward, dataloader

    def run(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics, and the rows that trackers show; both empty where there is nothing to validate."""
        rows, errors = self.graded(step)
        if not rows:
            return {}, []
        return means(sample_values(rows)) | errors, first_samples(
            rows, self.config.trainer.log_val_generations
        )

    def graded(self, step: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """All responses as rows with their grades, and the share that could not be graded, where a manager says so.
        They go to `trainer.validation_data_dir` where one is set."""
        rows: list[dict[str, Any]] = []
        errors: dict[str, float] = {}
        sampling = self.config.actor_rollout_ref.rollout.val_kwargs
        dataset = getattr(self.dataloader, "dataset", None)
        num_prompts = 0
        for columns in watched(self.dataloader or (), "a batch of validation prompts"):
            prompts = assign_row_uids(DataProto.from_single_dict(columns), dataset, num_prompts)
            num_prompts += len(prompts)
            prompts.meta_info |= {
                "global_steps": step,
                "validate": True,
                "do_sample": sampling.do_sample,
            }
            batch = generate_responses(self.rollout, self.config, prompts, sampling.n)
            reward = grade(self.reward, batch)
            rows += sample_rows(batch, self.tokenizer, self.config.data.reward_fn_key)
            told, name = reduce_metrics(reward.metrics), "val-aux/reward/errors"
            if "reward/errors" in told:
                errors[name] = errors.get(name, 0.0) + told["reward/errors"]
        if rows and self.config.trainer.validation_data_dir:
            write_samples(self.config.trainer.validation_data_dir, step, rows)
        return rows, errors


def first_samples(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """What trackers show: the first response to each of the first prompts."""
    shown: dict[str, dict[str, Any]] = {}
    for row in rows:
        shown.setdefault(
            row["uid"], {name: row[name] for name in ("input", "output", "ground_truth", "score")}
        )
    return list(shown.values())[:count]


def sample_values(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """`validation_values` of the score of each row, and of what graders add; columns without numbers are left out.

    `rows` have `data_source`, `uid` and `score`, and perhaps `pred`.
    """
    names = dict.fromkeys(name for row in rows for name in row if name not in _NOT_MEASURED)
    return validation_values(
        [row["data_source"] for row in rows],
        [row["uid"] for row in rows],
        {
            "reward": [row["score"] for row in rows],
            **{name: [row.get(name) for row in rows] for name in names},
        },
        [_comparable(row.get("pred")) for row in rows]
        if any("pred" in row for row in rows)
        else None,
    )


def _comparable(prediction: Any) -> Hashable:
    """What is counted as equal answers: graders may return lists, whose elements count."""
    try:
        hash(prediction)
    except TypeError:
        return repr(prediction)
    return prediction


def means(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics by name, of the values [prompts] that they are means of."""
    return {name: float(one.mean()) for name, one in values.items()}


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % confidence interval of a mean of values [prompts], the prompts being drawn from many.

    Wilson's interval where all values lie in [0, 1], for as many prompts of right or wrong as give the mean's
    variance; else 1.96 standard errors to both sides.
    """
    mean, num_prompts = float(values.mean()), len(values)
    variance = float(values.var(ddof=1)) / num_prompts if num_prompts > 1 else 0.0
    if values.min() < 0 or values.max() > 1:
        half = 1.96 * math.sqrt(variance) if num_prompts > 1 else math.inf
        return mean - half, mean + half
    spread = mean * (1 - mean)
    n = spread / variance if spread and variance else num_prompts
    middle, square = mean + 1.96**2 / (2 * n), 1.96**2 / n
    half = 1.96 * math.sqrt(spread / n + square / (4 * n))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def validation_values(
    data_sources: Sequence[str],
    uids: Sequence[Hashable],
    variables: Mapping[str, Sequence[Any]],
    predictions: Sequence[Hashable | None] | None = None,
) -> dict[str, np.ndarray]:
    """All validation metrics by full name, each as the values of the prompts that it is the mean of.
    Returns name -> float64 [prompts], per data source in order of appearance.
    `uids`: of each response, equal for responses to the same prompt.
    `variables`: numbers of each response by name, "reward" among them; None or NaN where a response has none. Those
    that hold anything else, such as texts, are not measured.
    `predictions`: the final answer extracted from each response, compared by equality; None where there is none.
    Without any, there is no maj@k."""
    numbers = {
        name: column
        for name, values in variables.items()
        if (column := _numbers(values)) is not None
    }
    rows_of_source = defaultdict(list)
    for row, source in enumerate(data_sources):
        rows_of_source[source].append(row)
    metrics: dict[str, np.ndarray] = {}
    for source, rows in rows_of_source.items():
        measured = {
            name: [row for row in rows if not np.isnan(column[row])]
            for name, column in numbers.items()
        }
        core = next((name for name in CORE_VARIABLES if measured.get(name)), None)
        for name, present in measured.items():
            if present:
                found, num_most = _variable_metrics(numbers[name], present, uids, predictions)
                core_metrics = (
                    [form.format(num_most) for form in CORE_METRICS] if name == core else []
                )
                for metric, value in found.items():
                    metrics[
                        f"{'val-core' if metric in core_metrics else 'val-aux'}/{source}/{name}/{metric}"
                    ] = value
    return metrics


def _variable_metrics(
    numbers: np.ndarray,
    rows: Sequence[int],
    uids: Sequence[Hashable],
    predictions: Sequence[Hashable | None] | None,
) -> tuple[dict[str, np.ndarray], int]:
    """One variable of one data source, whose responses are `rows`: metric -> values, and N."""
    prompts: dict[Hashable, list[int]] = defaultdict(list)
    for row in rows:
        prompts[uids[row]].append(row)
    scores = [numbers[prompt] for prompt in prompts.values()]
    metrics = score_values(scores)
    if predictions is not None and any(predictions[row] is not None for row in rows):
        metrics |= majority_values(
            scores, [[predictions[row] for row in prompt] for prompt in prompts.values()]
        )
    return metrics, max(len(prompt) for prompt in scores)


def score_values(scores: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """mean, std, best and worst of the scores of each prompt: metric, such as "best@4/mean" -> [prompts].

    `scores` has one array of floats per prompt, of any length from 1.
    """
    num_most = max(len(prompt) for prompt in scores)
    metrics = {f"mean@{num_most}": np.array([prompt.mean() for prompt in scores])}
    if num_most == 1:
        return metrics
    metrics[f"std@{num_most}"] = np.array([prompt.std() for prompt in scores if len(prompt) > 1])
    by_length = defaultdict(list)
    for prompt in scores:
        by_length[len(prompt)].append(prompt)
    # The prompts with equally many responses together: [prompts, responses] each.
    blocks = [np.sort(np.stack(prompts), axis=1) for prompts in by_length.values()]
    for k in _draw_sizes(num_most):
        large = [block for block in blocks if block.shape[1] >= k]
        for kind, order in (("best", 1), ("worst", -1)):
            moments = []
            for block in large:
                n = block.shape[1]
                # [n]: the chance that the j-th smallest of n is the largest of k drawn without replacement.
                weights = np.array([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)])
                moments.append(_moments(block[:, ::order], weights))
            metrics |= _summary(
                f"{kind}@{k}", np.concatenate(moments, axis=1), is_only_draw=k == num_most
            )
    return metrics


def majority_values(
    scores: Sequence[np.ndarray], predictions: Sequence[Sequence[Hashable]]
) -> dict[str, np.ndarray]:
    """maj@k of each k: the score of the answer given most often among k of a prompt's responses.

    `predictions`: the final answers, of the same lengths.
    Returns metric, such as "maj@4/mean" -> [prompts]; nothing if no prompt has 2 responses.
    """
    num_most = max(len(prompt) for prompt in scores)
    moments: dict[int, list[np.ndarray]] = defaultdict(list)
    for prompt, answers in zip(scores, predictions, strict=True):
        numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
        member = np.array([numbers[answer] for answer in answers])
        counts = np.bincount(member)
        order = np.argsort(counts, kind="stable")
        answer_scores = (np.bincount(member, weights=prompt) / counts)[order]
        chances = majority_chances(tuple(counts[order].tolist()))
        for k in _draw_sizes(num_most):
            if k <= len(prompt):
                moments[k].append(_moments(answer_scores[None], chances[k]))
    metrics: dict[str, np.ndarray] = {}
    for k, found in moments.items():
        metrics |= _summary(f"maj@{k}", np.concatenate(found, axis=1), is_only_draw=k == num_most)
    return metrics


@lru_cache(maxsize=4096)
def majority_chances(counts: tuple[int, ...]) -> np.ndarray:
    """The chance of each answer to be the one given most often among k drawn, for every k.

    A draw in which answer a occurs v times and wins is one of C(counts[a], v) choices of a's, times a choice of the
    others in which none exceeds v. `ways[t, s]` counts the latter by their size s and by the number t of answers that
    tie with a, which share the win among 1 + t.

    `counts`: how often each distinct answer was given, ascending; up to a sum of 1000, in float64.
    Returns [n + 1, len(counts)] for k = 0 to n; each row from k = 1 on sums to 1.
    """
    n = sum(counts)
    wins = np.zeros((n + 1, len(counts)))
    for count in set(counts):
        alike = [number for number, other in enumerate(counts) if other == count]
        others = list(counts)
        others.remove(count)
        for v in range(1, count + 1):
            ways = _draws_of_others(tuple(others), v, n)
            shares = (ways / np.arange(1, len(ways) + 1)[:, None]).sum(0)
            wins[v:, alike] += (math.comb(count, v) * shares[: n + 1 - v])[:, None]
    return wins / np.array([float(math.comb(n, k)) for k in range(n + 1)])[:, None]


def _draws_of_others(others: tuple[int, ...], v: int, n: int) -> np.ndarray:
    """[ties, n + 1]: in how many ways to draw s of the others so that none occurs above v times and t exactly so."""
    below = sum(count for count in others if count < v)
    ways = np.array([[float(math.comb(below, s)) for s in range(n + 1)]])
    for count in others:
        if count >= v:
            extended = np.zeros((len(ways) + 1, n + 1))
            for drawn in range(v + 1):
                ties = int(drawn == v)
                extended[ties : len(ways) + ties, drawn:] += (
                    math.comb(count, drawn) * ways[:, : n + 1 - drawn]
                )
            ways = extended
    return ways


def _moments(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[2, prompts]: mean and standard deviation of each row of values, drawn with the given chances."""
    mean = values @ weights
    return np.stack([mean, np.sqrt(np.square(values - mean[:, None]) @ weights)])


def _summary(name: str, moments: np.ndarray, *, is_only_draw: bool) -> dict[str, np.ndarray]:
    mean, deviation = moments
    return {f"{name}/mean": mean} | ({} if is_only_draw else {f"{name}/std": deviation})


def _draw_sizes(num_most: int) -> list[int]:
    """2, 4, 8, ... below `num_most`, and `num_most`; nothing for a single response."""
    powers = [2**exponent for exponent in range(1, num_most.bit_length()) if 2**exponent < num_most]
    return [*powers, num_most] if num_most > 1 else []


def _numbers(values: Sequence[Any]) -> np.ndarray | None:
    """The values as floats, NaN for None; None if anything in it is not a number."""
    column = [math.nan if value is None else value for value in values]
    if not all(isinstance(value, bool | int | float | np.bool_ | np.number) for value in column):
        return None
    return np.array(column, dtype=np.float64)
