# SPDX-License-Identifier: Apache-2.0
"""Generates responses, grades them, and makes rows of them that people can read.

    generate -> begin ─> old log-probs, reference, values ─> join -> advantages -> ...
                  ├────── graders, in processes of their own ───┤
                  └────── reward model ─────────────────────────┘

    early grading   the rollout passes each response to a grader as soon as it is complete, and
                    `begin` finds the outcomes in the batch
    in process      graders on the driver work during `join`, while models in other processes compute

Legend: B rows, T response positions.
"""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from quadriga.algorithms.registry import ROLLOUT_ID
from quadriga.config import Config, DataConfig
from quadriga.data.files import written_aside
from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.observe.timing import Tally
from quadriga.observe.tracking.jsonl import jsonable
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.protocol.fields import RESERVED
from quadriga.protocol.times import GRADED_AT
from quadriga.redact import redact
from quadriga.rewards import Grading, Outcome, RewardManager, RewardOutput
from quadriga.rewards.by_name import ROW
from quadriga.trainer.metrics import spread
from quadriga.trainer.rollout_pool import RolloutPool
from quadriga.trainer.rollout_rows import has_larger_rollouts, rollout_numbers, scores_of_rows
from quadriga.workers import ActorRolloutRefWorker, RewardModelWorker
from quadriga.workers.base import (
    CHAT_OBJECTS,
    CONVERSATION_OBJECTS,
    MODEL_OBJECTS,
    PROMPT_OBJECTS,
    PROMPT_TENSORS,
    SOLUTION_MESSAGES,
    model_inputs,
)

logger = logging.getLogger(__name__)

# Columns that `RLHFDataset` derives from others, or that a written sample has under another name.
_DERIVED_COLUMNS = {"reward_model", "index", "tools_kwargs", "interaction_kwargs"}
PROMPT_ONLY = (*PROMPT_TENSORS, "raw_prompt_ids", "sample_index", "multi_modal_data")
"""Columns of prompts that responses do not have, or have with other contents."""


def generate_responses(
    rollout: ActorRolloutRefWorker | RolloutPool,
    config: Config,
    prompts: DataProto,
    num_samples: int,
) -> DataProto:
    """Generate responses to prompts.

    Args:
        rollout: handle of the rollout.
        config: the resolved configuration.
        prompts: rows with a `uid` each; meta_info has the step and whether to sample. They are not
            changed.
        num_samples: responses to each prompt.

    Returns:
        The rows of `num_samples` rollouts of each prompt, in succession, with the prompt's columns
        and the responses. meta_info is that of the prompts, with `metrics`.
    """
    rows = repeat_prompts(prompts, num_samples)
    with Tally.opened(len(rows)) as tally:
        num_before = tally.num_ended
        responses = rollout.generate_sequences(rollout_inputs(rows, config))
        # Engines in other processes do not count the responses that have ended, so the number is set
        # here.
        tally.num_ended = num_before + len(rows)
    return with_prompt_columns(rows, responses)


def with_prompt_columns(rows: DataProto, responses: DataProto) -> DataProto:
    """Add the columns of prompts to the rows of their rollouts.

    Args:
        rows: prompts from `repeat_prompts`, one for each rollout.
        responses: one or more rows of each rollout, in the order of `rows`. Without the column
            `rollout_id` each rollout has one row.

    Returns:
        The responses with the columns that prompts keep.
    """
    columns = drop_prompt_only(rows)
    if ROLLOUT_ID in responses.non_tensor_batch:
        columns = columns.select_idxs(rollout_numbers(responses))
    # A conversation may have added images. So a column that responses have replaces that of the
    # prompts.
    for name in set(MODEL_OBJECTS) & responses.non_tensor_batch.keys():
        columns.non_tensor_batch.pop(name, None)
    return columns.union(responses)


def rollout_inputs(rows: DataProto, config: Config) -> DataProto:
    """Select the columns of prompts that the rollout reads.

    With `rollout.mode=async`, the column that `data.reward_fn_key` names is called `data_source`.
    """
    columns = rows.non_tensor_batch
    is_async = config.actor_rollout_ref.rollout.mode == "async"
    names = list(PROMPT_OBJECTS)
    if is_async:
        names += CONVERSATION_OBJECTS
    inputs = rows.select(PROMPT_TENSORS, [name for name in names if name in columns])
    if is_async and config.data.reward_fn_key in columns:
        inputs.non_tensor_batch["data_source"] = columns[config.data.reward_fn_key]
    return inputs


