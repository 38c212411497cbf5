# SPDX-License-Identifier: Apache-2.0
"""Turns batches of token ids into samples for score functions, and outcomes into rewards.

    batch ── read_samples ──> samples ── submit ──> GradingRound, graded elsewhere ── outcomes
          ── collect ──> RewardOutput

The run stops if too many samples have no grade.

Shapes: B responses, P prompt positions, T response positions.
"""

import logging
import math
from asyncio import wrap_future
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from numbers import Real
from typing import Any, NamedTuple

import torch

from quadriga.config import Config
from quadriga.errors import ConfigError, RewardError
from quadriga.observe.metrics import Metric
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.protocol.fields import FIELDS
from quadriga.rewards.outcome import UNGRADABLE, UNSCORED, Outcome
from quadriga.rewards.pool import GradingRound
from quadriga.rewards.registry import Grading, RewardManager, RewardOutput
from quadriga.rewards.scoring import POLICY_TEXT

logger = logging.getLogger(__name__)
CONVERSATION_COLUMNS = ("num_turns", "finish_reason", "tool_rewards", "turn_scores")
"""Columns of a conversation that score functions get in their `extra_info`.

They are known as soon as the response is complete, so graders get the same columns whether the
response is graded then or with its batch."""

ERROR_COLUMN = "reward_error"
"""Entry of `RewardOutput.extra`: why each response has no grade, or ""."""


class Samples(NamedTuple):
    """Decoded responses.

    Attributes:
        rows: [B] facts about each response, by name: what score functions may get as arguments.
        lengths: [B] int64, number of valid tokens of each response.
        response_length: T.
        places: [B] data file and row of each response, for errors.
    """

    rows: list[dict[str, Any]]
    lengths: torch.Tensor
    response_length: int
    places: list[str]


class SampleManager(RewardManager):
    """Base class of managers that grade each sample, and put the score on the sample's last token.

    Subclasses implement `submit`.

    Args:
        config: the whole configuration.
        tokenizer: tokenizer that decodes the responses.

    Attributes:
        options: names that `reward_model.reward_kwargs` may have.
        needs_truths: whether each row must have an entry "ground_truth". It may be None for graders
            that need no truth (`grades_without_truth`).

    Raises:
        ConfigError: `reward_model.reward_kwargs` has an option that the manager does not know.
    """

    options: tuple[str, ...] = ()
    needs_truths: bool = True

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.settings = config.reward_model
        self._tokenizer = tokenizer
        self._reward_fn_key = config.data.reward_fn_key
        unknown = [name for name in self.settings.reward_kwargs if name not in self.options]
        if unknown:
            known = ", ".join(self.options) or "it has none"
            raise ConfigError(
                "reward_model.reward_kwargs",
                got=", ".join(unknown),
                expected=f"options of the reward manager {self.settings.reward_manager} ({known})",
                fix="Arguments of your own score function belong in "
                "custom_reward_function.reward_kwargs.",
            )

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        samples = read_samples(
            data, self._tokenizer, self._reward_fn_key, needs_truths=self.needs_truths
        )
        num_samples = len(samples.rows)
        # Outcomes of the responses that were graded before, by `grade_one`; None for the others.
        early_outcomes = [None] * num_samples if outcomes is None else list(outcomes)
        ungraded = [row for row, outcome in enumerate(early_outcomes) if outcome is None]
        max_error_rate = self.settings.max_error_rate
        round_ = self.submit(
            [samples.rows[row] for row in ungraded], allowed_failures(num_samples, max_error_rate)
        )

        def result() -> RewardOutput:
            """Wait for the outcomes of the round, and make the rewards of the whole batch."""
            with waiting(f"the rewards of {len(ungraded)} samples", detail=round_.progress):
                late_outcomes = dict(zip(ungraded, round_.result(), strict=True))
            complete = [outcome or late_outcomes[row] for row, outcome in enumerate(early_outcomes)]
            output = collect(samples, self.shaped(complete, samples), max_error_rate)
            # NaN for samples with an early outcome: only the rollout knows when they were graded.
            output.graded_at = [math.nan] * num_samples
            for row, graded_at in zip(ungraded, round_.graded_at, strict=True):
                output.graded_at[row] = graded_at
            return output

        return Grading(result, round_.cancel)

    def check_rows(self, rows: Sequence[tuple[str, Any, Any]]) -> None:
        if not self.needs_truths:
            return
        for place, data_source, reward_model in rows:
            truth = ground_truth(reward_model, place)
            if truth is None and not self.grades_without_truth(data_source):
                raise RewardError(
                    f"{place}, column 'reward_model'",
                    got="the ground truth None",
                    expected="one that the data source's grader can compare with",
                    fix="Correct the data file.",
                )

    def grades_without_truth(self, data_source: Any) -> bool:
        """Whether rows of a data source may have None as their ground truth. By default all may."""
        return True

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        round_ = self.submit([row])
        try:
            await wrap_future(round_.done)
        except BaseException:
            # This task was cancelled, because the conversation of the response was given up.
            round_.cancel()
            raise
        return round_.result()[0]

    def grade_all(self, samples: Samples) -> list[Outcome]:
        """Grade all samples and wait for their outcomes.

        Args:
            samples: the samples.

        Returns:
            [B] outcome of each sample.

        Raises:
            RewardError: too many samples could not be graded.
        """
        max_error_rate = self.settings.max_error_rate
        num_samples = len(samples.rows)
        round_ = self.submit(samples.rows, allowed_failures(num_samples, max_error_rate))
        with waiting(f"the grades of {num_samples} responses", detail=round_.progress):
            outcomes = round_.result()
        _report_failures(samples, outcomes, max_error_rate)
        return outcomes

    def submit(self, rows: list[dict[str, Any]], max_failures: int | None = None) -> GradingRound:
        """Begin to grade samples.

        Args:
            rows: entries of `Samples.rows`.
            max_failures: end the round once more samples than this have failed. None: never.

        Returns:
            The round, whose outcomes are in the order of the rows.
        """
        raise NotImplementedError

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """Adjust the outcomes by what graders do not know, such as a penalty for long responses.

        By default the outcomes are returned unchanged.

        Args:
            outcomes: [B] outcome of each sample.
            samples: the samples.

        Returns:
            [B] outcomes.
        """
        return outcomes


