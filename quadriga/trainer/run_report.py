# SPDX-License-Identifier: Apache-2.0
"""Reports of a run as plain text: the reward over steps, where the time went, responses.

`quadriga show` prints `report`; a run prints `summary` at its end.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from quadriga.errors import DataError
from quadriga.observe.progress import (
    HEADLINES,
    TOOL_CALLS,
    clock_text,
    join_field,
    step_fields,
    validation_results,
)
from quadriga.observe.records.samples import ANSWER_LEFT_OUT
from quadriga.trainer.run_folder import RunFolder, Sample

MAX_SUMMARY_LINES = 12
MAX_CURVE_ROWS = 10
MAX_PHASES = 4  # in a summary
MAX_VALIDATIONS = 3
MAX_RESPONSES = 2  # of the best, and of the worst, in a report
MAX_CHARACTERS = 1200  # of a text in a report
MAX_LINE_CHARACTERS = 60  # of a text in a summary
BAR_WIDTH = 32
_ALIKE = "all scored alike"
_PHASES = "timing_s/"
# Parts of phases. The parts of a phase may overlap.
_PARTS = {
    "gen": ("generate_sequences", "tools"),
    "prepare": ("old_log_prob", "ref", "teacher", "values", "rm", "reward"),
}
_ALL_PARTS = {part for parts in _PARTS.values() for part in parts}
_TURNS = "actor_rollout_ref.rollout.multi_turn"
_TOOL_FILES = ("function_tool_path", "tool_config_path")
_LEAST_SHARE = 0.005  # phases with a smaller share of the time are not shown
# Entries of a sample that are not parts of the reward; all others are.
_NOT_PARTS = {
    *("uid", "data_source", "input", "output", "output_with_special_tokens", "ground_truth"),
    *("score", "num_turns", "finish_reason", "step", "row", "reward_error"),
    ANSWER_LEFT_OUT,
}

Curve = list[tuple[int, float]]
"""Values with their steps."""


def summary(run: RunFolder) -> list[str]:
    """Summarize a run in at most `MAX_SUMMARY_LINES` lines."""
    lines = []
    # Reward or loss, and results of validations.
    name, curve = headline_curve(run.metrics)
    if curve:
        lines.append(f"{name}: {_first_and_last(curve)}")
    lines += _validation_lines(run)

    seconds, total_s = phase_seconds(run.metrics)
    phases = _longest_phases(seconds, seconds.keys() - _ALL_PARTS)
    if phases:
        shares = [f"{phase} {seconds[phase] / total_s:.0%}" for phase in phases[:MAX_PHASES]]
        lines.append(f"time in steps: {clock_text(total_s)}, of which {', '.join(shares)}")

    # One of the best responses of the last step, and one of the worst.
    if run.responses:
        step, read_samples = list(run.responses.items())[-1]
        for title, sample in _examples(read_samples(), 1):
            preposition = "in" if title == _ALIKE else "of"
            lines.append(f"{title} {preposition} step {step}, {_sample_text(sample)}")
    lines += _advice_on_missing_files(run)
    return lines[:MAX_SUMMARY_LINES]


def _sample_text(sample: Sample) -> str:
    """Score, prompt, response and ground truth of a sample on one line."""
    prompt = _shortened(sample["input"], MAX_LINE_CHARACTERS)
    output = _shortened(sample["output"], MAX_LINE_CHARACTERS)
    text = f"score {_score(sample):.3f}: {prompt!r} -> {output!r}"
    truth = sample.get("ground_truth")
    if truth is not None:
        text += f", truth {_shortened(_value_text(truth), MAX_LINE_CHARACTERS)!r}"
    return text


def _examples(samples: Sequence[Sample], count: int) -> list[tuple[str, Sample]]:
    """The `best_and_worst` samples, each with a title.

    If several samples all have the same score, none of them is the best or the worst.
    """
    best, worst = best_and_worst(samples, count)
    is_alike = not worst and len(_graded_samples(samples)) > 1
    examples = [(_ALIKE if is_alike else "best", sample) for sample in best]
    return examples + [("worst", sample) for sample in worst]


def report(run: RunFolder, step: int | None = None) -> Iterator[str]:
    """Describe a run, line by line.

    Args:
        run: the run.
        step: step whose responses and metrics are shown; None: the newest one with responses.

    Raises:
        DataError: nothing was written about the step.
    """
    responses = run.responses
    known_steps = sorted({*run.metrics, *responses})
    if step is not None and step not in known_steps:
        expected = "a step that was written"
        if known_steps:
            expected = f"one of {_step_range(known_steps)}"
        raise DataError(
            "--step",
            got=str(step),
            expected=expected,
            fix=" ".join(_advice_on_missing_files(run)),
        )

    yield _state_line(run)
    name, curve = headline_curve(run.metrics)
    if curve:
        yield f"\n{name} over steps"
        yield from _curve_rows(curve)
    validations = _validation_lines(run)
    if validations:
        yield "\nValidation"
        yield from (f"  {line}" for line in validations)
    yield from _phase_rows(run)

    # The step whose responses are shown.
    if step is None and responses:
        step = max(responses)
    if step in run.metrics:
        fields = step_fields(run.metrics[step])
        numbers = "  ".join(join_field(label, value) for label, value in fields.items())
        if numbers:
            yield f"\nStep {step}: {numbers}"
    if step in responses:
        yield from _sample_lines(run, step, responses[step]())
    elif responses:
        written_steps = _step_range([*responses])
        yield f"\nNo responses of step {step} were written, only those of {written_steps}"
    missing = _advice_on_missing_files(run)
    if missing:
        yield ""
        yield from missing


def _step_range(steps: Sequence[int]) -> str:
    """Describe steps, in ascending order, by their number, the first and the last one."""
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


def headline_curve(metrics: Mapping[int, Mapping[str, float]]) -> tuple[str, Curve]:
    """Return the name and the curve of the main metric: the mean reward, or else the loss."""
    # The first two headlines are the mean reward and the loss.
    for headline in HEADLINES[:2]:
        for source in headline.sources:
            curve = [(step, values[source]) for step, values in metrics.items() if source in values]
            if curve:
                return headline.label, curve
    return "", []


def phase_seconds(metrics: Mapping[int, Mapping[str, float]]) -> tuple[dict[str, float], float]:
    """Sum the seconds of each phase over all steps.

    Returns:
        The seconds of each phase that takes more than `_LEAST_SHARE` of the time; and the seconds
        of all steps together.
    """
    seconds = defaultdict(float)
    for values in metrics.values():
        for name, value in values.items():
            phase = name.removeprefix(_PHASES)
            if name.startswith(_PHASES) and "/" not in phase:
                seconds[phase] += value
    total_s = seconds.pop("step", 0.0)
    least_s = _LEAST_SHARE * total_s
    return {phase: value for phase, value in seconds.items() if value > least_s}, total_s


def _longest_phases(seconds: Mapping[str, float], phases: Iterable[str]) -> list[str]:
    """The phases among `phases` that have been measured, the longest first."""
    measured_phases = [phase for phase in phases if phase in seconds]
    return sorted(measured_phases, key=lambda phase: -seconds[phase])


def best_and_worst(samples: Sequence[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """Find the samples with the highest and those with the lowest scores, one per prompt.

    Args:
        samples: samples of a step.
        count: at most as many of the best, and of the worst.

    Returns:
        The best and the worst. All of the best have higher scores than the worst. If all scores are
        equal, there are no worst ones.
    """
    ranked = sorted(_graded_samples(samples), key=_score, reverse=True)
    if not ranked or _score(ranked[0]) == _score(ranked[-1]):
        return _of_distinct_prompts(ranked, count), []
    lowest_score = _score(ranked[-1])
    above_lowest = [sample for sample in ranked if _score(sample) > lowest_score]
    best = _of_distinct_prompts(above_lowest, count)
    # No sample is among both, even if there are only a few.
    below_best = [sample for sample in reversed(ranked) if _score(sample) < _score(best[-1])]
    return best, _of_distinct_prompts(below_best, count)


def _graded_samples(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that have a score, and whose grader did not fail."""
    return [
        sample for sample in samples if sample["score"] is not None and not _grader_error(sample)
    ]


