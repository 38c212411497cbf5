# SPDX-License-Identifier: Apache-2.0
"""From a batch of token ids to samples that score functions read, and from their outcomes to the batch's rewards.

    batch ── read_samples ──> samples ── submit ──> Round, graded elsewhere ── outcomes ──> collect ──> RewardOutput

Too many samples without a grade stop the run. B sequences, P prompt positions, T response positions.
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
from quadriga.rewards.outcome import UNGRADABLE, Outcome
from quadriga.rewards.pool import Round
from quadriga.rewards.registry import Grading, RewardManager, RewardOutput
from quadriga.rewards.scoring import POLICY_TEXT

logger = logging.getLogger(__name__)
OF_CONVERSATION = ("num_turns", "finish_reason", "tool_rewards", "turn_scores")
"""Columns of a conversation that score functions find in `extra_info`, whether it is graded alone or in its batch."""

ERROR_COLUMN = "reward_error"


class Samples(NamedTuple):
    """Decoded responses, arguments of each; `lengths` [B] int64 in tokens; T; the rows' `places` in data files."""

    rows: list[dict[str, Any]]
    lengths: torch.Tensor
    response_length: int
    places: list[str]


class SampleManager(RewardManager):
    """Base of the managers that make a score of each response and put it on its last token.
    Raises ConfigError: `reward_model.reward_kwargs` holds what the manager does not know."""

    options: tuple[str, ...] = ()  # names that `reward_model.reward_kwargs` may hold
    needs_truths: bool = (
        True  # whether each row must have a ground truth; None stands for one that is not needed
    )

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.settings = config.reward_model
        self._tokenizer, self._reward_fn_key = tokenizer, config.data.reward_fn_key
        if unknown := [name for name in self.settings.reward_kwargs if name not in self.options]:
            known = ", ".join(self.options) or "it has none"
            expected = f"options of the reward manager {self.settings.reward_manager} ({known})"
            fix = "Arguments of your own score function belong to custom_reward_function.reward_kwargs."
            raise ConfigError(
                "reward_model.reward_kwargs", got=", ".join(unknown), expected=expected, fix=fix
            )

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        samples = read_samples(
            data, self._tokenizer, self._reward_fn_key, needs_truths=self.needs_truths
        )
        found = [None] * len(samples.rows) if outcomes is None else list(outcomes)
        missing = [row for row, outcome in enumerate(found) if outcome is None]
        rate = self.settings.max_error_rate
        work = self.submit(
            [samples.rows[row] for row in missing], allowed_failures(len(samples.rows), rate)
        )

        def result() -> RewardOutput:
            with waiting(f"the rewards of {len(missing)} samples", detail=work.progress):
                graded = dict(zip(missing, work.result(), strict=True))
            complete = [outcome or graded[row] for row, outcome in enumerate(found)]
            return collect(samples, self.shaped(complete, samples), rate)

        return Grading(result, work.cancel)

    def check_rows(self, rows: Sequence[tuple[str, Any, Any]]) -> None:
        for place, source, reward_model in rows if self.needs_truths else ():
            if ground_truth(reward_model, place) is None and not self.grades_without_truth(source):
                expected, fix = (
                    "one that the data source's grader can compare with",
                    "Correct the data file.",
                )
                raise RewardError(
                    f"{place}, column 'reward_model'", "the ground truth None", expected, fix
                )

    def grades_without_truth(self, data_source: Any) -> bool:
        """Whether None may be meant as the ground truth of rows of a data source."""
        return True

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        round_ = self.submit([row])
        try:
            await wrap_future(round_.done)
        except BaseException:
            # The conversation was given up.
            round_.cancel()
            raise
        return round_.result()[0]

    def grade_all(self, samples: Samples) -> list[Outcome]:
        """The outcomes of all samples; RewardError where too many could not be graded."""
        rate = self.settings.max_error_rate
        work = self.submit(samples.rows, allowed_failures(len(samples.rows), rate))
        with waiting(f"the grades of {len(samples.rows)} responses", detail=work.progress):
            outcomes = work.result()
        _report_failures(samples, outcomes, rate)
        return outcomes

    def submit(self, rows: list[dict[str, Any]], max_failures: int | None = None) -> Round:
        """Begin to grade `Samples.rows`; the round ends once more than `max_failures` have failed."""
        raise NotImplementedError

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """The outcomes with what the manager adds to the grades."""
        return outcomes


