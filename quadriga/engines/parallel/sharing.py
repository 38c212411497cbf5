# SPDX-License-Identifier: Apache-2.0
"""Division of a packed batch over ranks with the same rows: tokens, heads and vocabulary.

    tokens of a batch      [ . . . . | . . . . ]       sp parts of the batch
    between the layers     [ . . | . . | . . | . . ]   each in tp parts, for norms and sums
    head, vocabulary       gathered over tp; each rank has its part of the vocabulary
    head, values           each rank computes the values of its own tokens

All ranks end with the same outputs of all predicted tokens, and compute the same loss. The
collectives below are differentiable: gradients are exchanged by the reverse collective.

Legend: N packed tokens, n of them on this rank, M predicted tokens, D hidden size (in attention:
head size), S ranks of sequence parallelism, H query heads, K key-value heads.
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
from quadriga.models.scorers import ScoredTokens, Sharing
from quadriga.partition import part_of

_Collective: TypeAlias = Callable[[Tensor, dist.ProcessGroup], Tensor]
# Versions of torch before 2.13 have it under a name for which later ones warn.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SharedTokens(Sharing):
    """Division of a packed batch, as seen from one rank.

    Args:
        processes: the ranks of the engine.
        num_vocabulary: entries of the vocabulary.
    """

    def __init__(self, processes: Processes, num_vocabulary: int) -> None:
        layout = processes.layout
        self.processes = processes
        self.has_embedding = processes.is_first_stage
        self.has_head = processes.is_last_stage
        # Parts into which a tp group divides its tokens between the layers; 1: it does not.
        self.num_parts = layout.tp
        self.vocabulary: VocabularyShard | None = None
        if layout.tp > 1:
            start, _ = part_of(num_vocabulary, layout.tp, processes.place.tp)
            self.vocabulary = VocabularyShard(processes.group("tp"), start)

    def inputs(self, batch: PackedBatch) -> tuple[Tensor, Tensor, AttentionPlan]:
        """Tokens [1, N/S] that this rank embeds, positions of these tokens, and attention plan."""
        if self.processes.layout.sp == 1:
            return super().inputs(batch)
        # All ranks of a tp group get the same tokens, which the embedding divides.
        start, size = self._tokens_of_sp_rank(batch)
        tokens = batch.input_ids.narrow(-1, start, size)
        positions = batch.position_ids.narrow(-1, start, size)
        return tokens, positions, UlyssesAttention(batch.plan, self.processes.group("sp"))

    def _tokens_of_sp_rank(self, batch: PackedBatch) -> tuple[int, int]:
        """First packed index of the tokens of this rank's tp group, and their number."""
        return part_of(batch.num_tokens, self.processes.layout.sp, self.processes.place.sp)

    def _local_tokens(self, batch: PackedBatch) -> tuple[int, int]:
        """First packed index of the tokens that this rank holds between layers, and their number."""
        start, size = self._tokens_of_sp_rank(batch)
        part = self.processes.place.tp if self.num_parts > 1 else 0
        offset, part_size = part_of(size, self.num_parts, part)
        return start + offset, part_size

    def first_token(self, batch: PackedBatch) -> int | None:
        """Packed index of this rank's first embedding; None if it has all embeddings."""
        if self.processes.layout.sp == self.num_parts == 1:
            return None
        start, _ = self._local_tokens(batch)
        return start

    def select_predictors(
        self, hidden: Tensor, batch: PackedBatch, *, has_sharded_head: bool
    ) -> ScoredTokens:
        """Select the hidden states of the tokens from which this rank predicts a target.

        Args:
            hidden: last hidden states [n, D] of this rank's tokens.
            batch: the packed batch.
            has_sharded_head: whether tensor parallelism shards the head.

        Returns:
            States, targets and a function to join the scores of all ranks; see `ScoredTokens`.
        """
        start, size = self._local_tokens(batch)
        if self.num_parts > 1 and has_sharded_head:
            # All ranks of a tp group score the group's tokens, each with its part of the head.
            hidden = Collective.apply(hidden, self.processes.group("tp"), all_gather)
            start, size = self._tokens_of_sp_rank(batch)
        # With a sharded head, the ranks of a tp group already have equal outputs.
        groups = self._groups(with_tp=not has_sharded_head)
        if not groups:
            return super().select_predictors(hidden, batch, has_sharded_head=has_sharded_head)

        # Compare on the host, so that nothing waits for the device.
        is_local = (batch.host_predictors >= start) & (batch.host_predictors < start + size)
        indices = torch.from_numpy(np.flatnonzero(is_local)).to(hidden.device)
        states = hidden.index_select(0, batch.predictors[indices] - start)
        join = partial(_JoinOutputs.apply, indices, len(batch.targets), groups)
        return states, batch.targets[indices], join

    def routed_tokens(self, batch: PackedBatch, num_tokens: int) -> RoutedTokens:
        """Describe this rank's tokens for the routers of a mixture of experts.

        Args:
            batch: the packed batch, with its `routing`.
            num_tokens: n, number of this rank's tokens.
        """
        routed = super().routed_tokens(batch, num_tokens)
        groups = self._groups()
        if groups:
            start, size = self._local_tokens(batch)
            is_local = (batch.predictors >= start) & (batch.predictors < start + size)
            routed.start = start
            routed.predictors = batch.predictors[is_local] - start
            routed.rows = batch.rows[is_local]
            routed.add_up = lambda values: [
                dist.all_reduce(values, group=group) for group in groups
            ]
        return routed

    def _groups(self, *, with_tp: bool = True) -> list[dist.ProcessGroup]:
        """Groups of this rank whose ranks have different tokens of the same rows, tp before sp.

        Args:
            with_tp: whether to include the tp group, if it divides tokens.
        """
        groups = []
        if with_tp and self.num_parts > 1:
            groups.append(self.processes.group("tp"))
        if self.processes.layout.sp > 1:
            groups.append(self.processes.group("sp"))
        return groups

    def join_tokens(self, values: Tensor) -> Tensor:
        """Join the values [n, ...] of all ranks to [N, ...] on every rank."""
        for group in self._groups():
            values = all_gather(values, group)
        return values