def read_samples(
    data: DataProto, tokenizer: Any, reward_fn_key: str, *, needs_truths: bool = True
) -> Samples:
    """Decode the valid tokens of each response and gather its columns.

    Args:
        data: batch as for `RewardManager.begin`.
        tokenizer: decodes the responses, with and without special tokens.
        reward_fn_key: name of the column with the data source.
        needs_truths: whether the rows have ground truths; if not, all are None.

    Returns:
        The samples, in the order of the batch.

    Raises:
        RewardError: a column or a ground truth is missing.
    """
    columns = data.non_tensor_batch
    _check_columns(data, reward_fn_key, needs_truths=needs_truths)
    responses = data.batch["responses"].cpu()
    response_length = responses.shape[1]
    # Lengths are by the attention mask, not by the response mask: `solution_str` includes what
    # tools or users said between the policy's turns. The slice begins at P instead of -T, because a
    # slice from -0 would not be empty if T is 0.
    attention_mask = data.batch["attention_mask"].cpu()
    num_prompt_positions = attention_mask.shape[1] - response_length
    lengths = attention_mask[:, num_prompt_positions:].long().sum(dim=-1)
    # Which tokens the policy itself wrote, [B, T].
    policy_masks = None
    if "response_mask" in data.batch.keys():
        policy_masks = data.batch["response_mask"].cpu().numpy()

    # Token ids of each response without padding, as arrays: these are decoded much faster than
    # tensors.
    token_ids = [
        row[:length] for row, length in zip(responses.numpy(), lengths.tolist(), strict=True)
    ]
    special_texts = tokenizer.batch_decode(token_ids, skip_special_tokens=False)
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    unknown_places = [f"row {row} of the batch" for row in range(len(token_ids))]
    places = list(columns.get("source_row", unknown_places))

    rows = []
    for row, text in enumerate(texts):
        truth = None
        if needs_truths:
            truth = ground_truth(columns["reward_model"][row], places[row])
        facts = {
            "data_source": columns[reward_fn_key][row],
            "solution_str": text,
            "ground_truth": truth,
            "extra_info": _extra_info(columns, row),
            "solution_with_special_tokens": special_texts[row],
        }
        if policy_masks is not None:
            mask = policy_masks[row][: lengths[row]]
            # If the policy wrote the whole response, its text is `solution_str`.
            if not mask.all():
                facts[POLICY_TEXT] = policy_text(tokenizer, token_ids[row], mask)
        if "solution_messages" in columns:
            facts["solution_messages"] = columns["solution_messages"][row]
        rows.append(facts)
    return Samples(rows, lengths, response_length, places)


