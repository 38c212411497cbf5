# SPDX-License-Identifier: Apache-2.0
"""Memory of columns: bytes without a copy, large blocks in huge pages, and lent memory.

A transport may hand out tensors over memory that the receiver must not keep, such as read-only
shared memory. Such tensors are *lent*. A concatenation copies them, even where it would otherwise
pass on the memory of its input, and reports the copy (`copy_into`), so that the transport can
release the pages at once.
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
"""Bytes before the content of a slot: its step (0 while it is written) and the sum of the content,
each as int64."""

_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
# Lent tensors (never views) with the function to call after a copy.
_lent: WeakIdKeyDictionary = WeakIdKeyDictionary()


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Call `madvise` for the whole pages of a range; a kernel may ignore the advice."""
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    end = (address + num_bytes) // PAGE_BYTES * PAGE_BYTES
    size = end - start
    if _madvise is not None and size > 0:
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice))


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate an uninitialised tensor on the CPU; a large one in huge pages.

    Huge pages take far fewer page faults when the memory is first written.
    """
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= HUGE_PAGES_FROM_BYTES:
        advise(tensor.data_ptr(), tensor.nbytes, MADV_HUGEPAGE)
    return tensor


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Bytes of a contiguous tensor on the CPU, without a copy."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    # A contiguous tensor may have any stride in a dimension of size 1, which `view` would refuse.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    # Not `Tensor.numpy`, which would mark the storage as shared with numpy.
    return np.from_dlpack(flat.view(torch.uint8))


def images_key(inputs: Mapping[str, torch.Tensor]) -> str:
    """Hash of a prompt's images: their names, shapes, dtypes and numbers."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        tensor = inputs[name].detach().cpu().contiguous()
        layout = (name, tuple(tensor.shape), str(tensor.dtype))
        digest.update(repr(layout).encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def tensor_over(memory: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make a contiguous tensor over bytes (uint8, contiguous), without a copy."""
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    # The memory may have padding behind the last number.
    num_bytes = len(memory) // dtype.itemsize * dtype.itemsize
    flat = torch.from_numpy(memory[:num_bytes]).view(dtype)
    return flat.view(tuple(shape))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor on the CPU into new contiguous memory."""
    return allocate(tensor.shape, tensor.dtype).copy_(tensor)


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor that `tensor` is a view of; itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


def lend(tensor: torch.Tensor, when_copied: Callable[[], None] | None = None) -> torch.Tensor:
    """Mark a tensor and its views as lent.

    `when_copied` is called whenever `copy_into` has copied one of them.
    """
    _lent[root_of(tensor)] = when_copied
    return tensor


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether the memory must be copied before it is kept or written to."""
    return bool(_lent) and root_of(tensor) in _lent


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, and notify the lender of `source`, if there is one."""
    target.copy_(source)
    when_copied = _lent.get(root_of(source)) if _lent else None
    if when_copied is not None:
        when_copied()


def slot_of(memory: Any, step: int) -> Any:
    """Slot of a step: the memory (an array of bytes) has two, for even and odd steps."""
    half = len(memory) // 2
    start = step % 2 * half
    return memory[start:][:half]


def whole_steps(memory: np.ndarray) -> list[int]:
    """Steps whose slots were written completely, judged by the sums in their headers."""
    slots = memory.reshape(2, -1).view(np.int64)
    header_size = SLOT_HEADER_BYTES // slots.itemsize
    steps = []
    for slot in slots:
        step = slot[0]  # 0 while the slot is written
        expected_sum = slot[1]
        if step and slot[header_size:].sum() == expected_sum:
            steps.append(int(step))
    return steps


# torch warns once per process when a tensor is made over read-only memory. Here that is the usual
# case, since such tensors are copied or lent: use up the warning.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))