def _grader_error(sample: Sample) -> str:
    """Error of the grader of a sample; "" if it did not fail."""
    return str(sample.get("reward_error") or "")


def _score(sample: Sample) -> float:
    """Score of a sample that has one."""
    # JSON has no NaN, so it is written as the text "NaN", which `float` reads.
    return float(sample["score"])


def _of_distinct_prompts(samples: Sequence[Sample], count: int) -> list[Sample]:
    """The first sample of each prompt, of the first `count` prompts."""
    first_samples = {}
    for sample in samples:
        first_samples.setdefault(sample["input"], sample)
    return list(first_samples.values())[:count]


def _state_line(run: RunFolder) -> str:
    """A line that says whether the run is going on or finished, and how far it is."""
    last = run.last_step
    done = run.done_steps
    end = f" of {last}" if last else ""
    state = "not finished"
    if run.is_going_on:
        state = "going on"
    elif last and done >= last:
        state = "finished"
    return f"{run.directory}: {state}, step {done}{end}"


def _advice_on_missing_files(run: RunFolder) -> list[str]:
    """Advice on how to record metrics or responses that the run did not write."""
    lines = []
    # Without the configuration it is not known what the run writes.
    if run.settings is None:
        return lines
    if not run.has_metrics:
        lines.append("Metrics were not written: trainer.logger=[console,jsonl] writes them.")
    # Only RL runs have this key, whatever its value.
    is_rl = "trainer.rollout_data_dir" in run.settings.values
    if is_rl and not run.has_training_responses:
        lines.append("Responses were not recorded: trainer.rollout_record=all records them.")
    return lines


