# SPDX-License-Identifier: Apache-2.0
"""The order of a batch's rows for the ranks; `row_index` numbers them in the order that they had before.

    responses ── order_for_ranks ──> log-probs, values, advantages, updates ── by row_index ──> rows for people

    rows of the batch     0 1 2 3 4 5 6 | 7 8 9 ...     mini-batches, in the order of the batch
    order                 0 3 6 7 ... ; 1 4 8 ... ; 2 5 9 ...
                          rank 0        rank 1      rank 2

All data-parallel ranks meet at each optimizer step, so the rows of each mini-batch are shared evenly, not those of the
batch alone. The number of rows that a rank gets is fixed, by `DataProto.chunk`; which ones is not. The responses to a
prompt begin on one rank, where the prompt is computed once for all of them, and are parted only where that shortens
the step. What a rank gets changes no gradient: every row has its number, `row_index`.

Legend: R ranks.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quadriga.config import ActorConfig
from quadriga.partition import Parts
from quadriga.protocol import DataProto

# A swap that shortens the longest share by less than this part of it is not worth making.
WORTHWHILE = 1e-3


@dataclass(frozen=True)
class Row:
    """A response: its prompt (equal for those that share its computation), its lengths, and what it costs.

    `response_cost` is what it adds where its prompt is computed already.
    """

    prompt: Hashable
    num_prompt_tokens: int
    num_response_tokens: int
    prompt_cost: float
    response_cost: float


@dataclass(frozen=True)
class SequenceCost:
    """What sequences cost a model, in units of a token's way through its layers without attention."""

    # Length of a sequence at which attention costs as much as the layers: 12 times the hidden size, or less with
    # grouped heads or a narrow MLP. The default is that of a hidden size of 2048.
    attention_tokens: float = 24_576
    head: float = 0.0  # cost of the vocabulary projection for a response token
    images: Callable[[torch.Tensor], float] = lambda grids: (
        0.0
    )  # of the vision encoder, for images or videos [I, 3]

    def row(
        self,
        prompt: Hashable,
        num_prompt_tokens: int,
        num_response_tokens: int,
        images: float = 0.0,
    ) -> Row:
        lengths = (num_prompt_tokens, num_prompt_tokens + num_response_tokens)
        before, whole = (length * (1 + length / self.attention_tokens) for length in lengths)
        response_cost = whole - before + self.head * num_response_tokens
        return Row(prompt, num_prompt_tokens, num_response_tokens, before + images, response_cost)


def order_for_ranks(
    batch: DataProto,
    num_ranks: int,
    responses_per_prompt: int,
    config: ActorConfig,
    cost: SequenceCost,
) -> dict[str, float]:
    """Number the rows by `row_index`, and arrange them, in place, so that equal chunks of the batch are equal work.

    `batch` has prompts with responses, [B]; with one rank the rows keep their order. `config` is the actor's section,
    whose mini-batches are to be even, `cost` that of its model. Returns metrics `balance/...`.
    """
    batch.batch["row_index"] = torch.arange(len(batch))
    if num_ranks == 1:
        return {}
    lengths = batch.batch["attention_mask"].sum(-1)
    responses = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].sum(-1)
    # Without sharing each row computes a prompt of its own.
    prompts = batch.non_tensor_batch["uid"] if config.use_prefix_sharing else range(len(batch))
    inputs = batch.non_tensor_batch.get("multi_modal_inputs", [{}] * len(batch))
    images = [
        sum(cost.images(one[name]) for name in one or () if name.endswith("grid_thw"))
        for one in inputs
    ]
    facts = zip(prompts, (lengths - responses).tolist(), responses.tolist(), images, strict=True)
    rows = [cost.row(*one) for one in facts]
    # A shuffled order is another one in each pass: only the batch as a whole can be even.
    size = len(batch) if config.shuffle else config.ppo_mini_batch_size * responses_per_prompt
    found = balance(rows, num_ranks, size)
    batch.reorder(found.order)
    return {
        "balance/imbalance": found.imbalance,
        "balance/imbalance_before": found.imbalance_before,
    }


@dataclass(frozen=True)
class Balance:
    """An order of the rows, and how even the shares of its equal chunks are."""

    order: list[int]  # row numbers; the first chunk is for rank 0, and so on
    imbalance: float  # time of all steps over the time with even shares: 1 is even, R has all work on one rank
    imbalance_before: float  # the same of the rows as they came


