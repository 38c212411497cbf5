# SPDX-License-Identifier: Apache-2.0
"""Tensors in buckets: flat memory that is sent, or shared with other processes of the machine, as one.

bucket    | embed_tokens .......... | q_proj .... | k_proj . |   free   |    uint8
entries     [name, shape, dtype as torch names it, offset in bytes] of each tensor: JSON
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from quadriga.errors import WeightSyncError
from quadriga.partition import buckets

_ALIGNMENT = 64  # bytes; of every dtype, and of what vector instructions like


def num_bytes(weight: tuple[str, torch.Tensor]) -> int:
    """Bytes of a named tensor."""
    return weight[1].nbytes


def pack(
    weights: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[tuple[list[list[Any]], torch.Tensor]]:
    """Buckets of a stream: entries, and [bytes] uint8 that is overwritten once the next bucket is requested; each
    tensor is copied before the next one is requested. A tensor larger than `bucket_bytes` gets a larger bucket from
    `allocate`. Without `allocate` buckets are on the tensors' device, and a larger tensor is not copied."""
    size = max(bucket_bytes // _ALIGNMENT, 1) * _ALIGNMENT
    memory: torch.Tensor | None = None
    content = torch.empty(0)

    def put(weight: tuple[str, torch.Tensor], offset: int) -> list[Any]:
        nonlocal memory, content
        name, tensor = weight
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() > size and allocate is None:
            content = flat
        else:
            if memory is None or memory.numel() < flat.numel():
                room = max(size, flat.numel())
                memory = (
                    allocate(room)
                    if allocate
                    else torch.empty(room, dtype=torch.uint8, device=tensor.device)
                )
            content = memory[: offset + flat.numel()]
            content[offset:].copy_(flat)
        return [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset]

    for entries in buckets(weights, num_bytes, size, put, alignment=_ALIGNMENT):
        yield entries, content


def unpack(
    entries: Iterable[Sequence[Any]], content: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as views of its memory.
    Raises WeightSyncError: the content is too short for an entry, or a dtype is unknown."""
    for name, shape, dtype_name, offset in entries:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightSyncError(
                f"weight {name}", got=f"dtype {dtype_name!r}", expected="a dtype of torch"
            )
        size = math.prod(shape) * dtype.itemsize
        piece = content[offset : offset + size]
        if piece.numel() != size:
            expected, fix = (
                f"{size}, for {dtype_name} {tuple(shape)}",
                "The bucket was cut short on its way.",
            )
            raise WeightSyncError(
                f"weight {name}", got=f"{piece.numel()} bytes", expected=expected, fix=fix
            )
        yield name, piece.view(dtype).view(shape)
