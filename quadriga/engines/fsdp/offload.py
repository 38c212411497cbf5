# SPDX-License-Identifier: Apache-2.0
"""Offload the tensors of an engine between its phases, kind by kind, and restore them unchanged.

    on a CPU   Tensors live in a memory-mapped file. While they are offloaded, no page belongs to
               the process: pages are in the system's page cache, which writes them to the disk when
               memory is short.
    on CUDA    Tensors are copied to pinned host memory, and their device memory is freed. Copies
               use a separate stream, so that the optimizer's tensors return while gradients are
               computed.

Legend: [...] is the shape of a parameter, or of a rank's shard of it.
"""

import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn

from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import ConfigError
from quadriga.observe.kernel import kernel_identity
from quadriga.observe.machine import GIB, available_bytes

_ALIGNMENT = 64  # bytes; the size of the largest vector registers


class MappedFile:
    """Copies of tensors in an unnamed file, which disappears with the process.

    Args:
        tensors: tensors [...] to copy.
        folder: folder of the file; created if necessary.
        description: what the tensors are, for an error.

    Attributes:
        windows: the copies [...] in the file, in the order of the tensors. The caller uses them in
            place of the tensors.
        num_bytes: size of the file.

    Raises:
        ConfigError: the folder cannot be written, or lacks space.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], folder: Path, description: str) -> None:
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        *starts, total = accumulate(sizes, initial=0)
        self.num_bytes = max(total, 1)  # an empty file cannot be mapped
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder) as file:
                # Check first: allocating would take the last space from other users of the disk.
                if self.num_bytes > shutil.disk_usage(folder).free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                # Allocate now: a page without space would kill the process when it is written.
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
                self._memory = mmap.mmap(file.fileno(), self.num_bytes)
        except OSError as error:
            size = f"{self.num_bytes / GIB:.2f} GiB"
            raise ConfigError(
                "trainer.offload_dir",
                got=f"{folder} ({error.strerror}), for {size}: the {description}",
                expected="a writable folder on a disk with enough space",
                fix="Set it to such a folder, or leave out param_offload and optimizer_offload.",
            ) from error
        content = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.windows = []
        for start, tensor in zip(starts, tensors, strict=True):
            flat = content[start : start + tensor.nbytes]
            self.windows.append(flat.view(tensor.dtype).view(tensor.shape))
        with torch.no_grad():
            torch._foreach_copy_(self.windows, list(tensors))

    def sleep(self, *, is_changed: bool) -> None:
        """Release the process's pages of the file. Their content stays in the file.

        Args:
            is_changed: not used; the system writes changed pages itself.
        """
        self._memory.madvise(mmap.MADV_DONTNEED)

    def wake(self) -> None:
        """Do nothing: pages return when they are accessed."""

    wait = wake


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Collect the non-empty storages of tensors, each once: several tensors may share a storage."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())


def require_host_memory(
    world: ProcessGroup, tensors: Iterable[torch.Tensor], description: str
) -> None:
    """Check that the host has memory for the tensors of all ranks on it.

    All ranks call it together before any of them allocates. Later, the free memory that a rank sees
    would depend on how much the others have allocated.

    Args:
        world: the ranks.
        tensors: tensors of this rank that are about to be copied to the host.
        description: what the tensors are, for an error.

    Raises:
        ConfigError: on all ranks of a host that lacks memory.
    """
    host = kernel_identity()
    num_bytes = sum(storage.nbytes() for storage in storages_of(tensors))
    facts = world.gather((host, num_bytes, available_bytes()))
    sizes = [size for other_host, size, _ in facts if other_host == host]
    free = min(free for other_host, _, free in facts if other_host == host)
    if sum(sizes) > free:
        raise ConfigError(
            "fsdp_config.param_offload and optimizer_offload",
            got=f"{sum(sizes) / GIB:.2f} GiB to offload to the host (the {description},"
            f" {len(sizes)} ranks), with {free / GIB:.2f} GiB free",
            expected="as much free memory on the host",
            fix="Leave them out, or use more ranks with fsdp_config.fsdp_size=-1.",
        )


def pinned_memory(num_bytes: int, description: str) -> torch.Tensor:
    """Allocate pinned host memory of exactly this size. `pin_memory` rounds up to powers of two.

    Args:
        num_bytes: size in bytes.
        description: what the memory is for, for an error.

    Returns:
        [num_bytes] uint8. Unpin it by `cudaHostUnregister` before it is freed.

    Raises:
        ConfigError: the driver refuses to pin this much memory.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    status = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if status:
        raise ConfigError(
            "fsdp_config.param_offload and optimizer_offload",
            got=f"error {status} of the CUDA driver for {num_bytes / GIB:.2f} GiB of pinned memory"
            f" (the {description})",
            expected="memory that can be pinned",
            fix="Allow it (`ulimit -l unlimited`, or --ulimit memlock=-1 of Docker), or leave them"
            " out.",
        )
    return memory


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """View the whole content of a storage as [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class PinnedCopy:
    """Pinned host memory for tensors on a CUDA device.

    The tensors stay the same objects: only the size of their storages changes.

    Args:
        tensors: tensors [...] on the device.
        stream: stream for copies.
        description: what the tensors are, for an error.

    Attributes:
        num_bytes: size of the host memory.

    Raises:
        ConfigError: the driver refuses to pin this much memory.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream, description: str
    ) -> None:
        self._stream = stream
        storages = storages_of(tensors)
        sizes = [storage.nbytes() for storage in storages]
        self.num_bytes = sum(sizes)
        padded_sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self._memory = pinned_memory(sum(padded_sizes), description)
        unpin = torch.cuda.cudart().cudaHostUnregister
        # Runs before the attributes of this object, including the memory, are freed.
        finalizer = weakref.finalize(self, unpin, self._memory.data_ptr())
        # At the interpreter's exit, CUDA may be gone already; the process's end unpins the memory.
        finalizer.atexit = False
        # Each storage with its copy on the host.
        self._pairs = []
        starts = accumulate(padded_sizes, initial=0)
        # Not strict: the last start is the end of the memory.
        for storage, size, start in zip(storages, sizes, starts, strict=False):
            self._pairs.append((storage, self._memory[start : start + size]))
        # By the storage's C++ object: its address stays the same when the memory is freed.
        self._copy_of = {storage._cdata: copy for storage, copy in self._pairs}
        self._arrived = torch.cuda.Event()

    def sleep(self, *, is_changed: bool) -> None:
        """Copy the tensors to the host, and free their memory on the device.

        Args:
            is_changed: whether the tensors changed since `wake`. If not, the host still has their
                content, and nothing is copied.
        """
        if is_changed:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for storage, copy in self._pairs:
                    copy.copy_(_view_bytes(storage), non_blocking=True)
        # Without a change, copies to the device may still be under way.
        self._stream.synchronize()
        for storage, _ in self._pairs:
            storage.resize_(0)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the host's content [...] of an offloaded tensor; None for any other tensor."""
        copy = self._copy_of.get(tensor.untyped_storage()._cdata)
        if copy is None:
            return None
        # View the copy in the same way as the tensor views its storage.
        content = copy.view(tensor.dtype)
        start = content.storage_offset() + tensor.storage_offset()
        return content.as_strided(tensor.shape, tensor.stride(), start)

    def wake(self) -> None:
        """Start to copy to the device. Call `wait` before the tensors are used."""
        for storage, copy in self._pairs:
            storage.resize_(copy.nbytes)
        # The allocator may hand out memory that earlier work of the current stream still reads.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for storage, copy in self._pairs:
                _view_bytes(storage).copy_(copy, non_blocking=True)
            self._arrived.record(self._stream)

    def wait(self) -> None:
        """Make the current stream wait for the copies to the device."""
        torch.cuda.current_stream().wait_event(self._arrived)


