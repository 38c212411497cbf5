# SPDX-License-Identifier: Apache-2.0
"""Orders the rows of a batch so that its equal chunks, one per rank, take equal time.

    responses ── order_for_ranks ──> log-probs, values, advantages, updates
              ── back by `row_index` ──> rows for people

    rows of the batch     0 1 2 3 4 5 6 | 7 8 9 ...     mini-batches, in the order of the batch
    order                 0 3 6 7 ... ; 1 4 8 ... ; 2 5 9 ...
                          rank 0        rank 1      rank 2

All data-parallel ranks synchronize at each optimizer step, so the work of each mini-batch is shared
evenly, not only that of the batch. `DataProto.chunk` fixes how many rows a rank gets; this module
chooses which ones. The responses to a prompt are first given to one rank, which computes the prompt
once for all of them, and are separated only if that shortens the step. The order does not change
the gradient: each row keeps its number, `row_index`.

Legend: R ranks.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quadriga.config import ActorConfig
from quadriga.partition import BalancedParts
from quadriga.protocol import DataProto
from quadriga.trainer.rollout_rows import has_larger_rollouts, rollout_numbers

# A swap that shortens the longest share by less than this part of it is not worth making.
WORTHWHILE = 1e-3


@dataclass(frozen=True)
class Row:
    """A response: its prompt, its lengths, and its costs."""

    prompt: Hashable  # equal for responses whose prompt is computed once
    num_prompt_tokens: int
    num_response_tokens: int
    prompt_cost: float
    response_cost: float  # cost that the response adds if the prompt is computed already


@dataclass(frozen=True)
class SequenceCost:
    """Cost model of sequences. The unit is one token's pass through all layers without attention."""

    # Length of a sequence at which attention costs as much as everything else in the layers: 12
    # times the hidden size, or less with grouped heads or a narrow MLP. The default is for a hidden
    # size of 2048.
    attention_tokens: float = 24_576
    # Cost of the vocabulary projection for a response token.
    head: float = 0.0
    # Cost of the vision encoder for the grids [I, 3] of images or videos.
    images: Callable[[torch.Tensor], float] = lambda grids: 0.0

    def row(
        self,
        prompt: Hashable,
        num_prompt_tokens: int,
        num_response_tokens: int,
        image_cost: float = 0.0,
    ) -> Row:
        """Compute the costs of a response.

        Args:
            prompt: identifies the prompt.
            num_prompt_tokens: length of the prompt.
            num_response_tokens: length of the response.
            image_cost: cost of the prompt's images.
        """
        prompt_cost = self._layers_cost(num_prompt_tokens)
        # Response tokens also attend to the prompt. So their cost is that of the whole sequence
        # minus that of the prompt alone.
        length = num_prompt_tokens + num_response_tokens
        response_cost = self._layers_cost(length) - prompt_cost
        return Row(
            prompt,
            num_prompt_tokens,
            num_response_tokens,
            prompt_cost=prompt_cost + image_cost,
            response_cost=response_cost + self.head * num_response_tokens,
        )

    def _layers_cost(self, length: int) -> float:
        """Cost of a sequence of `length` tokens in the layers; attention makes it quadratic."""
        return length * (1 + length / self.attention_tokens)


def order_for_ranks(
    batch: DataProto,
    num_ranks: int,
    responses_per_prompt: int,
    config: ActorConfig,
    cost: SequenceCost,
) -> dict[str, float]:
    """Number the rows of a batch, and reorder them so that equal chunks take equal time.

    Adds the column `row_index`, each row's number before the reordering. If a rollout has several
    rows, also adds `rollout_index`, the number of each row's rollout.

    Args:
        batch: prompts with responses, [B]; it is changed in place. With one rank the rows keep
            their order.
        num_ranks: number of data-parallel ranks.
        responses_per_prompt: rollouts of each prompt.
        config: the actor's section, which defines the mini-batches.
        cost: cost model of the actor.

    Returns:
        Metrics `balance/...`.
    """
    batch.batch["row_index"] = torch.arange(len(batch))
    if has_larger_rollouts(batch):
        batch.batch["rollout_index"] = torch.tensor(rollout_numbers(batch))
    if num_ranks == 1:
        return {}

    attention = batch.batch["attention_mask"]
    response_lengths = attention[:, -batch.batch["responses"].shape[1] :].sum(-1)
    prompt_lengths = attention.sum(-1) - response_lengths
    # Without prefix sharing each row computes its own prompt, so no two rows have the same key.
    prompts = batch.non_tensor_batch["uid"] if config.use_prefix_sharing else range(len(batch))
    # For each row, the cost of all its images and videos.
    image_costs = []
    for inputs in batch.non_tensor_batch.get("multi_modal_inputs", [{}] * len(batch)):
        # `image_grid_thw` and `video_grid_thw`: the grids of patches, [I, 3].
        grids = [value for name, value in (inputs or {}).items() if name.endswith("grid_thw")]
        image_costs.append(sum(map(cost.images, grids)))
    rows = list(
        map(cost.row, prompts, prompt_lengths.tolist(), response_lengths.tolist(), image_costs)
    )

    mini_batch_size = config.ppo_mini_batch_size * responses_per_prompt
    if config.shuffle or "rollout_index" in batch.batch.keys():
        # With `shuffle`, each pass divides the rows into other mini-batches. With rollouts of several
        # rows, mini-batches differ in their numbers of rows. So only the whole batch is balanced.
        mini_batch_size = len(batch)
    result = balance(rows, num_ranks, mini_batch_size)
    batch.reorder(result.order)
    return {
        "balance/imbalance": result.imbalance,
        "balance/imbalance_before": result.imbalance_before,
    }


