# SPDX-License-Identifier: Apache-2.0
"""Mini-batches and micro-batches: the rows of an optimizer step, and those computed together.

Mini-batches follow the order of the whole batch, shuffled or not. Of a mini-batch, a rank computes
the rows that this rank holds. Therefore mini-batches and gradients do not depend on how the rows
are spread over data-parallel ranks.

Micro-batches by tokens: rows of a prompt form a unit. Units are assigned to as few micro-batches
as the token limit allows, the costliest unit first, each to the cheapest micro-batch with room. All
micro-batches then take about as long, and none is nearly empty. The assignment affects memory and
speed, never the gradient: losses are normalised by counts of the whole mini-batch before the first
backward pass.

Legend: B rows of this rank, b of them in a mini-batch.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import attrgetter

import torch

from quadriga.config import BatchingConfig
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import EngineError
from quadriga.partition import BalancedParts
from quadriga.protocol import DataProto


@dataclass(frozen=True)
class MicroBatching:
    """Division of a mini-batch into micro-batches."""

    num_sequences: int | None  # rows of a micro-batch; None: divide by tokens
    # Largest number of packed tokens of a micro-batch, in a division by tokens. A longer row gets a
    # micro-batch of its own.
    max_tokens: int
    share_prompts: bool = True  # whether rows with the same prompt count and compute it once


@dataclass(frozen=True)
class Passes:
    """Division of a batch into optimizer steps, and the number of passes over it."""

    # Rollouts of an optimizer step, over all ranks. The last step of a pass may have fewer.
    mini_batch_size: int
    num_epochs: int  # passes over the batch
    micro: MicroBatching
    shuffle_seed: int | None = None  # shuffles rows before each pass; None keeps their order

    @classmethod
    def of(
        cls, config: BatchingConfig, rows_per_prompt: int, step: int, *, share_prompts: bool
    ) -> "Passes":
        """Build the passes that a role's section configures.

        Args:
            config: the section.
            rows_per_prompt: rollouts per prompt; `ppo_mini_batch_size` counts prompts.
            step: training step; each has its own shuffles.
            share_prompts: whether rows with the same prompt compute it once.

        Returns:
            The passes over the batch of the step.
        """
        num_sequences = None if config.use_dynamic_bsz else config.ppo_micro_batch_size_per_gpu
        shuffle_seed = None
        if config.shuffle:
            # `mini_batches` adds the number of the epoch, so no two epochs have the same seed.
            shuffle_seed = config.data_loader_seed + step * config.ppo_epochs
        return cls(
            mini_batch_size=config.ppo_mini_batch_size * rows_per_prompt,
            num_epochs=config.ppo_epochs,
            micro=MicroBatching(num_sequences, config.ppo_max_token_len_per_gpu, share_prompts),
            shuffle_seed=shuffle_seed,
        )


def mini_batches(
    data: DataProto, replicas: ProcessGroup, passes: Passes
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Divide a batch into the mini-batches of all passes, the same number of them on every rank.

    All rows of a rollout are in the same mini-batch. A rank may have no rows in a mini-batch.

    Args:
        data: rows of this rank. The column `row_index` [B] has the numbers of these rows in the
            whole batch; without it, the rows of all ranks are numbered rank after rank. The column
            `rollout_index` [B] has the number of each row's rollout; without it, every row is a
            rollout.
        replicas: ranks with the other rows.
        passes: sizes and number of passes.

    Returns:
        Iterator over the mini-batches. Each is two tensors [b] int64: the indices in `data` of this
        rank's rows, and the positions of these rows. Sorted by position, the rows of all ranks are
        in the order of the pass.

    Raises:
        EngineError: `row_index` has numbers outside of the batch.
    """
    row_counts = replicas.gather(len(data))
    num_rows = sum(row_counts)
    numbers = torch.arange(len(data)) + sum(row_counts[: replicas.rank])
    if "row_index" in data.batch.keys():
        numbers = data.batch["row_index"].cpu()
    if len(numbers):
        smallest, largest = map(int, numbers.aminmax())
        if smallest < 0 or largest >= num_rows:
            raise EngineError(
                "column row_index",
                got=f"numbers from {smallest} to {largest} in a batch of {num_rows} rows",
                expected=f"each number from 0 to {num_rows - 1} once",
                fix="Number the rows after the last one was added or removed.",
            )

    rollouts = numbers
    num_rollouts = num_rows
    positions_per_rollout = 1
    if "rollout_index" in data.batch.keys():
        rollouts = data.batch["rollout_index"].cpu()
        largest_number = max(rollouts.tolist(), default=-1)  # -1: this rank has no rows
        num_rollouts = 1 + max(replicas.gather(largest_number))
        # Row n of the r-th rollout gets the position r * num_rows + n, which no other row can have.
        # Most positions stay empty.
        positions_per_rollout = num_rows

    for epoch in range(passes.num_epochs):
        positions = rollouts
        if passes.shuffle_seed is not None:
            order = torch.randperm(
                num_rollouts, generator=torch.Generator().manual_seed(passes.shuffle_seed + epoch)
            )
            # The inverse permutation: where each rollout comes in the shuffled order.
            position_of = torch.empty_like(order).scatter_(0, order, torch.arange(num_rollouts))
            positions = position_of[rollouts]
        if positions_per_rollout > 1:
            # Rows of a rollout are consecutive, in the order of their numbers.
            positions = positions * positions_per_rollout + numbers
        # A mini-batch is a range of positions, in which this rank may have any number of rows.
        sorted_positions, sorted_rows = positions.sort()
        for start in range(0, num_rollouts, passes.mini_batch_size):
            bounds = torch.tensor([start, start + passes.mini_batch_size]) * positions_per_rollout
            first, stop = torch.searchsorted(sorted_positions, bounds).tolist()
            yield sorted_rows[first:stop], sorted_positions[first:stop]


