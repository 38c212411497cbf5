# SPDX-License-Identifier: Apache-2.0
"""Makes the columns of a batch from token ids: truncation, padding, position ids, collation.

A truncation mode names the side that loses tokens: `left` keeps the end, `right` keeps the
beginning, `middle` keeps both ends (the end gets the odd token), `error` refuses.

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
    """Truncate token ids to at most `max_length`.

    Args:
        ids: token ids, [L].
        max_length: most tokens of the result.
        mode: the side that loses tokens (see the top of this file).
        where: the sequence, for errors.

    Returns:
        At most `max_length` token ids.

    Raises:
        DataError: the ids are too long and the mode is `error`, or there is no such mode.
    """
    head, tail = _lengths_of_ends(len(ids), max_length, mode, where)
    # Not `ids[-tail:]`, which is the whole list for a tail of 0.
    return [*ids[:head], *ids[len(ids) - tail :]]


def pad_left(values: Tensor, length: int, fill: int) -> Tensor:
    """Pad the last dimension on the left, up to `length` positions.

    Args:
        values: [..., L].
        length: positions of the result.
        fill: value of the padding.

    Returns:
        [..., max(L, length)].
    """
    num_padding = max(length - values.shape[-1], 0)
    return F.pad(values, (num_padding, 0), value=fill)


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
    """Truncate or pad a tokenizer's output to exactly `max_length` columns.

    Args:
        input_ids: token ids, [B, L].
        attention_mask: 1 for tokens and 0 for padding, [B, L].
        max_length: columns of the result.
        pad_token_id: fills `input_ids`.
        left_pad: whether padding is on the left of the tokens. Otherwise it is on the right.
        truncation: the side on which sequences that are too long lose tokens.
        where: the sequences, for errors.

    Returns:
        `input_ids` and `attention_mask`, [B, max_length].

    Raises:
        DataError: as for `truncate`.
    """
    length = input_ids.shape[-1]
    head, tail = _lengths_of_ends(length, max_length, truncation, where)
    if head + tail < length:
        positions = torch.arange(length)
        remaining = torch.cat([positions[:head], positions[length - tail :]])
        input_ids = input_ids[:, remaining]
        attention_mask = attention_mask[:, remaining]
    num_padding = max(max_length - length, 0)
    padding = (num_padding, 0) if left_pad else (0, num_padding)
    return F.pad(input_ids, padding, value=pad_token_id), F.pad(attention_mask, padding)


def _lengths_of_ends(length: int, max_length: int, mode: str, where: str) -> tuple[int, int]:
    """Numbers of tokens that truncation keeps at the beginning and at the end of a sequence.

    All tokens of a sequence that is short enough count as its beginning.

    Raises:
        DataError: as for `truncate`.
    """
    modes = get_args(Truncation)
    if mode not in modes:
        raise DataError("data.truncation", got=repr(mode), expected=f"one of {', '.join(modes)}")
    if length <= max_length:
        return length, 0
    if mode == "error":
        raise DataError(
            where,
            got=f"{length} tokens",
            expected=f"at most data.max_prompt_length={max_length}",
            fix=(
                "Raise that length, leave such rows out with data.filter_overlong_prompts=true,"
                " or cut them with data.truncation=left, right or middle."
            ),
        )
    head = 0
    if mode == "right":
        head = max_length
    elif mode == "middle":
        head = max_length // 2
    # With `middle` and an odd length, the end gets one token more.
    return head, max_length - head


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Number the valid tokens of a mask [..., L] from 0. Padding gets 0.

    Returns:
        Position ids, int64 [..., L].
    """
    # The mask may be bool or float, and the result has its type: convert it first.
    mask = mask.to(torch.int64)
    return (mask.cumsum(dim=-1) - 1).clamp(min=0) * mask


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | np.ndarray]:
    """Make the columns of a batch from rows.

    Returns:
        The columns by name: tensors stacked to [B, ...], all other values in object arrays [B].

    Raises:
        DataError: rows differ in their keys, or the tensors of a key in their shape.
    """
    _check_rows(data_list)
    columns: dict[str, Tensor | np.ndarray] = {}
    for key in data_list[0]:
        values = [row[key] for row in data_list]
        if not all(isinstance(value, Tensor) for value in values):
            columns[key] = object_array(values)
            continue
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise DataError(
                f"collate_fn, key {key!r}",
                got=f"tensors of the shapes {sorted(shapes)}",
                expected="one shape",
                fix="Pad them in the data set.",
            )
        columns[key] = torch.stack(values)
    return columns


def _check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise a DataError if there are no rows, one is no dictionary, or their keys differ."""
    if not rows:
        raise DataError("collate_fn", got="no rows", expected="at least one")
    for row in rows:
        if not isinstance(row, Mapping):
            raise DataError(
                "collate_fn",
                got=f"a {type(row).__name__}",
                expected="rows, each a dictionary of columns",
            )
    first_keys = set(rows[0])
    for position, row in enumerate(rows):
        differing_keys = set(row) ^ first_keys
        if differing_keys:
            names = ", ".join(sorted(differing_keys))
            raise DataError(
                "collate_fn",
                got=f"rows 0 and {position} of the batch, of which only one has {names}",
                expected="the same keys in every row",
                fix="Let the data set give each row every key, with None where there is no value.",
            )