@dataclass(frozen=True)
class Balance:
    """An order of the rows, and how evenly its equal chunks share the work."""

    order: list[int]  # row numbers; the first chunk is for rank 0, and so on
    # Time of all optimizer steps divided by the time with even shares: 1 if the shares are even, R
    # if one rank has all the work.
    imbalance: float
    imbalance_before: float  # imbalance of the original order


def balance(rows: Sequence[Row], num_ranks: int, mini_batch_size: int) -> Balance:
    """Share the rows of a batch evenly among ranks.

    Args:
        rows: the rows, in the order of the batch.
        num_ranks: number of ranks.
        mini_batch_size: rows of an optimizer step; all rows if they are shuffled later.
    """
    # The rank of each row if the order stayed as it is, see `DataProto.chunk`.
    chunk_size, num_larger_chunks = divmod(len(rows), num_ranks)
    rank_of_row = []
    for rank in range(num_ranks):
        rank_of_row += [rank] * (chunk_size + (rank < num_larger_chunks))

    # For each mini-batch, the row numbers of each rank.
    balanced_shares = []
    original_shares = []
    for start in range(0, len(rows), mini_batch_size):
        members = range(start, min(start + mini_batch_size, len(rows)))
        # Rows are counted round-robin over the whole batch. So the quotas of a mini-batch differ by
        # at most one row, and the quotas of a rank add up to the size of its chunk.
        quotas = [0] * num_ranks
        original_rows = [[] for _ in range(num_ranks)]
        for number in members:
            quotas[number % num_ranks] += 1
            original_rows[rank_of_row[number]].append(number)
        original_shares.append(original_rows)
        rows_of_ranks = _assign_groups(rows, members, quotas)
        _even_out(rows, rows_of_ranks)
        balanced_shares.append(rows_of_ranks)

    # A rank's chunk consists of its rows of the first mini-batch, of the second, and so on.
    order = []
    for rank in range(num_ranks):
        for rows_of_ranks in balanced_shares:
            order += sorted(rows_of_ranks[rank])
    return Balance(order, _imbalance(rows, balanced_shares), _imbalance(rows, original_shares))


def cost_of_share(rows: Sequence[Row], share: Iterable[int]) -> float:
    """Cost of the rows of one rank: each distinct prompt once, and every response.

    Args:
        rows: all rows.
        share: numbers of the rank's rows.
    """
    members = [rows[number] for number in share]
    prompt_costs = {row.prompt: row.prompt_cost for row in members}
    return sum(prompt_costs.values()) + sum(row.response_cost for row in members)


def _assign_groups(
    rows: Sequence[Row], members: Sequence[int], quotas: Sequence[int]
) -> list[list[int]]:
    """Assign the rows of a mini-batch to ranks in groups of the same prompt, the costliest first.

    A group goes to the least loaded rank that has room for all of its rows. If there is no such
    rank, the rows are assigned one by one.

    Args:
        rows: all rows.
        members: numbers of the rows to assign.
        quotas: number of rows that each rank gets, [R].

    Returns:
        Row numbers of each rank.
    """
    groups = {}
    for number in members:
        groups.setdefault(rows[number].prompt, []).append(number)
    parts = BalancedParts(quotas)
    prompts_of_rank = [set() for _ in quotas]

    def assign(numbers: Sequence[int]) -> bool:
        """Assign rows with the same prompt to one rank. Returns False if no rank has room."""
        first = rows[numbers[0]]
        has_prompt = np.array([first.prompt in prompts for prompts in prompts_of_rank])
        rank = parts.give(
            numbers,
            sum(rows[number].response_cost for number in numbers),
            size=len(numbers),
            # A rank that already has the prompt does not compute it again.
            extra=np.where(has_prompt, 0.0, first.prompt_cost),
        )
        if rank is not None:
            prompts_of_rank[rank].add(first.prompt)
        return rank is not None

    for group in sorted(groups.values(), key=lambda group: -cost_of_share(rows, group)):
        if not assign(group):
            for number in sorted(group, key=lambda number: -rows[number].response_cost):
                assign([number])
    return parts.items


