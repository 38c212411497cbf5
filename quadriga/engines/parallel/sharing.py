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
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.engines.parallel.processes import Processes
from quadriga.models.attention import PLAIN, AttentionOptions, AttentionPlan, PackedBatch
from quadriga.models.experts import RoutedTokens
from quadriga.models.heads import VocabularyShard, all_gather_single
from quadriga.models.scorers import Scored, Sharing
from quadriga.partition import part_of

_Move: TypeAlias = Callable[[Tensor, dist.ProcessGroup], Tensor]
# Versions of torch before 2.13 have it under a name that later ones warn of.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SharedTokens(Sharing):
    """The share of one rank in the work on a packed batch."""

    def __init__(self, processes: Processes, num_vocabulary: int) -> None:
        layout, place = processes.layout, processes.place
        self.processes = processes
        self.has_embedding, self.has_head = processes.is_first_stage, processes.is_last_stage
        # Ranks of a tp group that have some of the tokens each where layers are not cut.
        self.num_parts = layout.tp
        self.vocabulary: VocabularyShard | None = None
        if layout.tp > 1:
            start, _ = part_of(num_vocabulary, layout.tp, place.tp)
            self.vocabulary = VocabularyShard(processes.group("tp"), start)

    def inputs(self, batch: PackedBatch) -> tuple[Tensor, Tensor, AttentionPlan]:
        # Those of all ranks in the same tp group, which part them at the embedding.
        layout, place = self.processes.layout, self.processes.place
        plan: AttentionPlan = batch.plan
        if layout.sp == 1:
            return batch.input_ids, batch.position_ids, plan
        start, size = part_of(batch.input_ids.shape[1], layout.sp, place.sp)
        tokens, positions = (
            whole.narrow(-1, start, size) for whole in (batch.input_ids, batch.position_ids)
        )
        return tokens, positions, UlyssesAttention(plan, self.processes.group("sp"))

    def _own_tokens(self, batch: PackedBatch) -> tuple[int, int]:
        """The packed index of the first token that this rank has between the layers, and their number."""
        start, size = part_of(batch.num_tokens, self.processes.layout.sp, self.processes.place.sp)
        inside, size = part_of(
            size, self.num_parts, self.processes.place.tp if self.num_parts > 1 else 0
        )
        return start + inside, size

    def first_token(self, batch: PackedBatch) -> int | None:
        return (
            None if self.processes.layout.sp == self.num_parts == 1 else self._own_tokens(batch)[0]
        )

    def scored(self, hidden: Tensor, batch: PackedBatch, *, in_parts: bool) -> Scored:
        start, size = self._own_tokens(batch)
        if self.num_parts > 1 and in_parts:
            hidden = Collective.apply(hidden, self.processes.group("tp"), all_gather)
            start, size = part_of(
                batch.num_tokens, self.processes.layout.sp, self.processes.place.sp
            )
        # With the vocabulary shared, all ranks of a tp group have scored the same tokens.
        groups = self._groups(with_tp=not in_parts)
        if not groups:
            return super().scored(hidden, batch, in_parts=in_parts)
        here = (batch.host_predictors >= start) & (batch.host_predictors < start + size)
        places = torch.from_numpy(np.flatnonzero(here)).to(
            hidden.device
        )  # sought on the host, which does not wait
        states = hidden.index_select(0, batch.predictors[places] - start)
        return (
            states,
            batch.targets[places],
            partial(_Fill.apply, places, len(batch.targets), groups),
        )

    def routed(self, batch: PackedBatch, num_tokens: int) -> RoutedTokens:
        routed, groups = super().routed(batch, num_tokens), self._groups()
        if groups:
            start, size = self._own_tokens(batch)
            here = (batch.predictors >= start) & (batch.predictors < start + size)
            routed.start, routed.places, routed.rows = (
                start,
                batch.predictors[here] - start,
                batch.rows[here],
            )
            routed.add_up = lambda values: [
                dist.all_reduce(values, group=group) for group in groups
            ]
        return routed

    def _groups(self, *, with_tp: bool = True) -> list[dist.ProcessGroup]:
        """The ranks that have other tokens of the same rows, by the axis that parts them."""
        axes = {"tp": self.num_parts if with_tp else 1, "sp": self.processes.layout.sp}
        return [self.processes.group(name) for name, size in axes.items() if size > 1]

    def joined(self, values: Tensor) -> Tensor:
        for group in self._groups():
            values = all_gather(values, group)
        return values


