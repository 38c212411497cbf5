# SPDX-License-Identifier: Apache-2.0
"""Cutting what is too long and padding what is too short.

A mode names the side that loses tokens: `left` keeps the end, `right` keeps the beginning, `middle` keeps both ends
(the end gets the odd token), `error` refuses.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import DataError

Truncation = Literal["error", "left", "right", "middle"]


def truncate(ids: Sequence[int], max_length: int, mode: Truncation, *, where: str = "a prompt") -> list[int]:
    """At most `max_length` of `ids`, cut as `mode` says.

    Args:
        ids: token ids.
        max_length: the most that may stay.
        mode: see above.
        where: what an error names, such as a file and a row.

    Raises:
        DataError: the mode is `error` and `ids` are too long, or there is no such mode.
    """
    head, tail = _kept_ends(len(ids), max_length, mode, where)
    return [*ids[:head], *ids[len(ids) - tail :]]


def pad_left(values: Tensor, length: int, fill: int) -> Tensor:
    """[..., L] -> [..., length] with `fill` in front; what is already that long stays as it is."""
    return F.pad(values, (max(length - values.shape[-1], 0), 0), value=fill)


def pad_right(values: Tensor, length: int, fill: int) -> Tensor:
    """[..., L] -> [..., length] with `fill` behind; what is already that long stays as it is."""
    return F.pad(values, (0, max(length - values.shape[-1], 0)), value=fill)


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
    """Bring a tokenizer's output to exactly `max_length` columns.

    Args:
        input_ids: [B, L].
        attention_mask: [B, L].
        max_length: columns of the result.
        pad_token_id: fills `input_ids`; the mask is filled with 0.
        left_pad: whether padding goes in front.
        truncation: what happens to more than `max_length` columns.
        where: what an error names.

    Returns:
        `input_ids` and `attention_mask`, both [B, max_length].

    Raises:
        DataError: see `truncate`.
    """
    length = input_ids.shape[-1]
    head, tail = _kept_ends(length, max_length, truncation, where)
    if head + tail < length:
        input_ids, attention_mask = (
            torch.cat([rows[:, :head], rows[:, length - tail :]], dim=-1) for rows in (input_ids, attention_mask)
        )
    pad = pad_left if left_pad else pad_right
    return pad(input_ids, max_length, pad_token_id), pad(attention_mask, max_length, 0)


def _kept_ends(length: int, max_length: int, mode: str, where: str) -> tuple[int, int]:
    """How many tokens stay at the beginning and how many at the end."""
    if mode not in get_args(Truncation):
        raise DataError("data.truncation", got=repr(mode), expected=f"one of {', '.join(get_args(Truncation))}")
    if length <= max_length:
        return length, 0
    if mode == "error":
        raise DataError(
            where,
            got=f"{length} tokens",
            expected=f"at most data.max_prompt_length={max_length}",
            fix="Raise that length, leave such rows out with data.filter_overlong_prompts=true, or cut them with "
            "data.truncation=left, right or middle.",
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[mode]
    return head, max_length - head
