# SPDX-License-Identifier: Apache-2.0
"""Tensors in buckets: flat memory that is sent, or shared with other processes of the machine, as one.

bucket    | embed_tokens .......... | q_proj .... | k_proj . |   free   |    uint8
entries     name, shape, dtype, offset in bytes
"""

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quadriga.errors import WeightSyncError
from quadriga.partition import buckets

_ALIGNMENT = 64  # bytes; of every dtype, and of what vector instructions like


@dataclass(frozen=True)
class Entry:
    """A tensor in a bucket: its dtype as torch names it, and the byte where it begins."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Entry":
        """From a header; `dataclasses.asdict` makes one."""
        return cls(fields["name"], tuple(fields["shape"]), fields["dtype"], fields["offset"])


def pack(
    weights: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[tuple[list[Entry], torch.Tensor]]:
    """The stream in buckets: entries, and [bytes] uint8 that is overwritten once the next bucket is requested.

    Args:
        weights: tensors; each is copied before the next one is requested.
        bucket_bytes: size of a bucket.
        allocate: makes memory for the bucket, [bytes] uint8; a larger tensor gets a larger bucket. None: memory on the
            tensors' device, and a tensor that is larger than a bucket is given from where it lies.
    """
    size = max(bucket_bytes // _ALIGNMENT, 1) * _ALIGNMENT
    memory: torch.Tensor | None = None
    content = torch.empty(0)

    def put(weight: tuple[str, torch.Tensor], offset: int) -> Entry:
        nonlocal memory, content
        name, tensor = weight
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() > size and allocate is None:
            content = flat
        else:
            if memory is None or memory.numel() < flat.numel():
                room = max(size, flat.numel())
                memory = allocate(room) if allocate else torch.empty(room, dtype=torch.uint8, device=tensor.device)
            content = memory[: offset + flat.numel()]
            content[offset:].copy_(flat)
        return Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset)

    for entries in buckets(weights, lambda weight: weight[1].nbytes, size, put, alignment=_ALIGNMENT):
        yield entries, content


def unpack(entries: Sequence[Entry], content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as views of its memory.

    Raises:
        WeightSyncError: the content is too short for an entry, or a dtype is unknown.
    """
    for entry in entries:
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightSyncError(f"weight {entry.name}", got=f"dtype {entry.dtype!r}", expected="a dtype of torch")
        num_bytes = math.prod(entry.shape) * dtype.itemsize
        piece = content[entry.offset : entry.offset + num_bytes]
        if piece.numel() != num_bytes:
            raise WeightSyncError(
                f"weight {entry.name}",
                got=f"{piece.numel()} bytes",
                expected=f"{num_bytes}, for {entry.dtype} {entry.shape}",
                fix="The bucket was cut short on its way.",
            )
        yield entry.name, piece.view(dtype).view(entry.shape)


def pack_shared(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Generator[dict[str, Any], None, None]:
    """The stream in buckets of shared memory, one after the other in the same place.

    Yields:
        What `open_shared` in another process needs to read a bucket; it is overwritten once the next is requested.
    """
    file = os.memfd_create("quadriga-weights")  # ends with this process, however that ends
    path = f"/proc/{os.getpid()}/fd/{file}"

    def allocate(num_bytes: int) -> torch.Tensor:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)

    try:
        for entries, content in pack(weights, bucket_bytes, allocate):
            yield {"path": path, "num_bytes": content.numel(), "entries": [asdict(entry) for entry in entries]}
    finally:
        os.close(file)


def open_shared(bucket: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket that another process has packed by `pack_shared`, copied one by one."""
    content = torch.from_file(bucket["path"], shared=True, size=bucket["num_bytes"], dtype=torch.uint8)
    for name, tensor in unpack([Entry.from_json(fields) for fields in bucket["entries"]], content):
        yield name, tensor.clone()
