# SPDX-License-Identifier: Apache-2.0
"""Wire format: a DataProto as bytes for another process. `disk.py` has the format of files.

The format is pickle protocol 5 with out-of-band buffers (PEP 574). A tensor is pickled as its
dtype, its shape, and a `pickle.PickleBuffer` over its memory. A transport that takes buffers (Ray,
a `buffer_callback`) moves the memory as it is; for any other, the bytes are in the stream.
`torch.save` is never called.

Some properties of tensors are lost: they arrive on the CPU, without an autograd graph, and a tensor
that was a view of another arrives with memory of its own.
"""

import pickle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from quadriga.protocol.memory import bytes_of, copy_of, tensor_over

OUT_OF_BAND_PROTOCOL = 5
"""First version of the pickle protocol with out-of-band buffers."""


class PackedTensor:
    """Placeholder for a tensor in a pickle stream; it is unpickled as the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        """Pickle the tensor as dtype, shape and a buffer over its memory."""
        tensor = self.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        memory = bytes_of(tensor)
        if protocol >= OUT_OF_BAND_PROTOCOL:
            buffer: Any = pickle.PickleBuffer(memory)
        else:
            # Older protocols have no buffers: the bytes go into the stream.
            buffer = memory.tobytes()
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        return unpack_tensor, (dtype_name, tuple(tensor.shape), buffer)


def unpack_tensor(dtype_name: str, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    """Make a tensor over the bytes in a buffer.

    The bytes are copied only if the buffer is read-only, as Ray's shared memory is.

    Args:
        dtype_name: name of the dtype, such as "float32".
        shape: shape of the tensor.
        buffer: contiguous bytes.
    """
    memory = np.frombuffer(buffer, dtype=np.uint8)
    tensor = tensor_over(memory, getattr(torch, dtype_name), shape)
    return tensor if memory.flags.writeable else copy_of(tensor)


def pack(value: Any, memo: dict[int, Any]) -> Any:
    """Replace the tensors in plain dictionaries, lists and tuples by `PackedTensor`.

    A list is searched only if its first entry may hold a tensor, and a tuple only if one of its
    entries is a tensor. A tensor that is missed is pickled by torch, which is slower but just as
    exact.

    Args:
        value: the value to search.
        memo: pairs (result, value) by id of the value, so that an object which occurs several
            times, as in repeated rows, stays one object. Pass an empty dictionary for the first
            value, and the same dictionary again for values that may share objects.

    Returns:
        The value with placeholders. A dictionary, list or tuple that was searched is a new object.
    """
    if id(value) in memo:
        return memo[id(value)][0]
    kind = type(value)
    # Dictionaries and lists enter the memo before their entries are packed, because they may
    # contain themselves.
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        packed: Any = PackedTensor(value)
    elif kind is dict:
        packed = {}
        memo[id(value)] = (packed, value)
        packed.update((key, pack(entry, memo)) for key, entry in value.items())
    elif kind is list and value and type(value[0]) in (torch.Tensor, dict, list, tuple):
        packed = []
        memo[id(value)] = (packed, value)
        packed.extend(pack(entry, memo) for entry in value)
    elif kind is tuple and any(type(entry) is torch.Tensor for entry in value):
        packed = tuple(pack(entry, memo) for entry in value)
    else:
        return value
    # The memo also keeps `value` alive: an id is unique only among living objects.
    memo[id(value)] = (packed, value)
    return packed


def rebuild_proto(
    cls: type, rows: int, columns: Any, arrays: dict[str, np.ndarray], meta_info: dict[str, Any]
) -> Any:
    """Rebuild a DataProto from the parts that `DataProto.__reduce_ex__` made.

    Args:
        cls: `DataProto`.
        rows: number of rows of the tensor columns.
        columns: tensors by name, nested columns as dictionaries; None if there was no `batch`.
        arrays: columns of `non_tensor_batch`.
        meta_info: entries of `meta_info`.

    Returns:
        An instance of `cls` whose arrays are writable.
    """
    batch = None if columns is None else TensorDict(columns, batch_size=[rows])
    writable = {}
    for key, array in arrays.items():
        # An array over the memory of a transport may be read-only.
        writable[key] = array if array.flags.writeable else array.copy()
    return cls(batch=batch, non_tensor_batch=writable, meta_info=meta_info)
