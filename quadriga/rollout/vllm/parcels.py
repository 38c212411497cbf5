# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to other processes of the machine: one block of shared memory, filled again and again.

sender                                 receivers
pack(weights) ── label ──> open(label) ─> copies of what stands in the block
     │ <───────── done ───────────┘
     └─ writes the block anew ── label ──> ...
"""

from collections.abc import Iterable, Iterator
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType
from typing import Any

import torch

_ALIGN = 64


class ParcelWriter:
    """Packs a stream of weights into labels, each of which names what stands in the block.

    Args:
        num_bytes: of the block; a weight that is larger gets a block that fits it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._block: SharedMemory | None = None

    def __enter__(self) -> "ParcelWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    def pack(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, Any]]:
        """One label after another. The block is written anew when the next one is asked for."""
        entries: list[list[Any]] = []
        used = 0
        for name, tensor in weights:
            # On the host and in one piece, as bytes: the dtype travels by its name.
            content = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
            if entries and used + content.numel() > self.num_bytes:
                yield self._label(entries)
                entries, used = [], 0
            block = self._room(max(self.num_bytes, content.numel()))
            torch.frombuffer(block.buf, dtype=torch.uint8, count=content.numel(), offset=used).copy_(content)
            entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), used])
            used += -(-content.numel() // _ALIGN) * _ALIGN
        if entries:
            yield self._label(entries)

    def _label(self, entries: list[list[Any]]) -> dict[str, Any]:
        assert self._block is not None
        return {"block": self._block.name, "entries": entries}

    def _room(self, num_bytes: int) -> SharedMemory:
        if self._block is None or self._block.size < num_bytes:
            self._drop()
            self._block = SharedMemory(create=True, size=num_bytes)
        return self._block

    def _drop(self) -> None:
        if self._block is not None:
            self._block.unlink()
            self._block.close()
            self._block = None


class ParcelReader:
    """Opens what a `ParcelWriter` in another process has packed; a block stays open from one label to the next."""

    def __init__(self) -> None:
        self._block: SharedMemory | None = None

    def open(self, label: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a label, copied: nothing looks into the block afterwards."""
        if self._block is None or self._block.name != label["block"]:
            self.close()
            self._block = SharedMemory(label["block"])
        for name, dtype, shape, offset in label["entries"]:
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            num_bytes = empty.numel() * empty.element_size()
            copied = bytearray(self._block.buf[offset : offset + num_bytes])
            yield name, torch.frombuffer(copied, dtype=empty.dtype).view(shape)

    def close(self) -> None:
        """Lets the block go."""
        if self._block is not None:
            self._block.close()
            self._block = None
