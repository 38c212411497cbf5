# SPDX-License-Identifier: Apache-2.0
"""From token ids of rows to the columns of a batch: truncation, padding, position ids, collation.

A truncation mode names the side that loses tokens: `left` keeps the end, `right` keeps the beginning, `middle` keeps
both ends (the end gets the odd token), `error` refuses.

Shapes: `B` sequences, `L` positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import DataError
from quadriga.protocol.columns import object_array

Truncation = Literal["error", "left", "right", "middle"]


def truncate(
    ids: Sequence[int], max_length: int, mode: Truncation, *, where: str = "a prompt"
) -> list[int]:
    """At most `max_length` of the token ids `ids`, cut as `mode` says.
    Raises DataError: the mode is `error` and `ids` are too long (it names `where`), or there is no such mode."""
    head, tail = _kept_ends(len(ids), max_length, mode, where)
    return [*ids[:head], *ids[len(ids) - tail :]]


def pad_left(values: Tensor, length: int, fill: int) -> Tensor:
    """[..., L] -> [..., length] with `fill` in front; what is already that long stays as it is."""
    return F.pad(values, (max(length - values.shape[-1], 0), 0), value=fill)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Truncation = "error",
    *,
    where: str = "a prompt",
) -> tuple[Tensor, Tensor]:
    """Bring a tokenizer's output to exactly `max_length` columns: both tensors [B, L] -> [B, max_length].

    `pad_token_id` fills `input_ids`, 0 the mask, in front where `left_pad`. What is too long is cut as `truncate` does.
    """
    length = input_ids.shape[-1]
    head, tail = _kept_ends(length, max_length, truncation, where)
    if head + tail < length:
        columns = (input_ids, attention_mask)
        input_ids, attention_mask = (
            torch.cat([one[:, :head], one[:, length - tail :]], dim=-1) for one in columns
        )
    num_padding = max(max_length - length, 0)
    padding = (num_padding, 0) if left_pad else (0, num_padding)
    return F.pad(input_ids, padding, value=pad_token_id), F.pad(attention_mask, padding)


def _kept_ends(length: int, max_length: int, mode: str, where: str) -> tuple[int, int]:
    """How many tokens stay at the beginning and how many at the end."""
    if mode not in get_args(Truncation):
        raise DataError(
            "data.truncation", got=repr(mode), expected=f"one of {', '.join(get_args(Truncation))}"
        )
    if length <= max_length:
        return length, 0
    if mode == "error":
        how = "cut them with data.truncation=left, right or middle"
        fix = f"Raise that length, leave such rows out with data.filter_overlong_prompts=true, or {how}."
        expected = f"at most data.max_prompt_length={max_length}"
        raise DataError(where, got=f"{length} tokens", expected=expected, fix=fix)
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[mode]
    return head, max_length - head


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Number the valid tokens of a mask [..., L] from 0, int64 [..., L]; padding, on either side, gets 0."""
    mask = mask.to(torch.int64)
    return (mask.cumsum(dim=-1) - 1).clamp(min=0) * mask


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | np.ndarray]:
    """Stack tensors to [B, ...]; put everything else, of whatever shape, into object arrays [B].
    Raises DataError: rows differ in their keys, or the tensors of a key in their shape."""
    if not data_list:
        raise DataError("collate_fn", got="no rows", expected="at least one")
    if wrong := [row for row in data_list if not isinstance(row, Mapping)]:
        raise DataError(
            "collate_fn",
            got=f"a {type(wrong[0]).__name__}",
            expected="rows, each a dictionary of columns",
        )
    keys = list(data_list[0])
    for position, row in enumerate(data_list):
        if set(row) != set(keys):
            odd = ", ".join(sorted(set(row) ^ set(keys)))
            got = f"row {position} of the batch and row 0, of which only one has {odd}"
            fix = "Let the data set give each row every key, with None where there is no value."
            raise DataError("collate_fn", got=got, expected="the same keys in every row", fix=fix)
    columns: dict[str, Tensor | np.ndarray] = {}
    for key in keys:
        values = [row[key] for row in data_list]
        if all(isinstance(value, Tensor) for value in values):
            shapes = {tuple(value.shape) for value in values}
            if len(shapes) > 1:
                got, fix = f"tensors of the shapes {sorted(shapes)}", "Pad them in the data set."
                raise DataError(f"collate_fn, key {key!r}", got=got, expected="one shape", fix=fix)
            columns[key] = torch.stack(values)
        else:
            columns[key] = object_array(values)
    return columns