@dataclass(frozen=True)
class RowLength:
    """Number of tokens of a row, in its prompt, which rows may share, and in its response."""

    prompt_key: Hashable  # equal for equal prompts
    num_prompt_tokens: int
    num_response_tokens: int


def micro_batches(
    rows: Sequence[RowLength],
    division: MicroBatching,
    *,
    min_batches: int = 0,
    attention_tokens: float = math.inf,
) -> list[list[int]]:
    """Divide rows into micro-batches. Each row is in exactly one, and none is empty.

    A division by tokens puts the costliest micro-batches first: ranks that wait for each other then
    compute similar micro-batches at the same time, and a lack of memory shows at once. A division
    by number of sequences keeps the order of the rows.

    Args:
        rows: [b] lengths.
        division: whether to divide by tokens or by number of sequences, and the limits.
        min_batches: minimum number of micro-batches, limited by the number of rows. Ranks that
            must make equally many divide once, agree on the largest number, and divide again.
        attention_tokens: sequence length at which attention costs as much as everything else: a
            sequence of L tokens costs L + L^2 / attention_tokens. If infinite, a token costs the
            same in any sequence. It only affects how evenly costs are divided.

    Returns:
        Indices of the rows of each micro-batch.
    """
    min_batches = min(min_batches, len(rows))
    if division.num_sequences is not None:
        return _divide_by_sequences(len(rows), division.num_sequences, min_batches)
    units = _group_rows(rows, division, min_batches, attention_tokens)
    units.sort(key=attrgetter("sort_key"))
    batches = _assign_units(units, division.max_tokens, min_batches)

    # The costliest micro-batch first; of equal ones, the one with the earliest row.
    batches.sort(
        key=lambda batch: (-sum(unit.cost for unit in batch), min(unit.first for unit in batch))
    )
    indices = []
    for batch in batches:
        batch.sort(key=attrgetter("first"))
        indices.append(list(chain.from_iterable(sorted(unit.members) for unit in batch)))
    return indices


