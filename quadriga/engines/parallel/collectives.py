# SPDX-License-Identifier: Apache-2.0
"""Collectives that gradients pass through. A gradient goes back the way its value came."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Collective: TypeAlias = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


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
    """Part s of [S, ...] goes to process s; returns the parts for this one, in the order of the senders.

    The gradient of what was received goes back to its sender.
    """
    return _ThereAndBack.apply(parts, group, _exchange, _exchange)


def gather(piece: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, ...] of each process -> [S * n, ...] on all; each computes its part of the result's gradient.

    The gradients of the copies are parts of a sum: they are added up, and each process gets its piece.
    """
    return _ThereAndBack.apply(piece, group, _gather, _scatter_sum)


def scatter_sum(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S * n, ...] of each process, parts of a sum -> the sum's piece [n, ...] of this one.

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
    dist.all_gather_into_tensor(whole, piece, group=group)
    return whole


def _scatter_sum(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    piece = whole.new_empty(whole.shape[0] // dist.get_world_size(group), *whole.shape[1:])
    dist.reduce_scatter_tensor(piece, whole.contiguous(), group=group)
    return piece


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