class ActivationsOnHost(torch.autograd.graph.saved_tensors_hooks):
    """Context manager: offload what a forward pass saves for its backward pass to host memory.

    Weights, which autograd saves too, stay where they are. The gathered memory of sharded weights
    is known only just before a module computes, so that is when each module's weights are recorded.

    Args:
        root: the module that computes. Tensors on a GPU go to pinned memory.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__(self._to_host, self._to_device)
        # Identities of storages. Views of a weight, such as its transpose, have the same storage.
        self._weights: set[int] = set()
        for module in root.modules():
            module.register_forward_pre_hook(partial(self._record, recurse=module is root))

    def _record(self, module: nn.Module, inputs: Any, *, recurse: bool) -> None:
        """Hook before a module's forward pass: record the storages of the module's weights.

        Called for the root, it also records the weights of all other modules, because some are used
        without a call of their module, such as the head's.
        """
        for parameter in module.parameters(recurse=recurse):
            self._weights.add(parameter.untyped_storage()._cdata)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
        """Hook of autograd: return a weight as it is, any other tensor as device and host copy."""
        if tensor.untyped_storage()._cdata in self._weights:
            return tensor
        # Copies in both directions use the computing stream, so none is read before it is complete.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, copy.copy_(tensor, non_blocking=True)

    def _to_device(self, saved: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        """Hook of autograd: return the tensor that `_to_host` was called with, or a copy of it."""
        if isinstance(saved, torch.Tensor):
            return saved
        device, copy = saved
        return copy.to(device, non_blocking=True)