def _first_and_last(curve: Curve) -> str:
    """The first and last value of a curve, and the highest value if it lies between them."""
    first_step, first = curve[0]
    last_step, last = curve[-1]
    text = f"{first:.3f} at step {first_step}"
    if len(curve) > 1:
        text += f", {last:.3f} at step {last_step}"
    highest_step, highest = max(curve, key=lambda point: point[1])
    if highest_step not in (first_step, last_step):
        text += f"; highest {highest:.3f} at step {highest_step}"
    return text


def _curve_rows(curve: Curve) -> Iterator[str]:
    """Lines with the mean of each of at most `MAX_CURVE_ROWS` spans of steps, and a bar."""
    steps_per_row = math.ceil(len(curve) / MAX_CURVE_ROWS)
    rows = []
    for start in range(0, len(curve), steps_per_row):
        span = curve[start : start + steps_per_row]
        mean = sum(value for _, value in span) / len(span)
        steps = str(span[0][0])
        if len(span) > 1:
            steps += f"-{span[-1][0]}"
        rows.append((steps, mean))

    # Bars begin at the lowest mean, or at 0 if all means are positive.
    finite_means = [mean for _, mean in rows if math.isfinite(mean)]
    low = min([0.0, *finite_means])
    spread = max([0.0, *finite_means]) - low
    width = max(len(steps) for steps, _ in rows)
    for steps, mean in rows:
        bar = ""
        if math.isfinite(mean) and spread > 0:
            bar = "━" * round(BAR_WIDTH * (mean - low) / spread)
        yield f"  {steps:>{width}} {mean:9.3f}  {bar}".rstrip()


def _phase_rows(run: RunFolder) -> Iterator[str]:
    """Lines with the seconds of each phase and, indented, of its parts."""
    seconds, total_s = phase_seconds(run.metrics)
    if not seconds:
        return
    yield f"\nTime: {clock_text(total_s)} in steps"
    width = 2 + max(map(len, seconds))
    for phase in _longest_phases(seconds, seconds.keys() - _ALL_PARTS):
        labels = {phase: phase}
        for part in _longest_phases(seconds, _PARTS.get(phase, ())):
            labels[part] = f"  {part}"
        for name, label in labels.items():
            share = seconds[name] / total_s
            bar = "━" * round(BAR_WIDTH * min(share, 1))
            yield f"  {label:<{width}} {seconds[name]:9.1f} s {share:5.0%}  {bar}".rstrip()


def _validation_lines(run: RunFolder) -> list[str]:
    """First and last value of each validation result, one per line."""
    curves = defaultdict(list)
    for step, values in run.metrics.items():
        for result in validation_results(values):
            curves[f"{result.source} {result.column}"].append((step, result.value))
    lines = [f"{name}: {_first_and_last(curve)}" for name, curve in curves.items()]
    return lines[:MAX_VALIDATIONS]


