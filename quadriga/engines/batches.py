# SPDX-License-Identifier: Apache-2.0
"""Which rows an optimizer step learns from, and which of them go through the model together.

Mini-batches: the order of the whole batch decides, shuffled or not; each rank takes those rows of the set that it has.
So the mini-batches, and with them the gradients, do not depend on how the rows were spread over data-parallel ranks.

Micro-batches: by tokens, the rows of a prompt are one unit, and units are dealt to as few micro-batches as the budget
allows, the costliest first, each to the cheapest micro-batch that has room: all take about as long, and none is nearly
empty. The result never changes a gradient, only memory and speed: losses are normalised by counts over the whole
mini-batch before the first backward pass.

Legend: B rows of this rank, b of them in a mini-batch.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from quadriga.config import BatchingConfig
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import EngineError
from quadriga.partition import Parts
from quadriga.protocol import DataProto


@dataclass(frozen=True)
class MicroBatching:
    """How a mini-batch is cut."""

    num_sequences: int | None  # rows in a micro-batch, or None to cut by tokens
    max_tokens: (
        int  # packed tokens in a micro-batch when cutting by tokens; a longer row goes alone
    )
    share_prompts: bool = True  # whether rows with the same prompt count (and compute) it once


@dataclass(frozen=True)
class Passes:
    """How often and in what pieces a batch is learned from."""

    mini_batch_size: (
        int  # rows that one optimizer step takes, of all ranks together; the last may be smaller
    )
    num_epochs: int  # passes over the batch
    micro: MicroBatching  # how a mini-batch is cut to fit in memory
    shuffle_seed: int | None = (
        None  # rows are shuffled from this seed before each pass, or None to keep their order
    )

    @classmethod
    def of(
        cls, config: BatchingConfig, rows_per_prompt: int, step: int, *, share_prompts: bool
    ) -> "Passes":
        """The passes that a role's section asks for, with `rows_per_prompt` rows for each prompt that
        `ppo_mini_batch_size` counts. Each training step has shuffles of its own."""
        num_sequences = None if config.use_dynamic_bsz else config.ppo_micro_batch_size_per_gpu
        return cls(
            mini_batch_size=config.ppo_mini_batch_size * rows_per_prompt,
            num_epochs=config.ppo_epochs,
            micro=MicroBatching(num_sequences, config.ppo_max_token_len_per_gpu, share_prompts),
            shuffle_seed=config.data_loader_seed + step * config.ppo_epochs
            if config.shuffle
            else None,
        )


def mini_batches(
    data: DataProto, replicas: ProcessGroup, passes: Passes
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The mini-batches of all passes over a batch, as many on every rank: the rows that are here, in order, and their
    places in the order of the whole batch, [b] int64 each.
    `data`: the rows of this rank. Their numbers in the whole batch are its `row_index` [B], where there is such a
    column; else they go on from rank to rank. Raises EngineError: the numbers are not those of a whole batch."""
    counts = replicas.gather(len(data))
    num_all = sum(counts)
    numbers = torch.arange(len(data)) + sum(counts[: replicas.rank])
    if "row_index" in data.batch.keys():
        numbers = data.batch["row_index"].cpu()
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < num_all:
        got = f"numbers from {int(numbers.min())} to {int(numbers.max())} in a batch of {num_all} rows"
        fix = "Number the rows after the last one was added or removed."
        raise EngineError(
            "column row_index",
            got=got,
            expected=f"each number from 0 to {num_all - 1} once",
            fix=fix,
        )
    for epoch in range(passes.num_epochs):
        places = numbers
        if passes.shuffle_seed is not None:
            generator = torch.Generator().manual_seed(passes.shuffle_seed + epoch)
            order = torch.randperm(num_all, generator=generator)
            places = torch.empty_like(order).scatter_(0, order, torch.arange(num_all))[numbers]
        sorted_places, sorted_rows = places.sort()
        for start in range(0, num_all, passes.mini_batch_size):
            ends = torch.tensor([start, start + passes.mini_batch_size])
            first, last = torch.searchsorted(sorted_places, ends).tolist()
            yield sorted_rows[first:last], sorted_places[first:last]


@dataclass(frozen=True)
class RowLength:
    """What one row costs: its own tokens, and those of its prompt, which `prompt_key` names."""

    prompt_key: Hashable
    num_prompt_tokens: int
    num_response_tokens: int