def _even_out(rows: Sequence[Row], shares: list[list[int]]) -> None:
    """Swap rows of the most and the least loaded rank while that shortens the longest share.

    Args:
        rows: all rows.
        shares: row numbers of each rank, changed in place.
    """
    loads = [cost_of_share(rows, share) for share in shares]
    # The number of swaps is limited, which bounds the time of large batches.
    for _ in range(100 + 10 * len(shares)):
        heavy = loads.index(max(loads))
        light = loads.index(min(loads))
        if heavy == light or not shares[light]:
            return
        from_heavy, from_light = _best_swap(
            rows, shares[heavy], shares[light], loads[heavy], loads[light]
        )
        heavy_share = [number for number in shares[heavy] if number != from_heavy]
        heavy_share.append(from_light)
        light_share = [number for number in shares[light] if number != from_light]
        light_share.append(from_heavy)
        # `_best_swap` ignores prompts that rows share; the exact loads may show that the swap does
        # not shorten the longest share.
        heavy_load = cost_of_share(rows, heavy_share)
        light_load = cost_of_share(rows, light_share)
        if max(heavy_load, light_load) >= loads[heavy] * (1 - WORTHWHILE):
            return
        shares[heavy] = heavy_share
        shares[light] = light_share
        loads[heavy] = heavy_load
        loads[light] = light_load


def _best_swap(
    rows: Sequence[Row],
    heavy_share: Sequence[int],
    light_share: Sequence[int],
    heavy_load: float,
    light_load: float,
) -> tuple[int, int]:
    """Find the two rows of a heavy and a light rank whose swap leaves the smallest maximum load.

    Two rows with the same prompt are treated as if their prompts were different.

    Args:
        rows: all rows.
        heavy_share, light_share: row numbers of the two ranks.
        heavy_load, light_load: costs of the two ranks.

    Returns:
        The number of the row to move from the heavy rank, and of that from the light rank.
    """
    heavy_rows = [rows[number] for number in heavy_share]
    light_rows = [rows[number] for number in light_share]
    heavy_loses, light_gains = _costs_of_moves(heavy_rows, light_rows)
    light_loses, heavy_gains = _costs_of_moves(light_rows, heavy_rows)
    # Loads after each swap, [rows of the heavy rank, rows of the light rank].
    heavy_loads = heavy_load - heavy_loses[:, None] + heavy_gains[None, :]
    light_loads = light_load + light_gains[:, None] - light_loses[None, :]
    longest = np.maximum(heavy_loads, light_loads)
    from_heavy, from_light = np.unravel_index(np.argmin(longest), longest.shape)
    return heavy_share[int(from_heavy)], light_share[int(from_light)]


def _costs_of_moves(origin: Sequence[Row], target: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Costs of moving each row of one rank, `origin`, to another one, `target`.

    Returns:
        For each row, what the load of the origin loses if it leaves, and what the load of the
        target gains if it arrives: [rows of the origin] each.
    """
    origin_counts = Counter(row.prompt for row in origin)
    target_prompts = {row.prompt for row in target}
    responses = np.array([row.response_cost for row in origin])
    prompts = np.array([row.prompt_cost for row in origin])
    # A rank computes a prompt as long as it has at least one row with it.
    is_last = np.array([origin_counts[row.prompt] == 1 for row in origin])
    is_new = np.array([row.prompt not in target_prompts for row in origin])
    return responses + prompts * is_last, responses + prompts * is_new


def _imbalance(rows: Sequence[Row], shares: Sequence[Sequence[Sequence[int]]]) -> float:
    """Time of all optimizer steps divided by the time with even shares; see `Balance`.

    Args:
        rows: all rows.
        shares: for each mini-batch, the row numbers of each rank.
    """
    # Both times are multiplied by R. A step takes as long as its costliest share.
    actual_time = 0.0
    even_time = 0.0
    for rows_of_ranks in shares:
        costs = [cost_of_share(rows, share) for share in rows_of_ranks]
        actual_time += max(costs) * len(costs)
        even_time += sum(costs)
    return actual_time / even_time if even_time else 1.0