class UlyssesAttention:
    """Attention plan of a rank's tokens with Ulysses sequence parallelism (arXiv:2309.14509).

    A rank has some tokens and all heads, except in attention, where it has all tokens and some
    heads.

        all but attention   [N/S tokens, H heads]
        attention           [N tokens, H/S heads]      one all-to-all before and one after

    Args:
        plan: attention of all N tokens.
        group: the S ranks.
    """

    def __init__(self, plan: AttentionPlan, group: dist.ProcessGroup) -> None:
        self.plan = plan
        self.group = group
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
        """Compute attention of this rank's tokens.

        Args:
            layer: number of the layer.
            query: [1, H, N/S, D].
            key: [1, K, N/S, D].
            value: [1, K, N/S, D].
            scale: factor of the scores.
            options: windows, sinks and others.

        Returns:
            [1, N/S, H, D].
        """
        # Repeat key-value heads until the ranks can divide them: K * num_copies is a multiple of S.
        num_copies = self.size // math.gcd(key.shape[1], self.size)
        queries_per_head = query.shape[1] // key.shape[1]
        if queries_per_head % num_copies:
            # The query heads of a key-value head cannot be divided evenly over that many copies:
            # make a copy for each query head.
            num_copies = queries_per_head
        if num_copies > 1:
            key = key.repeat_interleave(num_copies, 1)
            value = value.repeat_interleave(num_copies, 1)

        # [1, H, n, D] -> [S, H/S, n, D]: part s has the heads of rank s. Queries, keys and values
        # are exchanged together.
        inputs = [tensor[0].unflatten(0, (self.size, -1)) for tensor in (query, key, value)]
        num_heads = [tensor.shape[1] for tensor in inputs]
        received = Collective.apply(torch.cat(inputs, 1), self.group, all_to_all)
        all_tokens = received.transpose(0, 1).flatten(1, 2)  # [heads, N, D]
        queries, keys, values = (heads[None] for heads in all_tokens.split(num_heads))

        # Compute this rank's heads for all tokens.
        if options.sinks is not None:
            sinks = options.sinks.chunk(self.size)[dist.get_rank(self.group)]
            options = replace(options, sinks=sinks)
        output = self.plan.attend(layer, queries, keys, values, scale, options)  # [1, N, H/S, D]

        # Return each rank the outputs of its tokens.
        by_rank = output[0].unflatten(0, (self.size, -1))
        outputs = Collective.apply(by_rank, self.group, all_to_all)  # [S, n, H/S, D]
        return outputs.transpose(0, 1).flatten(1, 2)[None]


class Collective(torch.autograd.Function):
    """Differentiable collective: the backward pass runs the reverse collective on the gradients.

    The reverse of an all-to-all is an all-to-all. The gradients of a gathered value are summed over
    the ranks, and each rank gets the sum for its piece.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, group: dist.ProcessGroup, collective: _Collective
    ) -> Tensor:
        ctx.group = group
        ctx.reverse = _REVERSE[collective]
        return collective(value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.reverse(grad, ctx.group), None, None


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange parts between ranks.

    Args:
        parts: [S, ...]; entry i is for rank i.
        group: the S ranks.

    Returns:
        [S, ...]; entry i is from rank i.
    """
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def all_gather(piece: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the pieces of all ranks.

    Args:
        piece: [n, ...].
        group: the S ranks.

    Returns:
        [S * n, ...] on all ranks.
    """
    piece = piece.contiguous()
    gathered = piece.new_empty(dist.get_world_size(group) * piece.shape[0], *piece.shape[1:])
    all_gather_single(gathered, piece, group=group)
    return gathered


def reduce_scatter(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum tensors over ranks, and divide the sum between the ranks.

    Args:
        summand: [S * n, ...] of this rank.
        group: the S ranks.

    Returns:
        [n, ...], this rank's piece of the sum.
    """
    num_rows = summand.shape[0] // dist.get_world_size(group)
    piece = summand.new_empty(num_rows, *summand.shape[1:])
    _reduce_scatter_single(piece, summand.contiguous(), group=group)
    return piece


_REVERSE: dict[_Collective, _Collective] = {
    all_to_all: all_to_all,
    all_gather: reduce_scatter,
    reduce_scatter: all_gather,
}


class _JoinOutputs(torch.autograd.Function):
    """Join the outputs of all ranks, each with its indices, to [size, ...] on all ranks.

    Arguments of `apply`: the indices of this rank's outputs in the result; `size`; the groups whose
    ranks have different indices, tp before sp (ranks with equal outputs are in none of them); and
    this rank's outputs.

    All ranks compute the same loss of the result. Therefore the backward pass needs no collective:
    a rank's own gradient at its indices is the full gradient of its outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, size: int, groups: Sequence[dist.ProcessGroup], values: Tensor
    ) -> Tensor:
        ctx.save_for_backward(indices)
        outputs = values.new_zeros(size, *values.shape[1:])
        outputs[indices] = values
        # Summing joins them, since only one rank is not zero at an index: first over tp, then over sp.
        for group in groups:
            dist.all_reduce(outputs, group=group)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor]:
        (indices,) = ctx.saved_tensors
        return None, None, None, grad[indices]