def repeat_prompts(prompts: DataProto, count: int) -> DataProto:
    """Repeat each row `count` times, once for each rollout.

    Adds `sample_index`, which numbers the copies of a row; the seed of a response depends on it, and
    not on the rank that generates the response. Adds `rollout_id`, the name of the rollout.
    """
    rows = prompts.repeat(count)
    indices = np.tile(np.arange(count), len(prompts)).astype(object)
    uids_and_indices = zip(rows.non_tensor_batch["uid"], indices, strict=True)
    rollout_ids = object_array(f"{uid}/{index}" for uid, index in uids_and_indices)
    rows.non_tensor_batch["sample_index"] = indices
    rows.non_tensor_batch[ROLLOUT_ID] = rollout_ids
    return rows


def drop_prompt_only(rows: DataProto) -> DataProto:
    """Drop the columns of prompts that their responses do not have (`PROMPT_ONLY`)."""
    tensors = [name for name in rows.batch.keys() if name not in PROMPT_ONLY]
    objects = [name for name in rows.non_tensor_batch if name not in PROMPT_ONLY]
    return rows.select(tensors, objects)


# Rows for people


def prompt_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Make readable rows of prompts: uid, place in the data, text, and the user's columns."""
    columns = batch.non_tensor_batch
    names = [name for name in columns if name in ("uid", "source_row") or name not in RESERVED]
    # Responses have `prompts`; prompts without responses have only `input_ids`.
    prompts = batch.batch["prompts" if "prompts" in batch.batch.keys() else "input_ids"]
    masks = batch.batch["attention_mask"][:, : prompts.shape[1]].bool()
    rows = []
    for row in range(len(batch)):
        text = tokenizer.decode(prompts[row][masks[row]], skip_special_tokens=False)
        rows.append({"prompt": text, **{name: columns[name][row] for name in names}})
    return rows


