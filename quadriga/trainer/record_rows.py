# SPDX-License-Identifier: Apache-2.0
"""Converts batches to rows of the rollout record: Arrow tables without padding.

Legend: B rows, P prompt positions, T response positions, L layers, k experts per token.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from quadriga.algorithms.registry import ROLLOUT_ID
from quadriga.config import DataConfig
from quadriga.observe.records import SCHEMA
from quadriga.observe.tracking.jsonl import jsonable
from quadriga.protocol import DataProto
from quadriga.protocol.memory import images_key
from quadriga.protocol.times import GRADED_AT, TIME_COLUMNS, TIMES
from quadriga.redact import redact
from quadriga.trainer.responses import user_columns
from quadriga.trainer.rollout_rows import name_rollouts, scored_rows

_TOKEN_COLUMNS = {
    "response_ids": "responses",
    "echo_mask": "echo_mask",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_prob",
    "teacher_log_probs": "teacher_log_prob",
    "rollout_is_weights": "rollout_is_weights",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "token_scores": "token_level_scores",
    "token_versions": "token_versions",
    "token_staleness": "token_staleness",
}
"""Columns of the record with a value per response token, and the batch's columns [B, T]."""
JSON_COLUMNS = {
    "turn_spans": "turn_spans",
    "turn_rewards": "turn_rewards",
    "turn_states": "turn_states",
    "tool_rewards": "tool_rewards",
    "turn_scores": "turn_scores",
    "messages": "solution_messages",
}
"""Columns of the record that hold JSON, and the batch's object columns."""
_ERROR = "reward_error"
ROUTES = "routed_experts"


def record_table(batch: DataProto, config: DataConfig, *, not_computed: str = "") -> pa.Table:
    """Make the rows of the record, in the order of the data.

    Args:
        batch: graded responses, with everything that was computed for them.
        config: names of the columns with the data source, images and videos.
        not_computed: the reason to record in rows without log-probs of the trainer. "": the update
            skipped these rows, because their advantages are 0.

    Returns:
        B rows with the columns of `SCHEMA`.
    """
    return _ConvertedBatch(batch, config).table(not_computed)


def _json(value: Any) -> str:
    """A value as JSON, without secrets."""
    return _utf8(json.dumps(redact(jsonable(value)), ensure_ascii=False))


def _utf8(value: Any) -> str:
    """A value as a text that UTF-8 can encode: half of a surrogate pair becomes an escape."""
    return str(value).encode(errors="backslashreplace").decode()


