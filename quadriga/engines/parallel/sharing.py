# SPDX-License-Identifier: Apache-2.0
"""Which tokens, heads and vocabulary entries of a packed batch each of the ranks with the same rows computes.

    tokens of a batch      [ . . . . | . . . . ]     sp parts of the batch
    between the layers     [ . . | . . | . . | . . ] each of these in tp parts: norms and sums compute those alone
    head, vocabulary       gathered over tp; each rank has its part of the vocabulary
    head, values           each rank computes the values of its own tokens

All of them end with the same outputs of all predicted tokens, and compute the same loss. Below them: collectives that
gradients pass through; a gradient goes back the way its value came.

Legend: N packed tokens, n of them on this rank, M predicted tokens, D hidden size (in attention: head size), S ranks
of sequence parallelism, H query heads, K key-value heads.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from quadriga.engines.parallel.processes import Processes
from quadriga.models.attention import AttentionPlan, PackedBatch
from quadriga.models.heads import VocabularyShard, all_gather_single
from quadriga.models.scorers import ModelInputs, Scored, Sharing

Collective: TypeAlias = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]

# Versions of torch before 2.13 have it under a name that later ones warn of.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SharedTokens(Sharing):
    """The share of one rank in the work on a packed batch.

    Args:
        processes: the ranks of the engine.
        num_vocabulary: entries of the whole vocabulary.
    """

    def __init__(self, processes: Processes, num_vocabulary: int) -> None:
        layout, place = processes.layout, processes.place
        self.processes = processes
        self.has_embedding, self.has_head = processes.is_first_stage, processes.is_last_stage
        self.vocabulary: VocabularyShard | None = None
        if layout.tp > 1:
            start = sum(part_sizes(num_vocabulary, layout.tp)[: place.tp])
            self.vocabulary = VocabularyShard(processes.group("tp"), start)

    def inputs(self, batch: PackedBatch) -> ModelInputs:
        # Those of all ranks in the same tp group, which part them at the embedding.
        layout, place = self.processes.layout, self.processes.place
        plan: AttentionPlan = batch.plan
        if layout.sp == 1:
            return ModelInputs(batch.input_ids, batch.position_ids, plan)
        start, size = _part(batch.input_ids.shape[1], layout.sp, place.sp)
        return ModelInputs(
            batch.input_ids.narrow(1, start, size),
            batch.position_ids.narrow(1, start, size),
            UlyssesAttention(plan, self.processes.group("sp")),
        )

    def scored(self, hidden: torch.Tensor, batch: PackedBatch, *, is_vocabulary: bool) -> Scored:
        layout, place = self.processes.layout, self.processes.place
        num_tokens = batch.input_ids.shape[1]
        start, size = _part(num_tokens, layout.sp, place.sp)
        if layout.tp > 1 and is_vocabulary:
            hidden = gather(hidden, self.processes.group("tp"))
        elif layout.tp > 1:
            inside, size = _part(size, layout.tp, place.tp)
            start += inside
        here = (batch.predictors >= start) & (batch.predictors < start + size)
        places = here.nonzero()[:, 0]
        # With the vocabulary shared, all ranks of a tp group have scored the same tokens.
        is_joined = {"sp": layout.sp > 1, "tp": layout.tp > 1 and not is_vocabulary}
        groups = [self.processes.group(name) for name, is_shared in is_joined.items() if is_shared]
        return Scored(
            hidden.index_select(0, batch.predictors[places] - start),
            batch.targets[places],
            partial(fill, places=places, size=len(batch.targets), groups=groups),
        )


def part_sizes(total: int, parts: int) -> list[int]:
    """Sizes [parts] of a dimension that is shared as `torch.chunk` cuts it: the last may be smaller, or empty."""
    size = -(-total // parts)
    return [max(0, min(size, total - part * size)) for part in range(parts)]


def _part(total: int, parts: int, number: int) -> tuple[int, int]:
    """Start and size of one of the equal parts of a number of tokens."""
    size = total // parts
    return number * size, size


class UlyssesAttention:
    """Ulysses sequence parallelism, arXiv:2309.14509: an attention plan for the tokens of all ranks, called with those
    of one. A rank has some tokens of all heads, but for attention, where it has all tokens of some heads.

        all but attention   [N/S tokens, H heads]
        attention           [N tokens, H/S heads]      one all-to-all before, for the inputs of attention; one after

    Args:
        plan: of all N tokens.
        group: the S ranks.
    """

    def __init__(self, plan: AttentionPlan, group: dist.ProcessGroup) -> None:
        self.plan, self.group = plan, group
        self.size = dist.get_world_size(group)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[1, H, N/S, D], [1, K, N/S, D] twice -> [1, N/S, H, D]."""
        # Each key-value head is repeated so that every rank gets as many, next to the queries they serve.
        copies, per_kv_head = self.size // math.gcd(key.shape[1], self.size), query.shape[1] // key.shape[1]
        copies = copies if per_kv_head % copies == 0 else per_kv_head
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        heads = [part.shape[1] // self.size for part in (query, key, value)]
        # [1, H, n, D] -> [S, H/S, n, D]: the heads of rank s in part s; the inputs of attention in one exchange.
        parts = torch.cat([part[0].unflatten(0, (self.size, -1)) for part in (query, key, value)], 1)
        all_tokens = all_to_all(parts, self.group).transpose(0, 1).flatten(1, 2)  # [heads, N, D]
        queries, keys, values = (part[None] for part in all_tokens.split(heads))
        mixed = self.plan.attend(layer, queries, keys, values, scale)  # [1, N, H/S, D]
        back = all_to_all(mixed[0].unflatten(0, (self.size, -1)), self.group)  # [S, n, H/S, D]
        return back.transpose(0, 1).flatten(1, 2)[None]


class _ThereAndBack(torch.autograd.Function):
    """One collective for values, and one for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, group: dist.ProcessGroup, there: Collective, back: Collective
    ) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return there(value, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part s of [S, ...] goes to rank s; returns the parts for this one, in the order of the senders.

    The gradient of what was received goes back to its sender.
    """
    return _ThereAndBack.apply(parts, group, _exchange, _exchange)


def gather(piece: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, ...] of each rank -> [S * n, ...] on all; each computes its part of the result's gradient.

    The gradients of the copies are parts of a sum: they are added up, and each rank gets its piece.
    """
    return _ThereAndBack.apply(piece, group, _gather, _scatter_sum)


def scatter_sum(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S * n, ...] of each rank, parts of a sum -> the sum's piece [n, ...] of this one.

    The way back of `gather`: the gradients of the pieces are put together.
    """
    return _ThereAndBack.apply(whole, group, _scatter_sum, _gather)


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _gather(piece: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    piece = piece.contiguous()
    whole = piece.new_empty(dist.get_world_size(group) * piece.shape[0], *piece.shape[1:])
    all_gather_single(whole, piece, group=group)
    return whole


def _scatter_sum(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    piece = whole.new_empty(whole.shape[0] // dist.get_world_size(group), *whole.shape[1:])
    _reduce_scatter_single(piece, whole.contiguous(), group=group)
    return piece


class _Fill(torch.autograd.Function):
    """All ranks compute the same of the result, so the gradient of this one's entries is what it has of them."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, places: torch.Tensor, size: int, groups: Sequence[dist.ProcessGroup]
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        result = values.new_zeros(size)
        result[places] = values
        for group in groups:
            dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None


def fill(values: torch.Tensor, places: torch.Tensor, size: int, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """One vector [size] out of the ranks' `values`, each at its own `places`; the same on all of them."""
    return _Fill.apply(values, places, size, groups)