class UlyssesAttention:
    """Ulysses sequence parallelism, arXiv:2309.14509: an attention plan for the N tokens of all S ranks, called with
    those of one. A rank has some tokens of all heads, but for attention, where it has all tokens of some heads.

        all but attention   [N/S tokens, H heads]
        attention           [N tokens, H/S heads]      one all-to-all before, for the inputs of attention; one after
    """

    def __init__(self, plan: AttentionPlan, group: dist.ProcessGroup) -> None:
        self.plan, self.group = plan, group
        self.size = dist.get_world_size(group)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """[1, H, N/S, D], [1, K, N/S, D] twice -> [1, N/S, H, D]."""
        # Each key-value head is repeated so that every rank gets as many, next to the queries they serve.
        copies, per_kv_head = (
            self.size // math.gcd(key.shape[1], self.size),
            query.shape[1] // key.shape[1],
        )
        copies = copies if per_kv_head % copies == 0 else per_kv_head
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        heads = [part.shape[1] // self.size for part in (query, key, value)]
        # [1, H, n, D] -> [S, H/S, n, D]: the heads of rank s in part s; the inputs of attention in one exchange.
        parts = torch.cat(
            [part[0].unflatten(0, (self.size, -1)) for part in (query, key, value)], 1
        )
        all_tokens = (
            Collective.apply(parts, self.group, all_to_all).transpose(0, 1).flatten(1, 2)
        )  # [heads, N, D]
        queries, keys, values = (part[None] for part in all_tokens.split(heads))
        if options.sinks is not None:
            options = replace(
                options, sinks=options.sinks.chunk(self.size)[dist.get_rank(self.group)]
            )
        mixed = self.plan.attend(layer, queries, keys, values, scale, options)  # [1, N, H/S, D]
        back = Collective.apply(
            mixed[0].unflatten(0, (self.size, -1)), self.group, all_to_all
        )  # [S, n, H/S, D]
        return back.transpose(0, 1).flatten(1, 2)[None]


class Collective(torch.autograd.Function):
    """One collective for values [...], and the reverse one for their gradients: that of what was received goes back to
    its sender; those of what all ranks have gathered are added up, and each rank gets that of its piece."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, there: _Move) -> Tensor:
        ctx.group, ctx.back = group, _REVERSE[there]
        return there(value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad, ctx.group), None, None


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part s of [S, ...] goes to rank s; returns the parts for this one, in the order of the senders."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def all_gather(piece: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of each rank -> [S * n, ...] on all."""
    piece = piece.contiguous()
    whole = piece.new_empty(dist.get_world_size(group) * piece.shape[0], *piece.shape[1:])
    all_gather_single(whole, piece, group=group)
    return whole


def reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S * n, ...] of each rank, parts of a sum -> the sum's piece [n, ...] of this one."""
    piece = whole.new_empty(whole.shape[0] // dist.get_world_size(group), *whole.shape[1:])
    _reduce_scatter_single(piece, whole.contiguous(), group=group)
    return piece


_REVERSE: dict[_Move, _Move] = {
    all_to_all: all_to_all,
    all_gather: reduce_scatter,
    reduce_scatter: all_gather,
}


class _Fill(torch.autograd.Function):
    """One tensor [size, ...] out of the ranks' values, each at its own places; the same on all of them. All compute the
    same of it, so the gradient of this one's entries is what it has of them."""

    @staticmethod
    def forward(
        ctx: Any, places: Tensor, size: int, groups: Sequence[dist.ProcessGroup], values: Tensor
    ) -> Tensor:
        ctx.save_for_backward(places)
        result = values.new_zeros(size, *values.shape[1:])
        result[places] = values
        for group in groups:
            dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor]:
        (places,) = ctx.saved_tensors
        return None, None, None, grad[places]
