# SPDX-License-Identifier: Apache-2.0
"""Memory of columns: bytes without a copy, large blocks in huge pages, and memory that is only lent.

A transport may hand out tensors over memory that is not theirs to keep, such as read-only shared memory. They are
*lent*: a concatenation copies them, also where it would pass on memory of its own, and reports it (`copy_into`),
which lets the transport take the pages back at once.
"""

import ctypes
import hashlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

HUGE_PAGES_FROM_BYTES = 4 << 20
PAGE_BYTES = 4096
MADV_HUGEPAGE = 14
SLOT_HEADER_BYTES = 64
"""Before the content of a slot: its step (0 while it is written) and the sum of the content, in int64 each."""

_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
_lent: WeakIdKeyDictionary = WeakIdKeyDictionary()


def advise(address: int, num_bytes: int, advice: int) -> None:
    """`madvise` for the whole pages inside a range; a kernel that knows nothing of the advice does not follow it."""
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    size = (address + num_bytes) // PAGE_BYTES * PAGE_BYTES - start
    if _madvise is not None and size > 0:
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice))


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the CPU; a large one in huge pages, of which a fraction as many faults are taken."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= HUGE_PAGES_FROM_BYTES:
        advise(tensor.data_ptr(), tensor.nbytes, MADV_HUGEPAGE)
    return tensor


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor on the CPU; `Tensor.numpy` would mark its storage as written by others."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    # A contiguous tensor may have any stride in a dimension of one entry, which `view` would not take.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return np.from_dlpack(flat.view(torch.uint8))


def images_key(inputs: Mapping[str, torch.Tensor]) -> str:
    """A hash of a prompt's images (names, shapes, dtypes, numbers): equal for equal images, and for nothing else."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        tensor = inputs[name].detach().cpu().contiguous()
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def tensor_over(memory: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor over bytes (uint8, contiguous), without a copy."""
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    return (
        torch.from_numpy(memory[: len(memory) // dtype.itemsize * dtype.itemsize])
        .view(dtype)
        .view(tuple(shape))
    )


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor on the CPU."""
    return allocate(tensor.shape, tensor.dtype).copy_(tensor)


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which `tensor` is a view; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def lend(tensor: torch.Tensor, when_copied: Callable[[], None] | None = None) -> torch.Tensor:
    """Mark `tensor`, and the views of it, as lent; `when_copied` is called each time one of them was copied."""
    _lent[root_of(tensor)] = when_copied
    return tensor


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether the memory is another's, so that it must be copied before it is kept or written to."""
    return bool(_lent) and root_of(tensor) in _lent


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, and tell the lender of `source`, if there is one."""
    target.copy_(source)
    when_copied = _lent.get(root_of(source)) if _lent else None
    if when_copied is not None:
        when_copied()


def slot_of(memory: Any, step: int) -> Any:
    """The slot of a step, of memory that has two (an array of bytes)."""
    half = len(memory) // 2
    return memory[step % 2 * half :][:half]


def whole_steps(memory: np.ndarray) -> list[int]:
    """The steps of which such memory is whole, by their sums."""
    slots = memory.reshape(2, -1).view(np.int64)
    first = SLOT_HEADER_BYTES // slots.itemsize
    return [int(slot[0]) for slot in slots if slot[0] and slot[first:].sum() == slot[1]]


# torch warns, once in a process, when a tensor is made over memory that may not be written to. Here it is the rule:
# such tensors are copied or lent.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))
