# SPDX-License-Identifier: Apache-2.0
"""Tensors that leave an engine's memory between its phases, all of a kind at once, and come back as they were.

    on a CPU   they live in a memory-mapped file; at rest none of its pages belong to the process, the system's cache
               has them, and writes them to the disk where it needs the room
    on CUDA    they are copied to pinned host memory and their own memory is freed; copies go by a stream of their own,
               so that those of the optimizer come back while gradients are computed

Legend: [...] is the shape of a parameter, or of a rank's part of it.
"""

import errno
import mmap
import os
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn

from quadriga.errors import ConfigError
from quadriga.observe.machine import GIB, available_bytes

_ALIGNMENT = 64  # bytes: of vector registers


class MappedFile:
    """Copies of some tensors in a file below `folder` that has no name, so that nothing is left of it afterwards;
    `windows` [...] are these copies, in the order of the tensors, for use in their place.

    Raises ConfigError: it cannot be written there, or there is no room.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], folder: Path, what: str) -> None:
        ends = list(accumulate(-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in tensors))
        self.num_bytes = max(ends[-1], 1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder) as file:
                # Before it is taken: the others on the disk need not lose the last of it for a while.
                if self.num_bytes > shutil.disk_usage(folder).free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                # Taken now: a page without room would end the process when it is written.
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
                self._memory = mmap.mmap(file.fileno(), self.num_bytes)
        except OSError as error:
            got = f"{folder} ({error.strerror}), for {self.num_bytes / GIB:.2f} GiB: the {what}"
            expected = "a folder on a disk with room that may be written"
            fix = "Set it to such a folder, or leave param_offload and optimizer_offload out."
            raise ConfigError("trainer.offload_dir", got=got, expected=expected, fix=fix) from error
        content = torch.frombuffer(self._memory, dtype=torch.uint8)
        starts = [0, *ends[:-1]]
        self.windows = [
            content[start : start + one.nbytes].view(one.dtype).view(one.shape)
            for start, one in zip(starts, tensors, strict=True)
        ]
        with torch.no_grad():
            torch._foreach_copy_(self.windows, list(tensors))

    def sleep(self, *, is_changed: bool) -> None:
        """Give all pages back."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def wake(self) -> None:
        """Pages come back as they are touched."""

    wait = wake


class PinnedCopy:
    """Pinned host memory for tensors on a CUDA device, which stay the same. ConfigError: there is not so much."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream, what: str
    ) -> None:
        # Several tensors may be parts of one storage.
        storages = {
            one.data_ptr(): one
            for one in map(torch.Tensor.untyped_storage, tensors)
            if one.nbytes()
        }
        self._storages, self._stream = list(storages.values()), stream
        self._sizes = [one.nbytes() for one in self._storages]
        self.num_bytes = sum(self._sizes)
        if self.num_bytes > (free := available_bytes()):
            where, expected = (
                "fsdp_config.param_offload and optimizer_offload",
                "as much free memory on the host",
            )
            got = f"{self.num_bytes / GIB:.2f} GiB to keep on the host (the {what}), with {free / GIB:.2f} GiB free"
            fix = "Leave them out, or use more ranks with fsdp_config.fsdp_size=-1."
            raise ConfigError(where, got=got, expected=expected, fix=fix)
        self._copies = [
            torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in self._sizes
        ]
        self._arrived = torch.cuda.Event()

    def sleep(self, *, is_changed: bool) -> None:
        """Copy to the host what was changed since it came from there, and free the memory on the device."""
        if is_changed:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for copy, storage in zip(self._copies, self._storages, strict=True):
                    copy.untyped_storage().copy_(storage, non_blocking=True)
        # Also for what may still be on its way here.
        self._stream.synchronize()
        for storage in self._storages:
            storage.resize_(0)

    def wake(self) -> None:
        """Begin to copy to the device; `wait` before the tensors are used."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        # The memory may be that of something that the current stream has yet to read.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy, storage in zip(self._copies, self._storages, strict=True):
                storage.copy_(copy.untyped_storage(), non_blocking=True)
            self._arrived.record(self._stream)

    def wait(self) -> None:
        """Let the current stream go on when the tensors are there."""
        torch.cuda.current_stream().wait_event(self._arrived)


class ActivationsOnHost(torch.autograd.graph.saved_tensors_hooks):
    """Context in which what a forward pass of `root` keeps for its backward pass goes to the memory of the host, from a
    GPU to pinned memory; weights, which the pass needs too, stay where they are: sharded ones are known once gathered.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__(self._to_host, self._to_device)
        self._weights: set[int] = set()
        """Storages, by their address: views of a weight, its transpose above all, share it."""
        for module in root.modules():
            module.register_forward_pre_hook(partial(self._note, recurse=module is root))

    def _note(self, module: nn.Module, inputs: Any, *, recurse: bool) -> None:
        self._weights.update(
            one.untyped_storage()._cdata for one in module.parameters(recurse=recurse)
        )

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
        if tensor.untyped_storage()._cdata in self._weights:
            return tensor
        # All copies are on the stream that computes: none is read before it is whole.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, copy.copy_(tensor, non_blocking=True)

    def _to_device(self, kept: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else kept[1].to(kept[0], non_blocking=True)