def balance(rows: Sequence[Row], num_ranks: int, mini_batch_size: int) -> Balance:
    """Share the rows of a batch evenly over ranks.

    `mini_batch_size` counts the rows of an optimizer step, in the order of the batch; all rows where it is shuffled
    later.
    """
    size, larger = divmod(len(rows), num_ranks)
    rank_of = [rank for rank in range(num_ranks) for _ in range(size + (rank < larger))]
    shares: list[list[list[int]]] = []
    before: list[list[list[int]]] = []
    for start in range(0, len(rows), mini_batch_size):
        members = range(start, min(start + mini_batch_size, len(rows)))
        # One row after another in turn: each rank's shares add up to its chunk, and no two differ by more than a row.
        quotas = [
            len(range(rank, members.stop, num_ranks)) - len(range(rank, start, num_ranks))
            for rank in range(num_ranks)
        ]
        ranks = _share(rows, members, quotas)
        _even_out(rows, ranks)
        shares.append(ranks)
        before.append(
            [[number for number in members if rank_of[number] == rank] for rank in range(num_ranks)]
        )
    order = [row for rank in range(num_ranks) for ranks in shares for row in sorted(ranks[rank])]
    return Balance(order, _imbalance(rows, shares), _imbalance(rows, before))


def cost_of_share(rows: Sequence[Row], share: Iterable[int]) -> float:
    """Of some rows on one rank: each prompt once, and every response."""
    members = [rows[number] for number in share]
    prompts = {row.prompt: row.prompt_cost for row in members}
    return sum(prompts.values()) + sum(row.response_cost for row in members)


def _share(rows: Sequence[Row], members: Sequence[int], quotas: Sequence[int]) -> list[list[int]]:
    """Costly groups first, each to the rank that has room and is then the least loaded; one that finds no room whole
    is given row by row."""
    groups: dict[Hashable, list[int]] = {}
    for number in members:
        groups.setdefault(rows[number].prompt, []).append(number)
    ranks = Parts(quotas)
    prompts: list[set[Hashable]] = [set() for _ in quotas]

    def give(group: Sequence[int]) -> bool:
        first = rows[group[0]]
        prompt_costs = np.array(
            [0.0 if first.prompt in held else first.prompt_cost for held in prompts]
        )
        responses = sum(rows[number].response_cost for number in group)
        rank = ranks.give(group, responses, size=len(group), extra=prompt_costs)
        if rank is not None:
            prompts[rank].add(first.prompt)
        return rank is not None

    for group in sorted(groups.values(), key=lambda group: -cost_of_share(rows, group)):
        if not give(group):
            for number in sorted(group, key=lambda number: -rows[number].response_cost):
                give([number])
    return ranks.items


def _even_out(rows: Sequence[Row], shares: list[list[int]]) -> None:
    """Swap rows of the most and the least loaded rank, in place, as long as that shortens the longest share."""
    loads = [cost_of_share(rows, share) for share in shares]
    for _ in range(100 + 10 * len(shares)):
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        if heavy == light or not shares[light]:
            return
        out, into = _best_swap(rows, shares, (heavy, light), (loads[heavy], loads[light]))
        swapped = [
            [*(number for number in shares[heavy] if number != out), into],
            [*(number for number in shares[light] if number != into), out],
        ]
        costs = [cost_of_share(rows, share) for share in swapped]
        if max(costs) >= loads[heavy] * (1 - WORTHWHILE):
            return
        for rank, share, cost in zip((heavy, light), swapped, costs, strict=True):
            shares[rank], loads[rank] = share, cost


def _best_swap(
    rows: Sequence[Row],
    shares: Sequence[Sequence[int]],
    ranks: tuple[int, int],
    loads: tuple[float, float],
) -> tuple[int, int]:
    """The row of each of two ranks whose exchange leaves the smaller maximum; two rows of one prompt are taken as if
    they were of different ones."""
    counts = [Counter(rows[number].prompt for number in shares[rank]) for rank in ranks]

    def changes(side: int) -> tuple[np.ndarray, np.ndarray]:
        """What each row of a side takes from it when it goes, and adds to the other when it comes."""
        members = [rows[number] for number in shares[ranks[side]]]
        responses = np.array([row.response_cost for row in members])
        prompts = np.array([row.prompt_cost for row in members])
        is_last = np.array([counts[side][row.prompt] == 1 for row in members])
        is_new = np.array([row.prompt not in counts[1 - side] for row in members])
        return responses + prompts * is_last, responses + prompts * is_new

    (heavy_loses, light_gains), (light_loses, heavy_gains) = changes(0), changes(1)
    heavy = loads[0] - heavy_loses[:, None] + heavy_gains[None, :]
    light = loads[1] + light_gains[:, None] - light_loses[None, :]
    out, into = np.unravel_index(np.argmin(np.maximum(heavy, light)), heavy.shape)
    return shares[ranks[0]][int(out)], shares[ranks[1]][int(into)]


def _imbalance(rows: Sequence[Row], shares: Sequence[Sequence[Sequence[int]]]) -> float:
    """The sum of each step's longest share over that of its mean one."""
    costs = [[cost_of_share(rows, share) for share in ranks] for ranks in shares]
    total = sum(map(sum, costs))
    return sum(max(step) * len(step) for step in costs) / total if total else 1.0