def micro_batches(
    rows: Sequence[RowLength],
    how: MicroBatching,
    *,
    num_at_least: int = 0,
    attention_tokens: float = math.inf,
) -> list[list[int]]:
    """Indices of the rows of each micro-batch; each of the [b] rows is in exactly one, and none is empty. By tokens the
    costliest come first: the k-th ones of several ranks, which wait for each other, are then alike, and memory that is
    too small shows at once. By number of sequences, in the order of the rows.

    Args:
        num_at_least: micro-batches, or as many as there are rows if these are fewer. Ranks that must make equally
            many passes cut once, agree on the largest number, and cut again.
        attention_tokens: length of a sequence at which attention costs as much as all else; infinite: a token costs the
            same in a sequence of any length. Matters for evenness only.
    """
    num_at_least = min(num_at_least, len(rows))
    if how.num_sequences is not None:
        num = max(num_at_least, -(-len(rows) // how.num_sequences))
        if num * how.num_sequences - len(rows) < how.num_sequences:
            # As many as it must be: full ones, and what is left.
            size = how.num_sequences
            return [
                list(range(start, min(start + size, len(rows))))
                for start in range(0, len(rows), size)
            ]
        return [
            list(range(len(rows) * part // num, len(rows) * (part + 1) // num))
            for part in range(num)
        ]
    units = _units(rows, how, num_at_least, attention_tokens)
    batches = _deal(sorted(units, key=attrgetter("order")), how.max_tokens, num_at_least)
    batches.sort(
        key=lambda batch: (-sum(unit.cost for unit in batch), min(unit.first for unit in batch))
    )
    return [
        [index for unit in sorted(batch, key=attrgetter("first")) for index in sorted(unit.members)]
        for batch in batches
    ]


class _Unit:
    """Rows that stay together: responses to one prompt, the longest first, or one row. The cost is in tokens."""

    def __init__(
        self, rows: Sequence[RowLength], members: Sequence[int], attention_tokens: float
    ) -> None:
        self.members = sorted(members, key=lambda index: (-rows[index].num_response_tokens, index))
        self.first = min(members)
        prompt = rows[self.members[0]].num_prompt_tokens
        responses = [rows[index].num_response_tokens for index in self.members]
        self.num_tokens = prompt + sum(responses)
        # A response's tokens attend to the prompt too: what the whole sequence costs, less what the prompt does.
        pairs = prompt**2 + sum(response * (response + 2 * prompt) for response in responses)
        self.cost = self.num_tokens + pairs / attention_tokens
        self.order = (-self.cost, -self.num_tokens, responses, self.first)


def _units(
    rows: Sequence[RowLength], how: MicroBatching, num_at_least: int, attention_tokens: float
) -> list[_Unit]:
    """The rows in units: whole groups where they fit, and at least so many as micro-batches are needed."""
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.prompt_key if how.share_prompts else index, []).append(index)
    units: list[_Unit] = []
    for members in groups.values():
        unit = _Unit(rows, members, attention_tokens)
        if unit.num_tokens <= how.max_tokens:
            units.append(unit)
            continue
        # A group that does not fit is cut, its longest rows first; each part computes the prompt anew.
        prompt = rows[members[0]].num_prompt_tokens
        for part in _first_fit(
            [rows[index].num_response_tokens for index in unit.members], how.max_tokens - prompt
        ):
            units.append(_Unit(rows, [unit.members[number] for number in part], attention_tokens))
    while len(units) < num_at_least:
        # There are more rows than units, so one has several.
        largest = min((unit for unit in units if len(unit.members) > 1), key=attrgetter("order"))
        units.remove(largest)
        units += [
            _Unit(rows, half, attention_tokens)
            for half in (largest.members[::2], largest.members[1::2])
        ]
    return units


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """The numbers of items, each in the first part with room for it; one that is larger than a part goes alone."""
    parts: list[list[int]] = []
    room: list[int] = []
    for number, size in enumerate(sizes):
        place = next((place for place, free in enumerate(room) if free >= size), None)
        if place is None:
            parts.append([])
            room.append(capacity)
            place = -1
        parts[place].append(number)
        room[place] -= size
    return parts


def _deal(units: Sequence[_Unit], max_tokens: int, num_at_least: int) -> list[list[_Unit]]:
    """Units, the costliest first, to few and even micro-batches.

    First fit needs few, but leaves them uneven; longest first makes them even, but may find no room in that number,
    and is tried with the smallest that it finds room in.
    """
    sizes = [unit.num_tokens for unit in units]
    filled = [[units[number] for number in part] for part in _first_fit(sizes, max_tokens)]
    high = max(num_at_least, len(filled))
    low = min(high, max(num_at_least, -(-sum(sizes) // max_tokens)))
    best = None
    while best is None or low < high:
        num = (low + high) // 2
        parts = Parts([max_tokens] * num)
        # Each unit goes into the cheapest micro-batch that has room; one that is larger than the budget goes alone.
        given = (
            parts.give([unit], unit.cost, size=min(unit.num_tokens, max_tokens)) for unit in units
        )
        if all(part is not None for part in given):
            best, high = parts.items, num
        elif low < high:
            low = num + 1
        elif high == len(filled):
            best = filled
        else:
            # With a micro-batch for each unit there is room.
            low = high = high + 1
    return best