def read_samples(
    data: DataProto, tokenizer: Any, reward_fn_key: str, *, needs_truths: bool = True
) -> Samples:
    """Decode the valid tokens of each response, special tokens left out, and gather its columns. `data` is as for
    `RewardManager.begin`, its data source's column is `reward_fn_key`; without `needs_truths` the ground truth is None
    in all rows. Raises RewardError: a column or a ground truth is missing."""
    columns = data.non_tensor_batch
    there = sorted(map(str, [*columns, *(() if data.batch is None else data.batch.keys())]))
    origins = dict.fromkeys(("responses", "attention_mask"), "generate_sequences writes it")
    origins[reward_fn_key] = "data.reward_fn_key names it"
    if needs_truths:
        origins["reward_model"] = "the data set's rows bring it, as {'ground_truth': ...}"
    for key, origin in origins.items():
        if key not in there:
            got = f"only the columns {', '.join(there) or 'none'}"
            raise RewardError(f"reward batch column {key}", got=got, expected=f"this one; {origin}")
    responses = data.batch["responses"].cpu()
    response_length = responses.shape[1]
    # The attention mask, not the response mask: what a tool or the user said in between belongs to `solution_str`.
    valid = (
        data.batch["attention_mask"].cpu()[:, -response_length:] if response_length else responses
    )
    lengths = valid.long().sum(dim=-1)
    token_ids = [
        row[:length] for row, length in zip(responses.numpy(), lengths.tolist(), strict=True)
    ]
    rows = []
    places = list(
        columns.get("source_row", [f"row {row} of the batch" for row in range(len(token_ids))])
    )
    masks = (
        data.batch["response_mask"].cpu().numpy() if "response_mask" in data.batch.keys() else None
    )
    whole = tokenizer.batch_decode(token_ids, skip_special_tokens=False)
    for row, text in enumerate(
        tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    ):  # quick with arrays
        truth = ground_truth(columns["reward_model"][row], places[row]) if needs_truths else None
        facts = {
            "data_source": columns[reward_fn_key][row],
            "solution_str": text,
            "ground_truth": truth,
        }
        facts |= {
            "extra_info": _extra_info(columns, row),
            "solution_with_special_tokens": whole[row],
        }
        if masks is not None and not (mask := masks[row][: lengths[row]]).all():
            facts[POLICY_TEXT] = policy_text(tokenizer, token_ids[row], mask)
        if "solution_messages" in columns:
            facts["solution_messages"] = columns["solution_messages"][row]
        rows.append(facts)
    return Samples(rows, lengths, response_length, places)


def _extra_info(columns: Mapping[str, Any], row: int) -> Any:
    """A row's `extra_info`, with what its conversation adds to it."""
    extra_info = columns["extra_info"][row] if "extra_info" in columns else None
    if extra_info is None:
        extra_info = {}
    of_conversation = {name: columns[name][row] for name in OF_CONVERSATION if name in columns}
    return {**extra_info, **of_conversation} if of_conversation else extra_info


