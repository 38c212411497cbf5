# SPDX-License-Identifier: Apache-2.0
"""From a batch of token ids to samples that score functions read, and from their outcomes to the batch's rewards.

    batch ── read_samples ──> samples ── submit ──> work elsewhere ── outcomes ──> collect ──> RewardOutput

Too many samples without a grade stop the run. B sequences, P prompt positions, T response positions.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch

from quadriga.config import Config
from quadriga.errors import ConfigError, RewardError
from quadriga.observe.metrics import Metric
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.protocol.fields import FIELDS
from quadriga.rewards.base import Grading, RewardManager, RewardOutput
from quadriga.rewards.outcome import Outcome

logger = logging.getLogger(__name__)

OF_CONVERSATION = ("num_turns", "finish_reason", "tool_rewards", "turn_scores")
"""Columns of a conversation that score functions find in `extra_info`, whether it is graded alone or in its batch."""

ERROR_COLUMN = "reward_error"


@dataclass(frozen=True)
class Samples:
    """The responses of a batch, decoded, with the facts they are graded by.

    Attributes:
        rows: one dict a sample: data_source, solution_str, ground_truth, extra_info.
        lengths: [B] int64, valid tokens of each response.
        response_length: T.
    """

    rows: list[dict[str, Any]]
    lengths: torch.Tensor
    response_length: int


class Work(Protocol):
    """Samples that are being graded elsewhere."""

    def result(self) -> list[Outcome]:
        """Wait for the outcomes, in the order of the samples."""
        ...

    def cancel(self) -> None:
        """End it: when this returns, no process of ours grades the samples."""
        ...

    def progress(self) -> str:
        """What is done, for a report on a long wait."""
        ...


class SampleManager(RewardManager):
    """Base of the managers that make a score of each response and put it on its last token.

    Args:
        config: the run's; read are `reward_model`, `data.reward_fn_key`.
        tokenizer: decodes the responses; anything with `batch_decode`.

    Raises:
        ConfigError: `reward_model.reward_kwargs` holds what the manager does not know.
    """

    has_grades = True

    options: tuple[str, ...] = ()
    """Names that `reward_model.reward_kwargs` may hold."""

    needs_truths: bool = True
    """Whether each row must have a ground truth; None stands for one that is not needed."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.settings = config.reward_model
        self._tokenizer, self._reward_fn_key = tokenizer, config.data.reward_fn_key
        unknown = [name for name in self.settings.reward_kwargs if name not in self.options]
        if unknown:
            known = ", ".join(self.options) or "it has none"
            raise ConfigError(
                "reward_model.reward_kwargs",
                got=", ".join(unknown),
                expected=f"options of the reward manager {self.settings.reward_manager} ({known})",
                fix="Arguments of your own score function belong to custom_reward_function.reward_kwargs.",
            )

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        samples = read_samples(data, self._tokenizer, self._reward_fn_key, needs_truths=self.needs_truths)
        found = [None] * len(samples.rows) if outcomes is None else list(outcomes)
        missing = [row for row, outcome in enumerate(found) if outcome is None]
        max_error_rate = self.settings.max_error_rate
        max_failures = allowed_failures(len(samples.rows), max_error_rate)
        work = self.submit([samples.rows[row] for row in missing], max_failures)

        def result() -> RewardOutput:
            with waiting(f"the rewards of {len(missing)} samples", detail=work.progress):
                graded = dict(zip(missing, work.result(), strict=True))
            complete = [outcome or graded[row] for row, outcome in enumerate(found)]
            return collect(samples, self.shaped(complete, samples), max_error_rate)

        return Grading(result, work.cancel)

    def submit(self, rows: list[dict[str, Any]], max_failures: int | None = None) -> Work:
        """Begin to grade samples.

        Args:
            rows: see `Samples.rows`.
            max_failures: stop once more than this many have failed; the rest is "skipped". None: never.
        """
        raise NotImplementedError

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """The outcomes with what the manager adds to the grades."""
        return outcomes


def read_samples(data: DataProto, tokenizer: Any, reward_fn_key: str, *, needs_truths: bool = True) -> Samples:
    """Decode the valid tokens of each response, special tokens left out, and gather its columns.

    Args:
        data: see `RewardManager.begin`.
        tokenizer: anything with `batch_decode`.
        reward_fn_key: name of the data source's column.
        needs_truths: whether each row must have a ground truth; None stands for one that is not needed.

    Raises:
        RewardError: if a column or a ground truth is missing.
    """
    for key in ("responses", "attention_mask"):
        if data.batch is None or key not in data.batch:
            raise RewardError(
                f"reward batch column {key}", got="nothing", expected="a tensor; generate_sequences writes it"
            )
    responses = data.batch["responses"].cpu()
    response_length = responses.shape[1]
    # The attention mask, not the response mask: what a tool or the user said in between belongs to the text that is
    # graded.
    valid = data.batch["attention_mask"].cpu()[:, -response_length:] if response_length else responses
    lengths = valid.long().sum(dim=-1)
    token_ids = [row[:length] for row, length in zip(responses.tolist(), lengths.tolist(), strict=True)]
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    sources = _column(data, reward_fn_key, "data.reward_fn_key names it")
    truths: list[Any] = [None] * len(texts)
    if needs_truths:
        column = _column(data, "reward_model", "the data set's rows bring it, as {'ground_truth': ...}")
        truths = [_ground_truth(truth, row) for row, truth in enumerate(column)]
    rows = [
        {"data_source": source, "solution_str": text, "ground_truth": truth, "extra_info": _facts(data, row)}
        for row, (source, text, truth) in enumerate(zip(sources, texts, truths, strict=True))
    ]
    return Samples(rows, lengths, response_length)


