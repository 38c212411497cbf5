# SPDX-License-Identifier: Apache-2.0
"""Buckets: flat memory that holds several parameters, sent to or shared with other processes.

bucket    | embed_tokens .......... | q_proj .... | k_proj . |   free   |    uint8
entries     [name, shape, name of the torch dtype, offset in bytes] of each parameter: JSON
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from quadriga.errors import WeightSyncError
from quadriga.partition import buckets

NamedTensors: TypeAlias = Iterator[tuple[str, torch.Tensor]]
_ALIGNMENT = 64  # bytes; a multiple of every dtype's size, and aligned for vector instructions


def num_bytes(weight: tuple[str, torch.Tensor]) -> int:
    """Size of a named tensor in bytes."""
    return weight[1].nbytes


def pack(
    weights: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[tuple[list[list[Any]], torch.Tensor]]:
    """Pack a stream of parameters into buckets.

    Each parameter is copied before the next one is requested. All buckets use the same memory, so a
    bucket is valid until the next one is requested.

    Args:
        weights: names and tensors [...].
        bucket_bytes: size of a bucket. A larger parameter has a bucket of its own.
        allocate: returns [bytes] uint8 memory for buckets, and is called again for a parameter
            larger than `bucket_bytes`. By default buckets are on the device of the parameters, and
            a larger parameter is not copied.

    Returns:
        An iterator over buckets: their entries, and their content [bytes] uint8.
    """
    size = max(bucket_bytes // _ALIGNMENT, 1) * _ALIGNMENT
    memory = None
    content = torch.empty(0)

    def put(weight: tuple[str, torch.Tensor], offset: int) -> list[Any]:
        """Copy a parameter to its offset in the bucket, and return its entry.

        `content` is then the bucket up to the end of this parameter.
        """
        nonlocal memory, content
        name, tensor = weight
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        tensor_bytes = flat.numel()
        entry = [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset]
        # A parameter larger than a bucket is sent from the memory that it has, without a copy.
        if tensor_bytes > size and allocate is None:
            content = flat
            return entry
        if memory is None or memory.numel() < tensor_bytes:
            make = allocate or partial(torch.empty, dtype=torch.uint8, device=tensor.device)
            memory = make(max(size, tensor_bytes))
        content = memory[: offset + tensor_bytes]
        content[offset:].copy_(flat)
        return entry

    # `buckets` calls `put` for each parameter, and yields the entries of a full bucket.
    for entries in buckets(weights, num_bytes, size, put, alignment=_ALIGNMENT):
        yield entries, content


def unpack(entries: Iterable[Sequence[Any]], content: torch.Tensor) -> NamedTensors:
    """Yield the parameters of a bucket, as views of its memory.

    Args:
        entries: name, shape, dtype and offset of each parameter, from `pack`.
        content: [bytes] uint8.

    Returns:
        An iterator over names and tensors [...].

    Raises:
        WeightSyncError: the content is too short for an entry, or a dtype is unknown.
    """
    for name, shape, dtype_name, offset in entries:
        where = f"weight {name}"
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightSyncError(where, got=f"dtype {dtype_name!r}", expected="a torch dtype")
        # A slice of content that is too short is shorter than the entry says.
        size = math.prod(shape) * dtype.itemsize
        flat = content[offset : offset + size]
        if flat.numel() != size:
            raise WeightSyncError(
                where,
                got=f"{flat.numel()} bytes",
                expected=f"{size}, for {dtype_name} {tuple(shape)}",
                fix="The bucket was truncated in transfer.",
            )
        yield name, flat.view(dtype).view(shape)
