# SPDX-License-Identifier: Apache-2.0
"""The batch of a recorded step: prompts from the data, with recorded responses and scores.

Legend: B rows, P prompt positions, T response positions, L layers, k experts per token.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quadriga.algorithms.registry import ROLLOUT_ID
from quadriga.data.padding import compute_position_id_with_mask
from quadriga.errors import DataError
from quadriga.models.experts import ROUTES
from quadriga.observe.records import StepRecord
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.protocol.memory import images_key
from quadriga.rewards.outcome import UNSCORED
from quadriga.rollout.sequences import with_responses
from quadriga.trainer.responses import with_prompt_columns

_OBJECT_COLUMNS = ("num_turns", "finish_reason", "agent")
_JSON_COLUMNS = {
    "turn_spans": "turn_spans",
    "turn_rewards": "turn_rewards",
    "turn_states": "turn_states",
    "tool_rewards": "tool_rewards",
    "turn_scores": "turn_scores",
    "messages": "solution_messages",
}
"""Object column of the batch of each column of the record with JSON."""


class RecordedStep:
    """The record of a step, from which its batch is made again.

    Args:
        record: the record.
        path: its file, for errors.
    """

    def __init__(self, record: StepRecord, path: Path) -> None:
        self.record = record
        self._where = str(path)
        self._rows = record.rows

    @property
    def num_prompt_batches(self) -> int:
        """Batches of prompts that the step took; several with dynamic sampling."""
        return int(self.record.facts["metrics"].get("filter_groups/num_batches", 1))

    @property
    def is_thinned(self) -> bool:
        """Whether texts, and values of graders beside the score, are not in the record any more."""
        return bool(self.record.facts.get("is_thinned"))

    def batch(
        self,
        prompts: DataProto,
        pad_token_id: int,
        *,
        has_own_prompts: bool,
        with_scores: bool,
        with_routes: bool,
    ) -> DataProto:
        """Make the rows that the step learned from, in the order of the data.

        Args:
            prompts: all prompts that the step took, with `uid`.
            pad_token_id: fills prompts on the left and responses on the right.
            has_own_prompts: whether agent loops write the prompts, so that they differ from those of
                the data.
            with_scores: whether to add the recorded scores, so that nothing is graded.
            with_routes: whether the update repeats the recorded choices of experts.

        Returns:
            The columns of `generate_responses`, and of `grade` if requested.

        Raises:
            DataError: the data have other prompts, or images of tools are missing.
        """
        rows = self._prompt_rows(prompts)
        num_prompt_tokens, num_response_tokens = self.record.facts["widths"]
        columns = self._prompt_columns(rows, num_prompt_tokens, pad_token_id, has_own_prompts)
        values = [self._lists(name) for name in ("response_ids", "response_mask")]
        responses = zip(*values, self._lists("rollout_log_probs"), strict=True)
        routes: list[np.ndarray | None] = []
        if with_routes:
            routes = self._routes()
        tensors = with_responses(
            columns,
            list(responses),
            num_response_tokens,
            pad_token_id,
            routes,
            self._optional("token_versions") or (),
        )
        echo_mask = self._optional("echo_mask")
        if echo_mask:
            tensors["echo_mask"] = self._padded(echo_mask, torch.int64)
        baselines = self._optional("reward_baseline")
        if baselines:
            tensors["reward_baselines"] = torch.tensor(baselines)
        objects = {ROLLOUT_ID: object_array(self._lists("rollout_id"))}
        for name in _OBJECT_COLUMNS:
            values_of_rows = self._optional(name)
            if values_of_rows:
                objects[name] = object_array(values_of_rows)
        for name, target in _JSON_COLUMNS.items():
            texts = self._optional(name)
            if texts:
                objects[target] = object_array(json.loads(text or "null") for text in texts)
        # Rows of one rollout are consecutive, so each row counts as a rollout of its prompt here.
        rollout_ids = objects.pop(ROLLOUT_ID)
        batch = with_prompt_columns(rows, DataProto.from_dict(tensors, objects))
        batch.non_tensor_batch[ROLLOUT_ID] = rollout_ids
        if with_scores:
            batch.batch["token_level_scores"] = self._padded(
                self._lists("token_scores"), torch.float32
            )
            batch.non_tensor_batch["reward_extra"] = self._graded()
        return batch

    # Columns

    def _lists(self, name: str) -> list[Any]:
        return self._rows.column(name).to_pylist()

    def _optional(self, name: str) -> list[Any] | None:
        """Values of a column; None if the run does not have it."""
        if name not in self._rows.column_names:
            return None
        column = self._rows.column(name)
        return None if column.null_count == len(column) else column.to_pylist()

    def _padded(self, lists: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Values of response tokens as [B, T], with 0 on the padding."""
        _, width = self.record.facts["widths"]
        padded = torch.zeros(len(lists), width, dtype=dtype)
        for row, values in enumerate(lists):
            padded[row, : len(values)] = torch.tensor(values, dtype=dtype)
        return padded

    def _routes(self) -> list[np.ndarray | None]:
        """Experts of each row's tokens, [tokens, L, k]; None for a row without."""
        shape = self.record.facts.get("route_shape")
        routes: list[np.ndarray | None] = []
        for content in self._lists(ROUTES):
            if content is None or shape is None:
                routes.append(None)
            else:
                routes.append(np.frombuffer(content, np.int16).reshape(-1, *shape).copy())
        return routes

    def _graded(self) -> np.ndarray:
        """Values that graders returned beside each score, as far as the record holds them."""
        extras = []
        columns = [self._lists(name) for name in ("score", "reward_error", "reward_parts")]
        for score, error, parts in zip(*columns, strict=True):
            extra = {"reward_error": error or "", **json.loads(parts or "{}")}
            if score is None:
                extra[UNSCORED] = True
            extras.append(extra)
        return object_array(extras)

    # Prompts

    def _prompt_rows(self, prompts: DataProto) -> DataProto:
        """The prompt of each recorded row."""
        places = {str(uid): place for place, uid in enumerate(prompts.non_tensor_batch["uid"])}
        uids = self._lists("uid")
        unknown_uids = sorted({uid for uid in uids if uid not in places})
        if unknown_uids:
            raise DataError(
                self._where,
                got=f"rows of the prompt {unknown_uids[0]}",
                expected=f"rows of the {len(places)} prompts that the step takes from the data",
                fix="Put data.train_files and data.train_batch_size back as they were in the run.",
            )
        rows = prompts.select_idxs([places[uid] for uid in uids])
        recorded_sources = self._optional("source_row")
        sources = rows.non_tensor_batch.get("source_row")
        if recorded_sources is not None and sources is not None:
            pairs = zip(uids, map(str, sources), recorded_sources, strict=True)
            for uid, source, recorded_source in pairs:
                if recorded_source is not None and source != recorded_source:
                    raise self._other_data(uid, source, recorded_source)
        return rows

    def _prompt_columns(
        self, rows: DataProto, width: int, pad_token_id: int, has_own_prompts: bool
    ) -> dict[str, torch.Tensor]:
        """`input_ids`, `attention_mask` [B, P] and `position_ids` of the recorded prompts."""
        prompt_ids = self._lists("prompt_ids")
        input_ids = torch.full((len(rows), width), pad_token_id)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(prompt_ids):
            start = width - len(ids)
            input_ids[row, start:] = torch.tensor(ids)
            mask[row, start:] = 1
        is_equal = bool(((rows.batch["input_ids"] == input_ids) | (mask == 0)).all())
        is_equal = is_equal and torch.equal(rows.batch["attention_mask"], mask)
        if not is_equal and not has_own_prompts:
            is_same = (rows.batch["attention_mask"] == mask).all(1)
            is_same &= ((rows.batch["input_ids"] == input_ids) | (mask == 0)).all(1)
            row = int(is_same.long().argmin())
            uid = self._lists("uid")[row]
            raise self._other_data(uid, "other tokens in its prompt", "the recorded ones")
        positions = compute_position_id_with_mask(mask)
        if "multi_modal_inputs" in rows.non_tensor_batch:
            self._require_images(rows)
            positions = rows.batch["position_ids"]
        return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}

    def _require_images(self, rows: DataProto) -> None:
        """Refuse rows whose images are not those of their data row."""
        hashes = self._lists("image_hash")
        inputs_of_rows = rows.non_tensor_batch["multi_modal_inputs"]
        for row, (recorded_hash, inputs) in enumerate(zip(hashes, inputs_of_rows, strict=True)):
            if recorded_hash != (images_key(inputs) if inputs else None):
                raise DataError(
                    f"{self._where}, row {row}",
                    got="images that differ from those of the data row",
                    expected="the images that the model saw",
                    fix="Put the images of the data back. Images that tools have shown are not in "
                    "the record, and such a step cannot be replayed.",
                )

    def _other_data(self, uid: str, got: str, recorded: str) -> DataError:
        return DataError(
            f"{self._where}, prompt {uid}",
            got=f"{got} in the data",
            expected=recorded,
            fix="The data, the tokenizer or the chat template have changed since: put them back, or "
            "name them with --edit data.train_files=FILE.",
        )