def _facts(data: DataProto, row: int) -> Any:
    """The `extra_info` of a row; for a conversation with its number of turns and its end."""
    columns = data.non_tensor_batch
    known = columns["extra_info"][row] if "extra_info" in columns else None
    told = {name: columns[name][row] for name in OF_CONVERSATION if name in columns}
    return {**(known or {}), **told} if told else ({} if known is None else known)


def _column(data: DataProto, key: str, origin: str) -> Any:
    if key not in data.non_tensor_batch:
        there = ", ".join(sorted(data.non_tensor_batch)) or "none"
        raise RewardError(f"reward batch column {key}", got=f"only the columns {there}", expected=f"this one; {origin}")
    return data.non_tensor_batch[key]


def _ground_truth(reward_model: Any, row: int) -> Any:
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    got = f"a dict with {', '.join(map(str, reward_model))}" if isinstance(reward_model, dict) else repr(reward_model)
    raise RewardError(
        f"reward_model of row {row}", got=got, expected="a dict with 'ground_truth'", fix="Correct the data file."
    )


def allowed_failures(num_samples: int, max_error_rate: float) -> int:
    """How many of so many samples may fail."""
    # 0.29 * 100 is 28.999999999999996, and 29 of 100 are not more than 0.29.
    return math.floor(num_samples * max_error_rate + 1e-9)


def collect(samples: Samples, outcomes: Sequence[Outcome], max_error_rate: float) -> RewardOutput:
    """The rewards of a batch.

    Args:
        samples: what was graded.
        outcomes: what became of each.
        max_error_rate: share of failed samples that is still accepted, in [0, 1].

    Raises:
        RewardError: if more have failed; it ends with the first failure's own traceback.
    """
    _report_failures(samples, outcomes, max_error_rate)
    scores = torch.zeros(len(outcomes), samples.response_length, dtype=torch.float32)
    if samples.response_length:
        # A response without a single token keeps its score at the first position, where no mask lets it into a loss.
        last = (samples.lengths - 1).clamp(min=0)
        found = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32)
        scores[torch.arange(len(outcomes)), last] = found
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.extra)
    taken = [name for name in names if name == ERROR_COLUMN or name in FIELDS]
    if taken:
        raise RewardError(
            "score function",
            got=f"{', '.join(taken)} in the dict it returned",
            expected="names that no column of the batch has",
            fix="Rename the entry, or leave it out.",
        )
    extra = {name: object_array(outcome.extra.get(name) for outcome in outcomes) for name in names}
    errors = {ERROR_COLUMN: object_array(outcome.error for outcome in outcomes)}
    return RewardOutput(scores, {**errors, **extra}, _metrics(outcomes, extra))


def _report_failures(samples: Samples, outcomes: Sequence[Outcome], max_error_rate: float) -> None:
    failed = [row for row, outcome in enumerate(outcomes) if outcome.error and outcome.kind != "skipped"]
    if not failed:
        return
    first = failed[0]
    found = f"{len(failed)} of {len(outcomes)} samples could not be graded"
    cause = f"The first, row {first} of data source {samples.rows[first]['data_source']}: {outcomes[first].error}"
    if len(failed) > allowed_failures(len(outcomes), max_error_rate):
        raise RewardError(
            "reward",
            got=f"{found} (grading stopped there)" if any(outcome.kind == "skipped" for outcome in outcomes) else found,
            expected=f"at most {max_error_rate:.0%} (reward_model.max_error_rate)",
            fix=cause,
        )
    logger.warning("%s and count as 0. %s", found, cause)


def _metrics(outcomes: Sequence[Outcome], extra: dict[str, np.ndarray]) -> dict[str, Metric]:
    num_errors = sum(bool(outcome.error) for outcome in outcomes)
    metrics = {
        "reward/errors": Metric(num_errors, "sum"),
        "reward/timeouts": Metric(sum(outcome.kind == "timeout" for outcome in outcomes), "sum"),
        "reward/error_rate": Metric(num_errors / max(len(outcomes), 1), "mean", weight=len(outcomes)),
    }
    for name, column in extra.items():
        values = [value for value in column if value is not None]
        if values and all(isinstance(value, Real) for value in values):
            metrics[f"reward/extra/{name}"] = Metric(math.fsum(values) / len(values), "mean", weight=len(values))
    return metrics
