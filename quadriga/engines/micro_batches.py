# SPDX-License-Identifier: Apache-2.0
"""Which rows go through the model together. Host code without torch: lengths in, lists of rows out.

By tokens, the rows of a prompt are one unit, and units are dealt to as few micro-batches as the budget allows, the
costliest first, each to the cheapest micro-batch that has room: all take about as long, and none is nearly empty.

The result never changes a gradient, only memory and speed: losses are normalised by counts over the whole
mini-batch before the first backward pass.

Legend: k micro-batches.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from quadriga.partition import Parts


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


def micro_batches(
    rows: Sequence[RowLength], how: MicroBatching, *, num_at_least: int = 0, attention_tokens: float = math.inf
) -> list[list[int]]:
    """Indices of the rows of each micro-batch; every row is in exactly one, and none is empty.

    Args:
        rows: of a mini-batch.
        how: it is cut.
        num_at_least: micro-batches, or as many as there are rows if these are fewer. Processes that must make equally
            many passes cut once, agree on the largest number, and cut again.
        attention_tokens: of a sequence at which attention costs as much as all else; infinite: a token costs the same
            in a sequence of any length. Matters for evenness only.

    Returns:
        By tokens, the costliest first: the k-th ones of several processes, which wait for each other, are then alike,
        and memory that is too small shows at once. By number of sequences, in the order of the rows.
    """
    num_at_least = min(num_at_least, len(rows))
    if how.num_sequences is None:
        return _by_tokens(rows, how, num_at_least, attention_tokens)
    num = max(num_at_least, -(-len(rows) // how.num_sequences))
    if num * how.num_sequences - len(rows) < how.num_sequences:
        # As many as it must be: full ones, and what is left.
        size = how.num_sequences
        return [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]
    return [list(range(len(rows) * part // num, len(rows) * (part + 1) // num)) for part in range(num)]


class _Unit:
    """Rows that stay together: answers to one prompt, the longest first, or one row.

    Attributes:
        num_tokens: packed.
        cost: in tokens of a short sequence.
        order: the costliest first, and never by how the rows were numbered unless they are alike.
    """

    def __init__(self, rows: Sequence[RowLength], members: Sequence[int], attention_tokens: float) -> None:
        self.members = sorted(members, key=lambda index: (-rows[index].num_response_tokens, index))
        prompt = rows[self.members[0]].num_prompt_tokens
        answers = [rows[index].num_response_tokens for index in self.members]
        self.num_tokens = prompt + sum(answers)
        # An answer's tokens attend to the prompt too: what the whole sequence costs, less what the prompt does.
        pairs = prompt**2 + sum(answer * (answer + 2 * prompt) for answer in answers)
        self.cost = self.num_tokens + pairs / attention_tokens
        self.order = (-self.cost, -self.num_tokens, answers, min(members))


def _by_tokens(
    rows: Sequence[RowLength], how: MicroBatching, num_at_least: int, attention_tokens: float
) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.prompt_key if how.share_prompts else index, []).append(index)

    def unit(members: Sequence[int]) -> _Unit:
        return _Unit(rows, members, attention_tokens)

    units: list[_Unit] = []
    for members in groups.values():
        whole = unit(members)
        if whole.num_tokens <= how.max_tokens:
            units.append(whole)
        else:
            units += map(unit, _split_group(rows, whole.members, how.max_tokens))
    while len(units) < num_at_least:
        # There are more rows than units, so one has several.
        largest = min((unit for unit in units if len(unit.members) > 1), key=lambda unit: unit.order)
        units.remove(largest)
        units += [unit(largest.members[::2]), unit(largest.members[1::2])]
    batches = _deal(sorted(units, key=lambda unit: unit.order), how.max_tokens, num_at_least)
    batches.sort(key=lambda batch: (-sum(unit.cost for unit in batch), _first_row(batch)))
    return [
        [index for unit in sorted(batch, key=lambda unit: min(unit.members)) for index in sorted(unit.members)]
        for batch in batches
    ]


def _first_row(batch: Sequence[_Unit]) -> int:
    return min(min(unit.members) for unit in batch)


def _split_group(rows: Sequence[RowLength], members: Sequence[int], max_tokens: int) -> list[list[int]]:
    """A group that does not fit is cut, its longest rows first; each part computes the prompt anew."""
    parts: list[list[int]] = []
    room: list[int] = []
    for index in members:
        answer = rows[index].num_response_tokens
        place = next((place for place, free in enumerate(room) if free >= answer), None)
        if place is None:
            parts.append([])
            room.append(max_tokens - rows[index].num_prompt_tokens)
            place = -1
        parts[place].append(index)
        room[place] -= answer
    return parts


def _deal(units: Sequence[_Unit], max_tokens: int, num_at_least: int) -> list[list[_Unit]]:
    """Units, the costliest first, to few and even micro-batches.

    Filling one after the other (first fit) needs few, but leaves them uneven; dealing them out evenly may find no room
    in that number, and is tried with the smallest that it finds room in.
    """
    filled = _fill(units, max_tokens)
    high = max(num_at_least, len(filled))
    low = min(high, max(num_at_least, -(-sum(unit.num_tokens for unit in units) // max_tokens)))
    best = None
    while low < high:
        middle = (low + high) // 2
        even = _even_out(units, max_tokens, middle)
        if even is None:
            low = middle + 1
        else:
            best, high = even, middle
    if best is not None:
        return best
    if high == len(filled):
        return _even_out(units, max_tokens, high) or filled
    # With a micro-batch for each unit there is room.
    dealt = (_even_out(units, max_tokens, num) for num in range(high, len(units) + 1))
    return next(even for even in dealt if even is not None)


def _fill(units: Sequence[_Unit], max_tokens: int) -> list[list[_Unit]]:
    """Each unit into the first micro-batch with room."""
    batches: list[list[_Unit]] = []
    room: list[int] = []
    for unit in units:
        place = next((place for place, free in enumerate(room) if free >= unit.num_tokens), None)
        if place is None:
            batches.append([])
            room.append(max_tokens)
            place = -1
        batches[place].append(unit)
        room[place] -= unit.num_tokens
    return batches


def _even_out(units: Sequence[_Unit], max_tokens: int, num: int) -> list[list[_Unit]] | None:
    """Each unit into the cheapest of k micro-batches that has room; None: there is none."""
    parts = Parts([max_tokens] * num)
    for unit in units:
        # One that is larger than the budget goes alone.
        if parts.give([unit], unit.cost, size=min(unit.num_tokens, max_tokens)) is None:
            return None
    return parts.items
