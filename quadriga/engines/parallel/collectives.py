# SPDX-License-Identifier: Apache-2.0
"""Collectives that gradients pass through. A gradient goes back the way its value came."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class _AllToAll(torch.autograd.Function):
    """[S, ...]: part s goes to process s. The gradient of what was received goes back to its sender."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part s of [S, ...] goes to process s; returns the parts for this one, in the order of the senders."""
    return _AllToAll.apply(parts, group)


class _Gather(torch.autograd.Function):
    """The gradients of the copies are parts of a sum: they are added up, and each process gets its piece."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(piece, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scatter_sum(grad, ctx.group), None


def gather(piece: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, ...] of each process -> [S * n, ...] on all; each computes its part of the result's gradient."""
    return _Gather.apply(piece, group)


class _Fill(torch.autograd.Function):
    """All processes compute the same of the result, so the gradient of this one's entries is what it has of them."""

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
    """One vector [size] out of the processes' `values`, each at its own `places`; the same on all of them."""
    return _Fill.apply(values, places, size, groups)


class _ScatterSum(torch.autograd.Function):
    """The way back of `gather`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _scatter_sum(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group), None


def scatter_sum(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S * n, ...] of each process, parts of a sum -> the sum's piece [n, ...] of this one."""
    return _ScatterSum.apply(whole, group)


def _gather(piece: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    piece = piece.contiguous()
    whole = piece.new_empty(dist.get_world_size(group) * piece.shape[0], *piece.shape[1:])
    dist.all_gather_into_tensor(whole, piece, group=group)
    return whole


def _scatter_sum(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    piece = whole.new_empty(whole.shape[0] // dist.get_world_size(group), *whole.shape[1:])
    dist.reduce_scatter_tensor(piece, whole.contiguous(), group=group)
    return piece