class _ConvertedBatch:
    """Converts the columns of a batch.

    Attributes:
        order: [B], for each row in the order of the data, its place in the batch.
    """

    def __init__(self, batch: DataProto, config: DataConfig) -> None:
        self.batch = batch
        self.tensors = batch.batch
        self.objects = batch.non_tensor_batch
        self.config = config
        # Rows that were not ordered for the ranks have no index.
        self.order = torch.arange(len(batch))
        if "row_index" in self.tensors.keys():
            self.order = self.tensors["row_index"].cpu().argsort()
        # Masks of the tokens, as opposed to padding: [B, P + T], [B, P], [B, T].
        self._token_mask = self._in_order("attention_mask").astype(bool)
        width = self.tensors["responses"].shape[1]
        self._prompt_mask = self._token_mask[:, :-width]
        self._response_mask = self._token_mask[:, -width:]

    def table(self, not_computed: str) -> pa.Table:
        """Convert all columns; those that the batch does not have are null.

        Args:
            not_computed: as for `record_table`.
        """
        num_rows = len(self.order)
        columns = dict(self._values_of_rows())
        columns["prompt_ids"] = _lists(self._in_order("prompts"), self._prompt_mask)
        for name, source in _TOKEN_COLUMNS.items():
            if source in self.tensors.keys():
                columns[name] = _lists(self._in_order(source), self._response_mask)
        columns |= self._masks()
        columns |= self._log_probs(not_computed)
        for name, source in JSON_COLUMNS.items():
            columns[name] = self._texts(source, _json)
        columns |= self._grader_outputs()
        columns["row"] = self._data_rows()
        if ROUTES in self.tensors.keys():
            # Numbers of experts fit into 16 bits, and are the largest column by far.
            routes = self._in_order(ROUTES).astype(np.int16)
            routes_and_masks = zip(routes, self._token_mask, strict=True)
            columns["routed_experts"] = [row[mask].tobytes() for row, mask in routes_and_masks]

        arrays = []
        # Every file has all columns in the same order, so that files can be read together.
        for field in SCHEMA:
            values = columns.get(field.name)
            if values is None:
                arrays.append(pa.nulls(num_rows, field.type))
            elif isinstance(values, pa.Array):
                arrays.append(values.cast(field.type))
            else:
                arrays.append(pa.array(values, field.type))
        return pa.Table.from_arrays(arrays, schema=SCHEMA)

    def _in_order(self, name: str) -> np.ndarray:
        """A tensor column, in the order of the data."""
        return self.tensors[name].detach().cpu()[self.order].numpy()

    def _objects_in_order(self, name: str) -> list[Any]:
        """An object column, in the order of the data."""
        return list(self.objects[name][self.order.numpy()])

    def _texts(self, name: str, convert: Callable[[Any], str] = _utf8) -> list[str | None] | None:
        """An object column as texts; None if the batch does not have it."""
        if name not in self.objects:
            return None
        values = self._objects_in_order(name)
        return [None if value is None else convert(value) for value in values]

    def _values_of_rows(self) -> dict[str, Any]:
        """Columns with one value per row."""
        uids = list(map(str, self._objects_in_order("uid")))
        rollout_ids = self._texts(ROLLOUT_ID)
        if rollout_ids is None:
            rollout_ids = name_rollouts(uids)
        # The score of a row without one is null in the record; in the batch it is 0.
        has_score = scored_rows(self.batch)[self.order].numpy()
        scores = pa.array(self._in_order("token_level_scores").sum(1), mask=~has_score)
        columns = {
            "rollout_id": rollout_ids,
            "uid": uids,
            # The number of each row in the order of the data, and its place in the batch.
            "row_index": np.arange(len(uids)),
            "position": self.order.numpy(),
            "agent": self._texts("agent"),
            "source_row": self._texts("source_row"),
            "data_source": self._texts(self.config.reward_fn_key),
            "finish_reason": self._texts("finish_reason"),
            "score": scores,
        }
        if TIMES in self.tensors.keys():
            times = self._in_order(TIMES).T
            # `TIMES` lacks the last one, the time of grading, which the batch has in `GRADED_AT`.
            for name, values in zip(TIME_COLUMNS[:-1], times, strict=True):
                columns[name] = _null_if_nan(values)
        if GRADED_AT in self.tensors.keys():
            columns[GRADED_AT] = _null_if_nan(self._in_order(GRADED_AT))
        if "num_turns" in self.objects:
            columns["num_turns"] = self._objects_in_order("num_turns")
        if "token_level_rewards" in self.tensors.keys():
            columns["reward"] = self._in_order("token_level_rewards").sum(1)
        if "reward_baselines" in self.tensors.keys():
            columns["reward_baseline"] = self._in_order("reward_baselines")
        if "multi_modal_inputs" in self.objects:
            columns["image_hash"] = self._image_hashes()
        return columns

    def _image_hashes(self) -> list[str | None]:
        """Hash of the images of each row; None for a row without any."""
        # Responses to the same prompt share one object, whose hash is computed once.
        hash_of_object = {}
        hashes = []
        for inputs in self._objects_in_order("multi_modal_inputs"):
            if inputs and id(inputs) not in hash_of_object:
                hash_of_object[id(inputs)] = images_key(inputs)
            hashes.append(hash_of_object.get(id(inputs)))
        return hashes

    def _masks(self) -> dict[str, Any]:
        """`response_mask` as generated, and `trained_mask` if tokens were masked later."""
        trained_mask = self._in_order("response_mask").astype(bool)
        if "token_versions" not in self.tensors.keys():
            return {"response_mask": _lists(trained_mask, self._response_mask)}
        # Off-policy correction changes the mask, but not the versions of the tokens, which are
        # negative where the policy did not generate the token.
        is_generated = self._in_order("token_versions") >= 0
        columns = {"response_mask": _lists(is_generated, self._response_mask)}
        if not np.array_equal(is_generated, trained_mask):
            columns["trained_mask"] = _lists(trained_mask, self._response_mask)
        return columns

    def _log_probs(self, not_computed: str) -> dict[str, Any]:
        """Log-probs and entropies of the trainer, or why there are none.

        They come from the pass for old log-probs or from the update's first forward pass.

        Args:
            not_computed: as for `record_table`.
        """
        if "old_log_probs" in self.tensors.keys():
            columns = {"log_probs": _lists(self._in_order("old_log_probs"), self._response_mask)}
            if "entropys" in self.tensors.keys():
                columns["entropies"] = _lists(self._in_order("entropys"), self._response_mask)
            return columns
        if "is_computed" not in self.tensors.keys():
            return {"not_computed": [not_computed or None] * len(self.order)}

        # The update has computed the log-probs of some rows only.
        is_computed = self._in_order("is_computed").astype(bool)
        log_probs = self._in_order("update_log_probs")
        entropies = self._in_order("update_entropys")
        reason = not_computed or "the row cannot change the gradient: its advantages are 0"
        return {
            "log_probs": _lists(log_probs, self._response_mask, is_computed),
            "entropies": _lists(entropies, self._response_mask, is_computed),
            "not_computed": [None if computed else reason for computed in is_computed],
        }

    def _grader_outputs(self) -> dict[str, Any]:
        """Errors of graders, and the values that they returned beside the score."""
        errors = []
        parts = []
        for extra in self._objects_in_order("reward_extra"):
            entries = dict(extra)
            error = entries.pop(_ERROR, None)
            errors.append(_utf8(error) if error else None)
            parts.append(_json(entries) if entries else None)
        return {_ERROR: errors, "reward_parts": parts}

    def _data_rows(self) -> list[str | None]:
        """The user's columns of each data row as JSON; None for a row without any."""
        # Responses to a prompt share a data row, whose JSON is made once.
        texts = {}
        rows = []
        for place, uid in zip(self.order.tolist(), self._objects_in_order("uid"), strict=True):
            if uid not in texts:
                columns = user_columns(self.objects, place, self.config)
                reward_model = self.objects["reward_model"][place]
                if reward_model:
                    columns["reward_model"] = reward_model
                texts[uid] = _json(columns) if columns else None
            rows.append(texts[uid])
        return rows


def _lists(
    values: np.ndarray, mask: np.ndarray, has_values: np.ndarray | None = None
) -> pa.ListArray:
    """Remove the padding of token values: a list for each row.

    Args:
        values: [B, T], with padding.
        mask: [B, T], True where there is a token.
        has_values: [B], False for rows that become null. None: no row does.
    """
    is_null = None
    if has_values is not None:
        mask = mask & has_values[:, None]
        is_null = pa.array(~has_values)
    # List i has the values from offset i to offset i + 1.
    offsets = np.zeros(len(mask) + 1, np.int32)
    np.cumsum(mask.sum(1), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[mask]), mask=is_null)


def _null_if_nan(values: np.ndarray) -> pa.Array:
    """Values [B] with null instead of NaN."""
    return pa.array(values, mask=np.isnan(values))


def join_tables(tables: Iterable[pa.Table]) -> pa.Table:
    """Concatenate the rows of several batches; `row_index` and `position` count over all rows."""
    table = pa.concat_tables(tables)
    numbers = pa.array(np.arange(len(table)), pa.int32())
    for name in ("row_index", "position"):
        table = table.set_column(table.column_names.index(name), SCHEMA.field(name), numbers)
    return table