def _divide_by_sequences(num_rows: int, size: int, min_batches: int) -> list[list[int]]:
    """Divide rows, in their order, into micro-batches of `size` rows.

    Args:
        num_rows: number of rows.
        size: rows of a micro-batch, except the last one.
        min_batches: minimum number of micro-batches, at most `num_rows`. If it is larger than the
            number of micro-batches of `size` rows, the rows are divided evenly instead.

    Returns:
        Indices of the rows of each micro-batch.
    """
    num_batches = -(-num_rows // size)
    if min_batches <= num_batches:
        bounds = [*range(0, num_rows, size), num_rows]
    else:
        bounds = [num_rows * part // min_batches for part in range(min_batches + 1)]
    return [list(range(start, end)) for start, end in pairwise(bounds)]


class _Unit:
    """Rows that stay in one micro-batch: a single row, or responses to the same prompt.

    Args:
        rows: all rows.
        members: indices of the unit's rows.
        attention_tokens: sequence length at which attention costs as much as everything else (see
            `micro_batches`).

    Attributes:
        members: indices of the rows, the longest response first.
        first: smallest of the indices.
        num_tokens: packed tokens, with the prompt counted once.
        cost: cost of computing the unit, as an equivalent number of tokens.
        sort_key: puts the costliest unit first. Different units of a division have different keys.
    """

    def __init__(
        self, rows: Sequence[RowLength], members: Sequence[int], attention_tokens: float
    ) -> None:
        self.members = sorted(members, key=lambda index: (-rows[index].num_response_tokens, index))
        self.first = min(members)
        # Numbers of tokens. All members have the same prompt.
        prompt = rows[self.members[0]].num_prompt_tokens
        responses = [rows[index].num_response_tokens for index in self.members]
        self.num_tokens = prompt + sum(responses)
        # Twice the pairs of tokens that attention computes. A response of r tokens after a prompt
        # of p tokens adds (p + r)^2 - p^2 = r (r + 2 p), since its tokens attend to the prompt too.
        pairs = prompt**2 + sum(response * (response + 2 * prompt) for response in responses)
        # In tokens: a sequence of L tokens costs L + L^2 / attention_tokens.
        self.cost = self.num_tokens + pairs / attention_tokens
        self.sort_key = (-self.cost, -self.num_tokens, responses, self.first)


def _group_rows(
    rows: Sequence[RowLength], division: MicroBatching, min_units: int, attention_tokens: float
) -> list[_Unit]:
    """Group rows into units: all responses to a prompt, if they fit into one micro-batch.

    Responses that do not fit are split into several units. The costliest units are split, too, as
    long as there are fewer than `min_units`.

    Args:
        rows: the rows.
        division: limits of a micro-batch.
        min_units: minimum number of units, at most the number of rows.
        attention_tokens: see `micro_batches`.

    Returns:
        The units.
    """
    groups = {}
    for index, row in enumerate(rows):
        key = row.prompt_key if division.share_prompts else index
        groups.setdefault(key, []).append(index)

    units = []
    for members in groups.values():
        unit = _Unit(rows, members, attention_tokens)
        if unit.num_tokens <= division.max_tokens:
            units.append(unit)
            continue
        # Split a group that does not fit, its longest rows first. Each part computes the prompt.
        capacity = division.max_tokens - rows[members[0]].num_prompt_tokens
        sizes = [rows[index].num_response_tokens for index in unit.members]
        for part in _first_fit(sizes, capacity):
            part_members = [unit.members[number] for number in part]
            units.append(_Unit(rows, part_members, attention_tokens))

    while len(units) < min_units:
        # There are more rows than units, so one has several. Split the costliest. Its members are
        # sorted by length, so every other one gives two halves of similar cost.
        splittable = [unit for unit in units if len(unit.members) > 1]
        costliest = min(splittable, key=attrgetter("sort_key"))
        units.remove(costliest)
        for half in (costliest.members[::2], costliest.members[1::2]):
            units.append(_Unit(rows, half, attention_tokens))
    return units


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each item into the first part with room; an item larger than a part is alone.

    Args:
        sizes: size of each item.
        capacity: size of a part.

    Returns:
        Numbers of the items in each part.
    """
    parts = []
    free_sizes = []
    for number, size in enumerate(sizes):
        for part, free in enumerate(free_sizes):
            if free >= size:
                parts[part].append(number)
                free_sizes[part] -= size
                break
        else:
            parts.append([number])
            free_sizes.append(capacity - size)
    return parts


def _assign_units(units: Sequence[_Unit], max_tokens: int, min_batches: int) -> list[list[_Unit]]:
    """Assign units to as few micro-batches as possible, of similar costs.

    First fit needs few micro-batches, but fills them unevenly. `_assign_evenly` fills them evenly,
    but may not fit into as few. A binary search finds the smallest number into which it fits.

    Args:
        units: the costliest first.
        max_tokens: token limit of a micro-batch; a larger unit is alone.
        min_batches: minimum number of micro-batches.

    Returns:
        The units of each micro-batch.
    """
    sizes = [unit.num_tokens for unit in units]
    first_fit = [[units[number] for number in part] for part in _first_fit(sizes, max_tokens)]
    high = max(min_batches, len(first_fit))
    # No division needs fewer micro-batches than the sum of all tokens does.
    low = min(high, max(min_batches, -(-sum(sizes) // max_tokens)))
    while low < high:
        middle = (low + high) // 2
        if _assign_evenly(units, max_tokens, middle) is None:
            low = middle + 1
        else:
            high = middle

    # The search never tried the largest number, at which it started, so this may fail.
    batches = _assign_evenly(units, max_tokens, high)
    if batches is None and high == len(first_fit):
        return first_fit
    while batches is None:
        # Ends at the latest when there is a micro-batch for each unit.
        high += 1
        batches = _assign_evenly(units, max_tokens, high)
    return batches


def _assign_evenly(
    units: Sequence[_Unit], max_tokens: int, num_batches: int
) -> list[list[_Unit]] | None:
    """Assign each unit to the cheapest of `num_batches` micro-batches that still has room for it.

    Args:
        units: the costliest first.
        max_tokens: token limit of a micro-batch; a larger unit is alone.
        num_batches: number of micro-batches.

    Returns:
        The units of each micro-batch; None if no micro-batch has room for one of the units.
    """
    batches = BalancedParts([max_tokens] * num_batches)
    for unit in units:
        # A unit over the limit takes a whole micro-batch.
        size = min(unit.num_tokens, max_tokens)
        if batches.give([unit], unit.cost, size=size) is None:
            return None
    return batches.items
