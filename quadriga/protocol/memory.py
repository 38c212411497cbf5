# SPDX-License-Identifier: Apache-2.0
"""Memory of columns: bytes without a copy, large blocks in huge pages, lent memory, and slots.

A transport may hand out tensors over memory that the receiver must not keep, such as read-only
shared memory. Such tensors are *lent*. A concatenation always copies them, even where it would
otherwise return its input, and reports the copy (`copy_into`), so that the transport can release
the pages at once.

A copy of a rank's training state is in memory with two *slots*: one for even steps and one for odd
ones, so that the last complete copy remains while the next one is written.
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
"""Bytes of a slot before its content. They begin with two int64 numbers: the step, which is 0 while
the slot is written; and a checksum, the sum of the content as int64 words."""

_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
# For each lent tensor (never a view), the function to call after a copy, or None.
_lent: WeakIdKeyDictionary = WeakIdKeyDictionary()


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Call `madvise` for all whole pages in a range. A kernel may ignore the advice.

    Args:
        address: address of the first byte.
        num_bytes: length of the range.
        advice: value for `madvise`, such as MADV_HUGEPAGE.
    """
    # Round inwards: from the first page that begins in the range to the last one that ends in it.
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    end = (address + num_bytes) // PAGE_BYTES * PAGE_BYTES
    size = end - start
    if _madvise is not None and size > 0:
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice))


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate an uninitialised tensor on the CPU; a large one in huge pages.

    With huge pages, writing the memory for the first time causes far fewer page faults.
    """
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= HUGE_PAGES_FROM_BYTES:
        advise(tensor.data_ptr(), tensor.nbytes, MADV_HUGEPAGE)
    return tensor


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Bytes of a contiguous tensor on the CPU, without a copy."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    # In a dimension of size 1, a contiguous tensor may have any stride, which `view` would refuse.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    # Not `Tensor.numpy`, which would mark the storage as shared with numpy.
    return np.from_dlpack(flat.view(torch.uint8))


def images_key(inputs: Mapping[str, torch.Tensor]) -> str:
    """Hash of a prompt's images, from the names, layouts and values of their tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        tensor = inputs[name].detach().cpu().contiguous()
        layout = (name, tuple(tensor.shape), str(tensor.dtype))
        digest.update(repr(layout).encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def tensor_over(memory: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make a contiguous tensor over bytes, without a copy.

    Args:
        memory: contiguous uint8; at most `dtype.itemsize - 1` bytes of padding at the end.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
    """
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    # Leave out the padding after the last number.
    num_bytes = len(memory) // dtype.itemsize * dtype.itemsize
    flat = torch.from_numpy(memory[:num_bytes]).view(dtype)
    return flat.view(tuple(shape))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor on the CPU into new contiguous memory."""
    return allocate(tensor.shape, tensor.dtype).copy_(tensor)


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory `tensor` is a view of; `tensor` itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


def lend(tensor: torch.Tensor, when_copied: Callable[[], None] | None = None) -> torch.Tensor:
    """Mark a tensor and its views as lent.

    Args:
        tensor: the tensor.
        when_copied: called whenever `copy_into` has copied the tensor or a view of it. None:
            nothing is called.

    Returns:
        The tensor.
    """
    _lent[root_of(tensor)] = when_copied
    return tensor


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is lent, so that it must be copied before it is kept."""
    # Usually nothing is lent, and `bool(_lent)` is quicker than a look-up.
    return bool(_lent) and root_of(tensor) in _lent


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, and notify the lender of `source`, if there is one."""
    target.copy_(source)
    when_copied = _lent.get(root_of(source)) if _lent else None
    if when_copied is not None:
        when_copied()


def slot_of(memory: Any, step: int) -> Any:
    """The slot of a step.

    Args:
        memory: bytes of both slots, as an array, a tensor or a memoryview. The first half is the
            slot of even steps, the second half that of odd steps.
        step: the step.

    Returns:
        A view of one half of the memory.
    """
    half = len(memory) // 2
    start = step % 2 * half
    return memory[start:][:half]


def whole_steps(memory: np.ndarray) -> list[int]:
    """Steps whose slots were written completely, according to the headers: none, one or two.

    Args:
        memory: [bytes] uint8 of both slots.
    """
    slots = memory.reshape(2, -1).view(np.int64)  # [2, words]
    header_words = SLOT_HEADER_BYTES // slots.itemsize
    steps = []
    for slot in slots:
        # The step is 0 while the slot is written.
        step, expected_sum = slot[:2]
        if step and slot[header_words:].sum() == expected_sum:
            steps.append(int(step))
    return steps


# torch warns when the first tensor of a process is made over read-only memory. Here such tensors
# are copied or lent, so the warning does not apply: trigger it now, and drop it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))