def policy_text(tokenizer: Any, token_ids: Any, mask: Any) -> str:
    """What the policy itself wrote of a response: the runs of tokens whose mask is 1, each on lines of its own."""
    runs = groupby(zip(token_ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    texts = [[int(token) for token, _ in pairs] for is_own, pairs in runs if is_own]
    return "\n".join(tokenizer.batch_decode(texts, skip_special_tokens=True))


def ground_truth(reward_model: Any, place: str, column: str = "reward_model") -> Any:
    """The ground truth in a row's `reward_model`; RewardError, with the row's place and column, if it has none."""
    got = repr(reward_model)
    if isinstance(reward_model, dict):
        truth = reward_model.get("ground_truth")
        # NaN is a table's word for what is missing. None may be meant: some graders want no truth.
        is_missing = isinstance(truth, float) and math.isnan(truth)
        if "ground_truth" in reward_model and not is_missing:
            return truth
        got = (
            "the ground truth NaN"
            if is_missing
            else f"a dict with {', '.join(map(str, reward_model)) or 'no key'}"
        )
    raise RewardError(
        f"{place}, column {column!r}", got, "a dict with 'ground_truth'", "Correct the data file."
    )


def allowed_failures(num_samples: int, max_error_rate: float) -> int:
    """How many of so many samples may fail."""
    # 0.29 * 100 is 28.999999999999996, and 29 of 100 are not more than 0.29.
    return math.floor(num_samples * max_error_rate + 1e-9)


def collect(samples: Samples, outcomes: Sequence[Outcome], max_error_rate: float) -> RewardOutput:
    """The rewards of a batch, from the outcome of each of its samples.
    Raises RewardError: a larger share than `max_error_rate` has failed; it ends with the first failure's own traceback.
    """
    _report_failures(samples, outcomes, max_error_rate)
    scores = torch.zeros(len(outcomes), samples.response_length, dtype=torch.float32)
    if samples.response_length:
        # A response without a single token keeps its score at the first position, where no mask lets it into a loss.
        last = (samples.lengths - 1).clamp(min=0)
        found = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32)
        scores[torch.arange(len(outcomes)), last] = found
    extra = {ERROR_COLUMN: object_array(outcome.error for outcome in outcomes)}
    num_errors = sum(map(bool, extra[ERROR_COLUMN]))
    reasons = [outcome.extra.get(UNGRADABLE) for outcome in outcomes]
    num_ungradable = sum(isinstance(reason, str) and reason != "" for reason in reasons)
    metrics = {
        "reward/errors": Metric(num_errors, "sum"),
        "reward/timeouts": Metric(sum(outcome.kind == "timeout" for outcome in outcomes), "sum"),
        "reward/ungradable": Metric(num_ungradable, "sum"),
        "reward/error_rate": Metric(
            num_errors / max(len(outcomes), 1), "mean", weight=len(outcomes)
        ),
    }
    names = dict.fromkeys(chain.from_iterable(outcome.extra for outcome in outcomes))
    if taken := names.keys() & {ERROR_COLUMN, *FIELDS}:
        got, expected = (
            f"{', '.join(sorted(taken))} in the dict it returned",
            "names that no column of the batch has",
        )
        raise RewardError(
            "score function", got=got, expected=expected, fix="Rename the entry, or leave it out."
        )
    for name in names:
        extra[name] = object_array(outcome.extra.get(name) for outcome in outcomes)
        values = [value for value in extra[name] if value is not None]
        if values and all(isinstance(value, Real) for value in values):
            metrics[f"reward/extra/{name}"] = Metric(
                math.fsum(values) / len(values), "mean", weight=len(values)
            )
    return RewardOutput(scores, extra, metrics)


def _report_failures(samples: Samples, outcomes: Sequence[Outcome], max_error_rate: float) -> None:
    failed = [
        row for row, outcome in enumerate(outcomes) if outcome.error and outcome.kind != "skipped"
    ]
    if not failed:
        return
    first = failed[0]
    found = f"{len(failed)} of {len(outcomes)} samples could not be graded"
    source = f"{samples.places[first]}, of data source {samples.rows[first]['data_source']}"
    cause = f"The first, {source}: {outcomes[first].error}"
    if len(failed) > allowed_failures(len(outcomes), max_error_rate):
        got = (
            f"{found} (grading stopped there)"
            if any(outcome.kind == "skipped" for outcome in outcomes)
            else found
        )
        raise RewardError(
            "reward", got, f"at most {max_error_rate:.0%} (reward_model.max_error_rate)", cause
        )
    logger.warning("%s and count as 0. %s", found, cause)
