# SPDX-License-Identifier: Apache-2.0
"""Tensors in buckets: flat pieces of memory that are sent as one.

    bucket    | embed_tokens .......... | q_proj .... | k_proj . |   free   |    uint8, a quarter of the memory
    entries     name, shape, dtype, place in bytes

The rest is for the tensor that is just being gathered, which may lie in several pieces for a moment, and for those
before it, which gloo may hold a moment longer. A tensor that is larger than a quarter is sent on its own, from where it
lies. So beyond the model a sender needs no more than `bucket_bytes`, if none of its tensors takes more than a sixth.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quadriga.errors import WeightSyncError

SHARES = 4
"""One of them holds the bucket, the others what is being gathered."""
_ALIGNMENT = 64  # bytes; of every dtype, and of what vector instructions like


@dataclass(frozen=True)
class Entry:
    """A tensor in a bucket: its dtype as torch names it, and the byte where it begins."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightSyncError(f"weight {self.name}", got=f"dtype {self.dtype!r}", expected="a dtype of torch")
        return dtype

    def as_json(self) -> dict[str, Any]:
        """For a header."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Entry":
        """From a header."""
        return cls(fields["name"], tuple(fields["shape"]), fields["dtype"], fields["offset"])


def pack(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[tuple[tuple[Entry, ...], torch.Tensor]]:
    """The stream in buckets: entries, and [bytes] uint8 that is overwritten once the next bucket is asked for.

    Args:
        weights: tensors; each is copied before the next one is asked for.
        bucket_bytes: see the module.
    """
    size = max(bucket_bytes // SHARES // _ALIGNMENT, 1) * _ALIGNMENT
    buffer: torch.Tensor | None = None
    entries: list[Entry] = []
    used = 0
    for name, tensor in weights:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if entries and buffer is not None and used + flat.numel() > size:
            yield tuple(entries), buffer[:used]
            entries, used = [], 0
        if flat.numel() > size:
            yield (Entry(name, tuple(tensor.shape), dtype, 0),), flat
            continue
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, device=tensor.device)
        entries.append(Entry(name, tuple(tensor.shape), dtype, used))
        buffer[used : used + flat.numel()].copy_(flat)
        used += -(-flat.numel() // _ALIGNMENT) * _ALIGNMENT
        del flat, tensor
    if entries and buffer is not None:
        yield tuple(entries), buffer[:used]


def unpack(entries: Sequence[Entry], content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as views of its memory.

    Raises:
        WeightSyncError: the content is too short for an entry.
    """
    for entry in entries:
        piece = content[entry.offset : entry.offset + entry.num_bytes]
        if piece.numel() != entry.num_bytes:
            raise WeightSyncError(
                f"weight {entry.name}",
                got=f"{piece.numel()} bytes",
                expected=f"{entry.num_bytes}, for {entry.dtype} {entry.shape}",
                fix="The bucket was cut short on its way.",
            )
        yield entry.name, piece.view(entry.torch_dtype).view(entry.shape)