def _check_columns(data: DataProto, reward_fn_key: str, *, needs_truths: bool) -> None:
    """Raise a RewardError if the batch lacks a field that is needed for grading."""
    names = [*data.non_tensor_batch]
    if data.batch is not None:
        names += data.batch.keys()
    names = sorted(map(str, names))
    # For each field that is needed, where it comes from.
    origins = {
        "responses": "generate_sequences writes it",
        "attention_mask": "generate_sequences writes it",
        reward_fn_key: "data.reward_fn_key names it",
    }
    if needs_truths:
        origins["reward_model"] = "the rows of the data set have it, as {'ground_truth': ...}"
    for name, origin in origins.items():
        if name not in names:
            raise RewardError(
                f"reward batch column {name}",
                got=f"only the columns {', '.join(names) or 'none'}",
                expected=f"the column {name}; {origin}",
            )


def _extra_info(columns: Mapping[str, Any], row: int) -> Any:
    """A row's `extra_info`, together with those of the `CONVERSATION_COLUMNS` that the batch has."""
    extra_info = columns["extra_info"][row] if "extra_info" in columns else None
    if extra_info is None:
        extra_info = {}
    conversation = {name: columns[name][row] for name in CONVERSATION_COLUMNS if name in columns}
    return {**extra_info, **conversation} if conversation else extra_info


def policy_text(tokenizer: Any, token_ids: Any, mask: Any) -> str:
    """Decode the parts of a response that the policy itself wrote.

    Args:
        tokenizer: decodes the tokens; special tokens are left out.
        token_ids: valid tokens of the response.
        mask: for each of these tokens, 1 if the policy wrote it.

    Returns:
        The text of each run of tokens whose mask is 1, joined by line ends.
    """
    # Each run of consecutive tokens of the policy is one turn.
    runs = []
    # Group pairs of token and mask by the mask.
    for is_policy, pairs in groupby(zip(token_ids, mask, strict=True), lambda pair: bool(pair[1])):
        if is_policy:
            runs.append([int(token) for token, _ in pairs])
    return "\n".join(tokenizer.batch_decode(runs, skip_special_tokens=True))


def ground_truth(reward_model: Any, place: str, column: str = "reward_model") -> Any:
    """Read the ground truth of a row.

    Args:
        reward_model: the row's entry, a dict with "ground_truth".
        place: file and number of the row, for the error.
        column: name of the column, for the error.

    Returns:
        The ground truth. It may be None, because some graders need no truth.

    Raises:
        RewardError: there is no ground truth, or it is NaN, by which tables mark a missing entry.
    """
    got = repr(reward_model)
    if isinstance(reward_model, dict):
        truth = reward_model.get("ground_truth")
        if isinstance(truth, float) and math.isnan(truth):
            got = "the ground truth NaN"
        elif "ground_truth" in reward_model:
            return truth
        else:
            got = f"a dict with {', '.join(map(str, reward_model)) or 'no key'}"
    raise RewardError(
        f"{place}, column {column!r}",
        got=got,
        expected="a dict with 'ground_truth'",
        fix="Correct the data file.",
    )


def allowed_failures(num_samples: int, max_error_rate: float) -> int:
    """Compute how many samples of a batch may fail.

    Args:
        num_samples: number of samples in the batch.
        max_error_rate: largest share of the samples that may fail.

    Returns:
        The number, rounded down.
    """
    # At a rate of 0.29, 29 samples of 100 may fail, but 0.29 * 100 is 28.999999999999996: add a
    # little before rounding down.
    return math.floor(num_samples * max_error_rate + 1e-9)


