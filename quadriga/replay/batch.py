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
from quadriga.rollout.sequences import append_responses
from quadriga.trainer.record_rows import JSON_COLUMNS
from quadriga.trainer.responses import with_prompt_columns

_OBJECT_COLUMNS = ("num_turns", "finish_reason", "agent")


class RecordedStep:
    """The record of a step, from which the batch of the step is made again.

    Args:
        record: the record of the step.
        path: the file of the record, for errors.
    """

    def __init__(self, record: StepRecord, path: Path) -> None:
        self.record = record
        self._where = str(path)  # the place that errors name
        self._rows = record.rows

    def batch(
        self,
        prompts: DataProto,
        pad_token_id: int,
        *,
        has_own_prompts: bool,
        with_scores: bool,
        with_routes: bool,
    ) -> DataProto:
        """Make the rows that the step learned from, in the order of the record.

        Args:
            prompts: all prompts that the step took from the data, with `uid`.
            pad_token_id: token that fills prompts on the left and responses on the right.
            has_own_prompts: whether agent loops wrote the prompts, which then need not have the
                tokens of the prompts in the data.
            with_scores: whether to add the recorded scores, so that nothing is graded.
            with_routes: whether to add the recorded choices of experts, which the update repeats.

        Returns:
            The columns of `generate_responses`; with `with_scores` also those of `grade`.

        Raises:
            DataError: the data have other prompts now, or the images of a row differ from those of
                its data row.
        """
        rows = self._select_prompts(prompts)
        num_prompt_tokens, num_response_tokens = self.record.facts["widths"]
        columns = self._prompt_columns(rows, num_prompt_tokens, pad_token_id, has_own_prompts)
        responses = zip(
            self._values("response_ids"),
            self._values("response_mask"),
            self._values("rollout_log_probs"),
            strict=True,
        )
        tensors = append_responses(
            columns,
            list(responses),
            num_response_tokens,
            pad_token_id,
            self._routes() if with_routes else [],
            self._optional_values("token_versions") or (),
        )
        echo_mask = self._optional_values("echo_mask")
        if echo_mask:
            tensors["echo_mask"] = self._pad(echo_mask, torch.int64)
        baselines = self._optional_values("reward_baseline")
        if baselines:
            tensors["reward_baselines"] = torch.tensor(baselines)
        objects = {}
        for name in _OBJECT_COLUMNS:
            values = self._optional_values(name)
            if values:
                objects[name] = object_array(values)
        for name, target in JSON_COLUMNS.items():
            texts = self._optional_values(name)
            if texts:
                objects[target] = object_array(json.loads(text or "null") for text in texts)
        batch = with_prompt_columns(rows, DataProto.from_dict(tensors, objects))
        # Added after `with_prompt_columns`: with `rollout_id` it would expect one prompt for each
        # rollout, but `rows` has one prompt for each row.
        batch.non_tensor_batch[ROLLOUT_ID] = object_array(self._values("rollout_id"))
        if with_scores:
            scores = self._pad(self._values("token_scores"), torch.float32)
            batch.batch["token_level_scores"] = scores
            batch.non_tensor_batch["reward_extra"] = self._reward_extra()
        return batch

    # Columns

    def _values(self, name: str) -> list[Any]:
        """Values of a column, one for each row."""
        return self._rows.column(name).to_pylist()

    def _optional_values(self, name: str) -> list[Any] | None:
        """Values of a column, one for each row; None if the run does not have the column."""
        if name not in self._rows.column_names:
            return None
        column = self._rows.column(name)
        # A column that the run does not have is null in every row.
        return None if column.null_count == len(column) else column.to_pylist()

    def _pad(self, lists: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Make [B, T] of a list for each row, with a value for each response token.

        The padding is 0.
        """
        _, width = self.record.facts["widths"]
        padded = torch.zeros(len(lists), width, dtype=dtype)
        for row, values in enumerate(lists):
            padded[row, : len(values)] = torch.tensor(values, dtype=dtype)
        return padded

    def _routes(self) -> list[np.ndarray | None]:
        """Experts of the tokens of each row, [tokens, L, k]; None if they are not recorded."""
        shape = self.record.facts.get("route_shape")
        routes = []
        for content in self._values(ROUTES):
            if content is None or shape is None:
                routes.append(None)
            else:
                # An array on bytes is read-only, so it is copied.
                routes.append(np.frombuffer(content, np.int16).reshape(-1, *shape).copy())
        return routes

    def _reward_extra(self) -> np.ndarray:
        """Column `reward_extra`: values that graders returned beside the score of each row.

        Thinning may have removed some of them from the record.
        """
        extras = []
        columns = [self._values(name) for name in ("score", "reward_error", "reward_parts")]
        for score, error, parts in zip(*columns, strict=True):
            extra = {"reward_error": error or "", **json.loads(parts or "{}")}
            # A null in the record is a missing score, not a score of 0.
            if score is None:
                extra[UNSCORED] = True
            extras.append(extra)
        return object_array(extras)

    # Prompts

    def _select_prompts(self, prompts: DataProto) -> DataProto:
        """Select the prompt of each recorded row.

        Args:
            prompts: all prompts that the step takes from the data, with `uid`.

        Raises:
            DataError: the record has a prompt that is not in `prompts`, or a recorded `uid` stands
                for another row of the data now.
        """
        places = {str(uid): place for place, uid in enumerate(prompts.non_tensor_batch["uid"])}
        uids = self._values("uid")
        unknown_uids = sorted({uid for uid in uids if uid not in places})
        if unknown_uids:
            raise DataError(
                self._where,
                got=f"rows of the prompt {unknown_uids[0]}",
                expected=f"rows of the {len(places)} prompts that the step takes from the data",
                fix="Put data.train_files and data.train_batch_size back as they were in the run.",
            )
        rows = prompts.select_idxs([places[uid] for uid in uids])
        # The uid counts prompts, so after a change of the data it may name another row.
        recorded_sources = self._optional_values("source_row")
        sources = rows.non_tensor_batch.get("source_row")
        if recorded_sources is not None and sources is not None:
            pairs = zip(uids, map(str, sources), recorded_sources, strict=True)
            for uid, source, recorded_source in pairs:
                if recorded_source is not None and source != recorded_source:
                    raise self._changed_data_error(uid, source, recorded_source)
        return rows

    def _prompt_columns(
        self, rows: DataProto, width: int, pad_token_id: int, has_own_prompts: bool
    ) -> dict[str, torch.Tensor]:
        """Make `input_ids`, `attention_mask` [B, P] and `position_ids` of the recorded prompts.

        Args:
            rows: the prompt of each recorded row, from the data.
            width: P in the run.
            pad_token_id: token that fills prompts on the left.
            has_own_prompts: whether the prompts may differ from those of the data.

        Raises:
            DataError: a prompt or an image differs from that in the data.
        """
        input_ids = torch.full((len(rows), width), pad_token_id)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(self._values("prompt_ids")):
            start = width - len(ids)
            input_ids[row, start:] = torch.tensor(ids)
            mask[row, start:] = 1
        if not has_own_prompts:
            self._require_tokens(rows, input_ids, mask)
        positions = compute_position_id_with_mask(mask)
        if "multi_modal_inputs" in rows.non_tensor_batch:
            self._require_images(rows)
            # The positions of an image's tokens depend on the size of the image, which is not
            # recorded. The data set has computed them.
            positions = rows.batch["position_ids"]
        return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}

    def _require_tokens(self, rows: DataProto, input_ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Refuse recorded prompts, [B, P], that have other tokens in the data now."""
        is_equal = (rows.batch["attention_mask"] == mask).all(1)
        is_equal &= ((rows.batch["input_ids"] == input_ids) | (mask == 0)).all(1)
        if not is_equal.all():
            first_row = int(is_equal.long().argmin())
            uid = self._values("uid")[first_row]
            raise self._changed_data_error(uid, "other tokens in its prompt", "the recorded ones")

    def _require_images(self, rows: DataProto) -> None:
        """Refuse recorded rows whose images are not those of the data."""
        hashes = self._values("image_hash")
        inputs_of_rows = rows.non_tensor_batch["multi_modal_inputs"]
        for row, (recorded_hash, inputs) in enumerate(zip(hashes, inputs_of_rows, strict=True)):
            # The hash of a row without images is None.
            if recorded_hash != (images_key(inputs) if inputs else None):
                raise DataError(
                    f"{self._where}, row {row}",
                    got="images that differ from those of the data row",
                    expected="the images that the model saw",
                    fix="Put the images of the data back. Images that tools have shown are not in "
                    "the record, and such a step cannot be replayed.",
                )

    def _changed_data_error(self, uid: str, got: str, recorded: str) -> DataError:
        """Error for a prompt that is not as it was in the run.

        Args:
            uid: the prompt.
            got: what the data have now.
            recorded: what the record has instead.
        """
        return DataError(
            f"{self._where}, prompt {uid}",
            got=f"{got} in the data",
            expected=recorded,
            fix="The data, the tokenizer or the chat template have changed since the run. Put them "
            "back, or name the earlier ones with --edit, such as data.train_files=FILE.",
        )
