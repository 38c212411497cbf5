# SPDX-License-Identifier: Apache-2.0
"""Which rows go through the model together. Host code without torch: lengths in, lists of rows out.

The result never changes a gradient, only memory and speed: losses are normalised by counts over the whole
mini-batch before the first backward pass.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatching:
    """How a mini-batch is cut.

    Attributes:
        num_sequences: rows in a micro-batch, or None to cut by tokens.
        max_tokens: packed tokens in a micro-batch when cutting by tokens; a longer row goes alone.
        share_prompts: whether rows with the same prompt count (and compute) it once.
    """

    num_sequences: int | None
    max_tokens: int
    share_prompts: bool = True


@dataclass(frozen=True)
class RowLength:
    """What one row costs: its own tokens, and those of its prompt, which `prompt_key` names."""

    prompt_key: Hashable
    num_prompt_tokens: int
    num_response_tokens: int


def micro_batches(rows: Sequence[RowLength], how: MicroBatching) -> list[list[int]]:
    """Indices of the rows of each micro-batch; every row is in exactly one."""
    if how.num_sequences is not None:
        size = how.num_sequences
        return [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]
    return _by_tokens(rows, how)


def _by_tokens(rows: Sequence[RowLength], how: MicroBatching) -> list[list[int]]:
    """Fill one micro-batch after the other, the rows of a prompt next to each other."""
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.prompt_key if how.share_prompts else index, []).append(index)
    batches: list[list[int]] = []
    room = 0
    for members in groups.values():
        if _num_tokens([rows[index] for index in members]) <= how.max_tokens:
            units = [members]
        else:
            units = _split_group(rows, members, how.max_tokens)
        for unit in units:
            cost = _num_tokens([rows[index] for index in unit])
            if batches and cost <= room:
                batches[-1].extend(unit)
                room -= cost
            else:
                batches.append(list(unit))
                room = how.max_tokens - cost
    return batches


def _split_group(rows: Sequence[RowLength], members: Sequence[int], max_tokens: int) -> list[list[int]]:
    """A group that does not fit is cut; each part computes the prompt anew."""
    units: list[list[int]] = []
    for index in members:
        if units and _num_tokens([rows[member] for member in [*units[-1], index]]) <= max_tokens:
            units[-1].append(index)
        else:
            units.append([index])
    return units


def _num_tokens(group: Sequence[RowLength]) -> int:
    return group[0].num_prompt_tokens + sum(row.num_response_tokens for row in group)