def collect(samples: Samples, outcomes: Sequence[Outcome], max_error_rate: float) -> RewardOutput:
    """Assemble the rewards of a batch from the outcomes of its samples.

    Args:
        samples: the samples.
        outcomes: [B] outcome of each sample.
        max_error_rate: largest share of samples that may have no grade.

    Returns:
        Scores [B, T], the columns to store, and the metrics.

    Raises:
        RewardError: a larger share has no grade (the error has the traceback of the first failure);
            a score function returned an entry with the name of a batch column; or no sample has a
            score.
    """
    _report_failures(samples, outcomes, max_error_rate)
    scores = torch.zeros(len(outcomes), samples.response_length, dtype=torch.float32)
    if samples.response_length:
        # An empty response has its score at position 0, which the response mask excludes from any
        # loss.
        last = (samples.lengths - 1).clamp(min=0)
        sample_scores = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32)
        scores[torch.arange(len(outcomes)), last] = sample_scores

    metrics = _error_metrics(outcomes)

    # The columns to store: the entries that graders returned beside the score, and this package's
    # own.
    extra = {ERROR_COLUMN: object_array(outcome.error for outcome in outcomes)}
    names = dict.fromkeys(chain.from_iterable(outcome.extra for outcome in outcomes))
    # An entry must not overwrite a column of the batch.
    taken_names = names.keys() & {ERROR_COLUMN, UNSCORED, *FIELDS}
    if taken_names:
        raise RewardError(
            "score function",
            got=f"{', '.join(sorted(taken_names))} in the dict it returned",
            expected="names that no column of the batch has",
            fix="Rename the entry, or leave it out.",
        )
    for name in names:
        extra[name] = object_array(outcome.extra.get(name) for outcome in outcomes)
        values = [value for value in extra[name] if value is not None]
        # If all values are numbers, log their mean over the samples that have the entry.
        if values and all(isinstance(value, Real) for value in values):
            mean = math.fsum(values) / len(values)
            metrics[f"reward/extra/{name}"] = Metric(mean, "mean", weight=len(values))
    is_unscored = [outcome.kind == UNSCORED for outcome in outcomes]
    if any(is_unscored):
        extra[UNSCORED] = object_array(is_unscored)
        metrics["reward/unscored"] = Metric(sum(is_unscored), "sum")
        if all(is_unscored):
            raise RewardError(
                "reward",
                got="no sample with a score",
                expected="at least one sample with a score",
                fix="Let the score function return a number: None means that there is no score.",
            )
    return RewardOutput(scores, extra, metrics)


def _error_metrics(outcomes: Sequence[Outcome]) -> dict[str, Metric]:
    """Count errors, timeouts and ungradable responses."""
    num_errors = 0
    num_timeouts = 0
    num_ungradable = 0
    for outcome in outcomes:
        num_errors += bool(outcome.error)
        num_timeouts += outcome.kind == "timeout"
        # A user's function may return an entry of this name too, of any type.
        reason = outcome.extra.get(UNGRADABLE)
        num_ungradable += isinstance(reason, str) and reason != ""
    error_rate = num_errors / max(len(outcomes), 1)
    return {
        "reward/errors": Metric(num_errors, "sum"),
        "reward/timeouts": Metric(num_timeouts, "sum"),
        "reward/ungradable": Metric(num_ungradable, "sum"),
        "reward/error_rate": Metric(error_rate, "mean", weight=len(outcomes)),
    }


def _report_failures(samples: Samples, outcomes: Sequence[Outcome], max_error_rate: float) -> None:
    """Log samples that could not be graded. Raise a RewardError if there are too many of them.

    Args:
        samples: the samples.
        outcomes: [B] outcome of each sample.
        max_error_rate: largest share of samples that may have no grade.
    """
    failed = []  # rows of the samples that have failed
    has_skipped = False
    for row, outcome in enumerate(outcomes):
        # A skipped sample has not failed itself: too many others had failed before its turn.
        if outcome.kind == "skipped":
            has_skipped = True
        elif outcome.error:
            failed.append(row)
    if not failed:
        return

    first = failed[0]
    data_source = samples.rows[first]["data_source"]
    summary = f"{len(failed)} of {len(outcomes)} samples could not be graded"
    cause = (
        f"The first, {samples.places[first]}, of data source {data_source}: {outcomes[first].error}"
    )
    if len(failed) > allowed_failures(len(outcomes), max_error_rate):
        if has_skipped:
            summary += " (grading stopped there)"
        raise RewardError(
            "reward",
            got=summary,
            expected=f"at most {max_error_rate:.0%} (reward_model.max_error_rate)",
            fix=cause,  # the traceback of the first failure says what to correct
        )
    logger.warning("%s and count as 0. %s", summary, cause)