def _sample_lines(run: RunFolder, step: int, samples: list[Sample]) -> Iterator[str]:
    """Statistics of a step's responses; the best, the worst, and one whose grader failed."""
    kind = "Responses" if run.has_training_responses else "Validation responses"
    scores = [_score(sample) for sample in samples if sample["score"] is not None]
    mean = f"mean score {sum(scores) / len(scores):.3f}" if scores else "without scores"
    yield f"\n{kind} of step {step}: {len(samples)}, {mean}"
    failed = [sample for sample in samples if _grader_error(sample)]
    counts = f"  grader errors: {len(failed)}"
    num_truncated = _num_truncated(run, step, samples)
    if num_truncated is not None:
        counts += f", truncated at the length limit: {num_truncated}"
    num_tool_calls = _num_tool_calls(run, step)
    if num_tool_calls is not None:
        counts += f", tool calls: {num_tool_calls}"
    yield counts

    for title, sample in _examples(samples, MAX_RESPONSES):
        yield from _lines_of_sample(title, sample)
    for sample in failed[:1]:
        yield from _lines_of_sample("grader failed", sample)


def _num_truncated(run: RunFolder, step: int, samples: Sequence[Sample]) -> int | None:
    """Number of responses that ended at the length limit; None if it is not known."""
    reasons = [sample["finish_reason"] for sample in samples if sample.get("finish_reason")]
    if reasons:
        return reasons.count("length")
    # Some engines do not say why a response has ended.
    share = run.metrics.get(step, {}).get("response_length/clip_ratio")
    is_known = share is not None and run.has_training_responses
    return round(share * len(samples)) if is_known else None


def _num_tool_calls(run: RunFolder, step: int) -> int | None:
    """Number of tool calls of a step; None if the run has no tools, or if it is not known."""
    if not run.has_training_responses:
        return None
    metrics = run.metrics.get(step, {})
    if not metrics and run.record.path(step).is_file():
        # A damaged file is reported where its responses are read.
        with suppress(DataError):
            metrics = run.record.read(step, columns=["uid"]).facts["metrics"]
    count = metrics.get(TOOL_CALLS)
    has_tools = any(run.value(f"{_TURNS}.{name}") for name in _TOOL_FILES)
    # Conversations without tools have the metric too, with the value 0.
    return round(count) if count is not None and (count or has_tools) else None


def _lines_of_sample(title: str, sample: Sample) -> Iterator[str]:
    """A line with the score and other facts of a sample, and its texts."""
    facts = ["no score" if sample["score"] is None else f"score {_score(sample):.3f}"]
    # What graders have returned besides the score.
    for name, value in sample.items():
        if name not in _NOT_PARTS and value not in (None, ""):
            facts.append(f"{name} {_value_text(value)}")
    num_turns = sample.get("num_turns")
    if num_turns is not None:
        facts.append("1 turn" if num_turns == 1 else f"{num_turns} turns")
    if sample.get("finish_reason"):
        facts.append(f"ended by {sample['finish_reason']}")
    if sample.get(ANSWER_LEFT_OUT):
        facts.append("the tool's answer did not fit in data.max_response_length")
    yield f"\n  {title}: {', '.join(facts)}"

    output = sample["output"]
    # In a conversation, special tokens show where turns begin and end.
    if (num_turns or 0) > 2:
        output = sample.get("output_with_special_tokens", output)
    texts = {"error": _grader_error(sample)} if _grader_error(sample) else {}
    texts |= {"prompt": sample["input"], "response": output}
    if sample.get("ground_truth") is not None:
        texts["ground truth"] = _value_text(sample["ground_truth"])
    row = sample.get("row")
    # A grader may have replaced the data's columns by a number called `row`.
    if isinstance(row, Mapping):
        for name, value in row.items():
            texts[f"row.{name}"] = _value_text(value)

    for name, text in texts.items():
        first, *further = _shortened(str(text), MAX_CHARACTERS).splitlines() or [""]
        yield f"    {name}: {first}"
        yield from (f"      {line}" for line in further)


def _value_text(value: Any) -> str:
    """A value of a sample as a text: a float with three decimals, a text as it is, else JSON."""
    if isinstance(value, float):
        return f"{value:.3f}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shortened(text: str, limit: int) -> str:
    """Shorten a long text in the middle, and replace characters that could control a terminal."""
    if len(text) > limit:
        half = limit // 2
        omitted = len(text) - 2 * half
        text = f"{text[:half]} [{omitted} characters] {text[-half:]}"
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )
