# SPDX-License-Identifier: Apache-2.0
"""Signs of a run that goes wrong: sentences, each with its metric and with advice."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from quadriga.view.ranks import RANK_SECONDS
from quadriga.view.runs import Answer

GOOD = "good"
WARNING = "warning"
BAD = "bad"
UNKNOWN = "unknown"
_WINDOW = 5
"""Steps that are averaged at the beginning and at the end of a curve."""
_RANK_WINDOW = 20
"""Last steps in which ranks are compared."""
_LEAST_STEPS = 3
"""Steps from which on ranks are compared."""
_SLOW_RATIO = 1.2
"""Time of a rank, relative to the median of the others, from which on it is slow in a step."""
_REGULAR_SHARE = 0.8
"""Share of the steps in which a rank must be slow to be reported."""
_LEAST_EXCESS = 0.02
"""Share of a step's time below which it does not matter that a rank takes longer."""
_RANK_ADVICE = (
    "The other ranks wait for it. Look at its machine: the clock and temperature of the device, its "
    "memory, other programs, disk and network. If it has more work than the others, balance the "
    "batch (trainer.balance_batch). Otherwise leave that machine out."
)

Verdict: TypeAlias = tuple[str, str]
"""State (`GOOD`, `WARNING`, `BAD` or `UNKNOWN`) and a sentence about it."""
NumbersByStep: TypeAlias = Mapping[int, Mapping[str, float]]
"""For each step, numbers by name."""


@dataclass(frozen=True)
class Check:
    """A sign of a run's health.

    Attributes:
        title: heading on the page.
        metric: name of the metric that is judged. `rows/NAME` is the number NAME of the index, divided
            by the number of groups.
        judge: returns the verdict on the values of all steps, an array [steps].
        advice: what usually helps.
        looks_at: step whose rollouts the page links to: the `last` one, or the one with the
            `largest` or `smallest` value.
    """

    title: str
    metric: str
    judge: Callable[[np.ndarray], Verdict]
    advice: str
    looks_at: str = "largest"


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Mean over the first `_WINDOW` values and over the last. A single outlier changes it little."""
    return float(values[:_WINDOW].mean()), float(values[-_WINDOW:].mean())


def _judge_reward(values: np.ndarray) -> Verdict:
    """Judge the mean score of each step: zeros, a constant, a decrease."""
    first, last = _ends(values)
    change = f"The mean score went from {first:.3g} to {last:.3g}"
    if not values.any():
        return BAD, "Every score of every step is 0: there is nothing to learn from."
    if not values[-_WINDOW:].any():
        return BAD, f"All scores of the last {len(values[-_WINDOW:])} steps are 0."
    if len(values) >= _WINDOW and values.min() == values.max():
        return WARNING, f"The mean score is {last:.3g} at every step: it does not change."
    # In a short run the first and the last steps overlap or are noise.
    if len(values) >= 4 * _WINDOW and last < first - 0.05 * abs(first):
        return WARNING, f"{change}: it falls."
    return GOOD, f"{change}."


def _judge_entropy(values: np.ndarray) -> Verdict:
    """Judge the entropy of the policy: collapse, fast decrease, growth."""
    first, last = _ends(values)
    change = f"The entropy went from {first:.3g} to {last:.3g} nats per token"
    if last < 0.02 or last < 0.1 * first:
        return BAD, f"{change}: the policy has collapsed to nearly one response per prompt."
    if last < 0.3 * first:
        return WARNING, f"{change}: it falls fast."
    if last > 3 * first and last > 1:
        return WARNING, f"{change}: it grows, and responses become random."
    return GOOD, f"{change}."


def _make_share_judge(
    subject: str, warns_above: float, bad_above: float
) -> Callable[[np.ndarray], Verdict]:
    """Make a function that judges a share by its mean over the last steps.

    Args:
        subject: what has the share, for the sentence.
        warns_above: share above which the state is `WARNING`.
        bad_above: share above which the state is `BAD`.
    """

    def judge(values: np.ndarray) -> Verdict:
        _, share = _ends(values)
        sentence = f"{subject}: {share:.1%} over the last {len(values[-_WINDOW:])} steps."
        return _state_above(share, warns_above, bad_above), sentence

    return judge


def _state_above(value: float, warns_above: float, bad_above: float) -> str:
    """State for a value of which smaller is better."""
    if value > bad_above:
        return BAD
    return WARNING if value > warns_above else GOOD


def _judge_mismatch(values: np.ndarray) -> Verdict:
    """Judge the mean difference of log-probs between rollout and trainer."""
    first, last = _ends(values)
    change = f"Rollout and trainer differ by {last:.2g} nats per token, at the start of the run by {first:.2g}"
    if last > 0.1:
        return BAD, f"{change}: importance ratios are far from 1."
    if last > 0.01 and last > 2 * first:
        return WARNING, f"{change}: the difference grows."
    return GOOD, f"{change}."


def _judge_unequal_work(values: np.ndarray) -> Verdict:
    """Judge the work of the rank that has the most, relative to the mean of all ranks."""
    _, last = _ends(values)
    sentence = f"The rank with the most work has {last:.2f} times the mean of all ranks."
    return _state_above(last, warns_above=1.25, bad_above=2), sentence


def _judge_gradient(values: np.ndarray) -> Verdict:
    """Judge the norms of the gradient: zeros, and outliers above ten times the median."""
    num_last = len(values[-_WINDOW:])
    if not values.any():
        return BAD, "The gradient is 0 at every step: nothing is learned."
    if not values[-_WINDOW:].any():
        return BAD, f"The gradient of the last {num_last} steps is 0: nothing is learned any more."
    share_of_zeros = float((values == 0).mean())
    if share_of_zeros > 0.5:
        return WARNING, f"The gradient is 0 at {share_of_zeros:.0%} of the steps."
    middle = float(np.median(values))
    largest = float(values.max())
    sentence = f"The norm of the gradient is {middle:.3g} in the median, {largest:.3g} at most."
    # With a median of 0 any gradient would be an outlier.
    has_outlier = middle > 0 and largest > 10 * middle
    return (WARNING if has_outlier else GOOD), sentence


CHECKS = (
    Check(
        "Reward",
        "critic/score/mean",
        _judge_reward,
        "Grade right answers (`quadriga eval FILE` with a column `responses`): if they score 0, the "
        "grader reads another column or format. Else read responses of the step, check the "
        "prompt's format and the stop token, and begin with easier prompts or with supervised "
        "fine-tuning.",
        looks_at="smallest",
    ),
    Check(
        "Entropy",
        "actor/entropy",
        _judge_entropy,
        "Lower actor.optim.lr, raise actor.clip_ratio_high or actor.entropy_coeff, or use prompts "
        "that are harder.",
        looks_at="last",
    ),
    Check(
        "Groups without a gradient",
        "rows/groups_without_spread",
        _make_share_judge("Prompts whose responses all have the same score", 0.5, 0.8),
        "Use dynamic sampling (algorithm.filter_groups.enable), more responses per prompt "
        "(rollout.n), or prompts of another difficulty.",
    ),
    Check(
        "Length at its limit",
        "response_length/clip_ratio",
        _make_share_judge("Responses that are cut at the limit", 0.1, 0.3),
        "Raise data.max_response_length, or penalize overlong responses. Responses that never end "
        "point to a missing stop token.",
    ),
    Check(
        "Mismatch of rollout and trainer",
        "rollout/log_prob_diff_mean",
        _judge_mismatch,
        "Turn on the rollout correction (algorithm.rollout_correction), for mixtures of experts "
        "router replay; look for another dtype or a stale weight sync.",
    ),
    Check(
        "Grader errors",
        "reward/error_rate",
        _make_share_judge("Responses whose grader raised or ran out of time", 0.0, 0.05),
        "Filter the rollouts by grader error and read the messages.",
    ),
    Check(
        "Work of the ranks",
        "perf/imbalance/actor",
        _judge_unequal_work,
        "Balance the batch over ranks (trainer.balance_batch), or use more rows per rank and step.",
    ),
    Check(
        "Gradient",
        "actor/grad_norm",
        _judge_gradient,
        "If it is 0, all responses of each group have the same score: see the groups without a "
        "gradient, and read the responses. If it has peaks, lower the learning rate and read the "
        "rollouts of the step with the largest norm.",
    ),
)


def judge_run(metrics: NumbersByStep, rows: NumbersByStep) -> list[Answer]:
    """Judge a run.

    Args:
        metrics: metrics by step.
        rows: numbers of the index (`IndexedStep.numbers`) by training step.

    Returns:
        A finding for each of `CHECKS` and each slow rank, the worst first: `title`, `state`,
        `sentence`, `metric`, `advice`, and `step`, the step to look at. It is None, and the state
        `UNKNOWN`, if the run does not have the metric.
    """
    findings = []
    for check in CHECKS:
        curve = _curve(check.metric, metrics, rows)
        state = UNKNOWN
        sentence = f"The run has no {check.metric}."
        step = None
        if curve:
            state, sentence = check.judge(np.array(list(curve.values())))
            step = max(curve)
            if check.looks_at == "largest":
                step = max(curve, key=curve.__getitem__)
            elif check.looks_at == "smallest":
                step = min(curve, key=curve.__getitem__)
        findings.append(
            {
                "title": check.title,
                "state": state,
                "sentence": sentence,
                "metric": check.metric,
                "advice": check.advice,
                "step": step,
            }
        )
    findings += _find_slow_ranks(metrics, rows)
    order = (BAD, WARNING, GOOD, UNKNOWN)
    return sorted(findings, key=lambda finding: order.index(finding["state"]))


def _find_slow_ranks(metrics: NumbersByStep, rows: NumbersByStep) -> list[Answer]:
    """Findings on ranks that are slower than the others of their role in most of the last steps.

    Args:
        metrics: metrics by step, for the time of a whole step.
        rows: numbers of the index by training step, of which `rank_s/ROLE/RANK` are compared.
    """
    names_by_role = defaultdict(list)
    for name in sorted(set().union(*rows.values())):
        if name.startswith(RANK_SECONDS):
            names_by_role[name.rpartition("/")[0]].append(name)

    findings = []
    for role, names in names_by_role.items():
        # Only steps in which all ranks computed can be compared.
        steps = [step for step in sorted(rows) if rows[step].keys() >= set(names)][-_RANK_WINDOW:]
        if len(steps) < _LEAST_STEPS or len(names) < 2:
            continue
        # `seconds` is [steps, ranks], `step_s` [steps].
        seconds = np.array([[rows[step][name] for name in names] for step in steps])
        step_s = np.array([metrics.get(step, {}).get("timing_s/step", 0.0) for step in steps])
        for place, name in enumerate(names):
            median_of_others = np.median(np.delete(seconds, place, axis=1), axis=1)
            excess = seconds[:, place] - median_of_others
            is_slow = excess > (_SLOW_RATIO - 1) * median_of_others
            is_slow &= excess > _LEAST_EXCESS * step_s
            if is_slow.mean() < _REGULAR_SHARE:
                continue
            ratio = float(np.median(seconds[:, place] / np.maximum(median_of_others, 1e-9)))
            rank = name.rpartition("/")[2]
            sentence = (
                f"Rank {rank} of {role.removeprefix(RANK_SECONDS)} takes {ratio:.1f} times as long "
                f"as the median of the others, in {is_slow.sum()} of the last {len(steps)} steps."
            )
            findings.append(
                {
                    "title": "Slow rank",
                    "state": BAD if ratio > 2 else WARNING,
                    "sentence": sentence,
                    "metric": f"rows/{name}",
                    "advice": _RANK_ADVICE,
                    "step": steps[-1],
                }
            )
    return findings


def _curve(
    name: str,
    metrics: NumbersByStep,
    rows: NumbersByStep,
) -> dict[int, float]:
    """Finite values of a metric by step; see `Check.metric`."""
    curve = {}
    if name.startswith("rows/"):
        # Divided by the groups, because their number may differ between steps.
        for step, numbers in sorted(rows.items()):
            if numbers.get("groups"):
                curve[step] = numbers[name.removeprefix("rows/")] / numbers["groups"]
        return curve
    for step, numbers in metrics.items():
        value = numbers.get(name)
        if value is not None and np.isfinite(value):
            curve[step] = value
    return curve