def sample_rows(
    batch: DataProto, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[dict[str, Any]]:
    """Make readable rows of graded responses.

    Args:
        batch: graded responses.
        tokenizer: decodes them.
        config: names of the columns with the data source, images and videos.

    Returns:
        A row for each response with `uid`, data source, texts, ground truth and score, and
        `rollout_id` and `agent` if a rollout has several rows. Further entries are: `row`, with the
        user's other columns; entries of `extra_info` whose names are in `RESERVED`; and entries that
        graders have added. If the row already has an entry of the name, that of `extra_info` is
        called `data/NAME`, and that of a grader `reward/NAME`.
    """
    tensors = batch.batch
    columns = batch.non_tensor_batch
    width = tensors["responses"].shape[1]
    masks = tensors["attention_mask"].bool()
    scores = scores_of_rows(batch)
    optional_names = [name for name in ("num_turns", "finish_reason") if name in columns]
    if has_larger_rollouts(batch):
        optional_names += [ROLLOUT_ID, "agent"]

    rows = []
    for row in range(len(batch)):
        prompt = tensors["prompts"][row][masks[row, :-width]]
        response = tensors["responses"][row][masks[row, -width:]]
        facts = {
            "uid": columns["uid"][row],
            "data_source": columns[config.reward_fn_key][row],
            "input": tokenizer.decode(prompt, skip_special_tokens=True),
            "output": tokenizer.decode(response, skip_special_tokens=True),
            "output_with_special_tokens": tokenizer.decode(response, skip_special_tokens=False),
            "ground_truth": (columns["reward_model"][row] or {}).get("ground_truth"),
            "score": scores[row],
        }
        for name in optional_names:
            facts[name] = columns[name][row]

        # Then what the user and the graders have added.
        extra_info = (columns["extra_info"][row] if "extra_info" in columns else None) or {}
        reserved = {name: value for name, value in extra_info.items() if name in RESERVED}
        _add_entries(facts, reserved, "data")
        row_columns = user_columns(columns, row, config)
        if row_columns:
            facts["row"] = row_columns
        # Last, because a grader may use any name.
        _add_entries(facts, columns["reward_extra"][row], "reward")
        rows.append(facts)
    return rows


def user_columns(columns: Mapping[str, np.ndarray], row: int, config: DataConfig) -> dict[str, Any]:
    """The user's columns of a data row as JSON, without empty ones, bytes and secrets.

    Args:
        columns: object columns of the batch.
        row: number of the row in the batch.
        config: names of the columns with the data source, images and videos, which are left out.
    """
    names = columns.keys() - RESERVED - _DERIVED_COLUMNS
    names -= {config.reward_fn_key, config.image_key, config.video_key}
    values = {}
    for name in sorted(names):
        if columns[name][row] is not None:
            values[name] = columns[name][row]
    if isinstance(values.get("extra_info"), Mapping):
        # For reward functions of Python, `extra_info` may hold all columns once more in `ROW`.
        hidden_names = RESERVED | {ROW}
        values["extra_info"] = {
            name: value for name, value in values["extra_info"].items() if name not in hidden_names
        }
        if not values["extra_info"]:
            del values["extra_info"]
    plain = jsonable(values, lambda value: "<bytes>" if isinstance(value, bytes) else str(value))
    return redact(plain)


def _add_entries(facts: dict[str, Any], entries: Mapping[str, Any], prefix: str) -> None:
    """Add entries to a row. If the row already has the name, the entry is `PREFIX/NAME`."""
    names = set(facts)
    for name, value in entries.items():
        facts[f"{prefix}/{name}" if name in names else name] = value


def write_samples(directory: str | Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows to `directory/STEP.jsonl`, completely or not at all.

    Args:
        directory: where the files of all steps are.
        step: added to each row.
        rows: values that JSON can hold, or that `jsonable` can convert.

    Raises:
        DataError: the file cannot be written.
    """
    path = Path(directory).expanduser() / f"{step}.jsonl"
    numbered_rows = ({**row, "step": step} for row in rows)
    write_rows(path, numbered_rows, where="trainer.rollout_data_dir or trainer.validation_data_dir")
    return path


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], *, where: str) -> None:
    """Write rows as JSONL, completely or not at all.

    Args:
        path: the file.
        rows: values that JSON can hold, or that `jsonable` can convert.
        where: the key that names the folder, for the error.

    Raises:
        DataError: the file cannot be written.
    """
    lines = [json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    with written_aside(path, where=where) as draft:
        # JSON can hold half of a surrogate pair as an escape, UTF-8 cannot.
        draft.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


# Rewards


class BatchRewards:
    """Computes the rewards of a batch. Grading starts at construction.

    Rows that the rollout has already graded keep their own grades (early grading). Of the other rows
    of a rollout, the first one is graded, and all take its grade.

    Args:
        reward: grades the responses.
        batch: the responses; outcomes of early grading are removed from it.
    """

    def __init__(self, reward: RewardManager, batch: DataProto) -> None:
        outcomes = batch.non_tensor_batch.pop("reward_outcome", None)
        # [B]: row i takes the grade of row _graded_row[i]. None: every row is graded itself.
        self._graded_row: np.ndarray | None = None
        rows_to_grade = batch
        if has_larger_rollouts(batch):
            self._graded_row = _find_graded_rows(batch, outcomes)
            rows_graded = np.unique(self._graded_row)
            rows_to_grade = batch.select_idxs(rows_graded)
            if outcomes is not None:
                outcomes = outcomes[rows_graded]
        self._grading = reward.begin(rows_to_grade, outcomes)
        self.is_joined = False

    def join(self, batch: DataProto) -> RewardOutput:
        """Wait for the rewards, and add them to the batch.

        The batch gets `token_level_scores` [B, T], `reward_extra` (values that graders return
        besides the score), the times of grading, and metrics.

        Args:
            batch: the batch that was passed at construction.

        Raises:
            RewardError: too many responses could not be graded.
        """
        output = self._grading.result()
        if self._graded_row is not None:
            output = _expand_grades(output, self._graded_row, batch)

        batch.batch["token_level_scores"] = output.scores
        # From a column for each name to a dictionary for each row.
        extras = [{} for _ in range(len(batch))]
        for name, values in output.extra.items():
            for extra, value in zip(extras, values, strict=True):
                extra[name] = value
        batch.non_tensor_batch["reward_extra"] = object_array(extras)
        graded_at = output.graded_at or [math.nan] * len(batch)
        batch.batch[GRADED_AT] = torch.tensor(graded_at, dtype=torch.float64)
        batch.meta_info["metrics"] = {**batch.meta_info.get("metrics", {}), **output.metrics}
        self.is_joined = True
        return output

    def cancel(self) -> None:
        """Stop grading, unless the rewards have been joined."""
        if not self.is_joined:
            self._grading.cancel()


def _find_graded_rows(batch: DataProto, outcomes: np.ndarray | None) -> np.ndarray:
    """Find the row whose grade each row takes.

    A row that was graded early keeps its own grade. Every other row takes the grade of the first row
    of its rollout that was not graded early.

    Args:
        batch: the responses.
        outcomes: [B], outcomes of early grading, None where a row has none; or None for no row.

    Returns:
        Row numbers, [B].
    """
    first_rows = {}
    graded_row = []
    for row, number in enumerate(rollout_numbers(batch)):
        if outcomes is not None and outcomes[row] is not None:
            graded_row.append(row)
        else:
            graded_row.append(first_rows.setdefault(number, row))
    return np.array(graded_row)


def _expand_grades(output: RewardOutput, graded_row: np.ndarray, batch: DataProto) -> RewardOutput:
    """Give each row the rewards of the row whose grade it takes.

    Args:
        output: rewards of the distinct rows in `graded_row`, in ascending order.
        graded_row: row whose grade each row takes, [B].
        batch: all rows.
    """
    # [B], the place of each row's grade in the output.
    places = np.searchsorted(np.unique(graded_row), graded_row)
    scores = output.scores[torch.from_numpy(places)]
    lengths = batch.batch["attention_mask"][:, -scores.shape[1] :].sum(-1).tolist()
    takes_other_grade = graded_row != np.arange(len(graded_row))
    for row in np.flatnonzero(takes_other_grade).tolist():
        # The score is at the last token of the graded row; move it to the last token of this one.
        total = scores[row].sum()
        scores[row] = 0.0
        scores[row, max(lengths[row] - 1, 0)] = total
    extra = {name: values[places] for name, values in output.extra.items()}
    graded_at = [output.graded_at[place] for place in places] if output.graded_at else []
    return RewardOutput(scores, extra, output.metrics, graded_at)


def grade(reward: RewardManager, batch: DataProto) -> RewardOutput:
    """Grade a batch and wait; the batch gets the columns of `BatchRewards.join`."""
    return BatchRewards(reward, batch).join(batch)


class ModelReward(RewardManager):
    """A reward model in addition to graders: the score of a response is the sum of both.

    A response that the graders do not grade has the score of the model alone.

    Its metrics are those of the graders, and in addition: mean, max and min of the two summands,
    `reward/rm_score` and `reward/rule_score`; `reward/rm_cut`, the number of inputs that were too
    long for the reward model; `timing_s/rm`, the seconds of the model's slowest rank.
    """

    def __init__(self, model: RewardModelWorker, graders: RewardManager) -> None:
        self.model = model
        self.graders = graders
        self.close = graders.close

    @cached_property
    def reads_chats(self) -> bool:
        """Whether the reward model has a chat template of its own."""
        return self.model.reads_chats()

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        """Start the graders and the reward model.

        Waiting for the result also adds the model's `rm_scores` [B, T] to the batch.

        Args:
            data: the responses.
            outcomes: outcomes of early grading.
        """
        grading = self.graders.begin(data, outcomes)
        try:
            objects = [*MODEL_OBJECTS]
            if self.reads_chats:
                objects += [*CHAT_OBJECTS, SOLUTION_MESSAGES]
            # A future: the model computes while the graders work.
            scores: Any = self.model.compute_rm_score(model_inputs(data, objects))
        except BaseException:
            # Nobody will wait for the graders, so they are stopped.
            grading.cancel()
            raise

        def result() -> RewardOutput:
            """Wait for the graders, then for the reward model."""
            by_rules = grading.result()
            return _add_model_scores(data, by_rules, scores.get())

        return Grading(result, grading.cancel)


def _add_model_scores(data: DataProto, by_rules: RewardOutput, by_model: DataProto) -> RewardOutput:
    """Add the scores of a reward model to those of graders.

    Args:
        data: the responses, which get the column `rm_scores` [B, T].
        by_rules: rewards of the graders.
        by_model: output of the reward model: `rm_scores` and metrics.

    Returns:
        The sums, with the metrics of `ModelReward`.
    """
    model_metrics = reduce_metrics(by_model.meta_info.pop("metrics"))
    num_cut = model_metrics["reward/rm_cut"]
    if num_cut:
        logger.warning(
            "reward model: %d of %d inputs were too long (reward_model.max_length) and "
            "lost their beginning.",
            num_cut,
            len(data),
        )
    model_scores = data.union(by_model).batch["rm_scores"]
    totals = model_scores.sum(-1)
    summands = spread("reward/rm_score", totals)
    summands |= spread("reward/rule_score", by_rules.scores.sum(-1))
    metrics = dict(by_rules.metrics)
    for name, value in summands.items():
        # The last part of the name says how batches are combined: mean, max or min.
        metrics[name] = Metric(value, name.rpartition("/")[2], len(totals))
    metrics["reward/rm_cut"] = Metric(num_cut, "sum")
    metrics["timing_s/rm"] = Metric(model_metrics["timing_s/rm"], "max")
    extra = {**by_rules.extra, "rm_score": object_array(totals.tolist())}
    return RewardOutput(model_scores + by_rules.scores, extra, metrics, by_rules.graded_at)
