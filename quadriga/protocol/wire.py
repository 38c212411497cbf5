# SPDX-License-Identifier: Apache-2.0
"""Wire format: how a DataProto becomes bytes for another process of the run; `disk.py` has the form of files.

Pickle protocol 5 with out-of-band buffers (PEP 574). A tensor is described by its dtype and shape and
hands its memory over as a `pickle.PickleBuffer`: a transport that takes buffers (Ray, a
`buffer_callback`) moves the memory as it lies, any other finds the bytes in the stream. `torch.save`
is never called.

What does not travel: devices (tensors arrive on the CPU), autograd graphs, views (a tensor that
shares memory with another arrives with its own).
"""

import pickle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from quadriga.protocol.memory import bytes_of, copy_of, tensor_over

OUT_OF_BAND_PROTOCOL = 5


class PackedTensor:
    """Stands for a tensor in a pickle stream; what is unpickled is the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        tensor = self.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        memory = bytes_of(tensor)
        # Older protocols know no buffers: the bytes go into the stream.
        buffer = (
            pickle.PickleBuffer(memory) if protocol >= OUT_OF_BAND_PROTOCOL else memory.tobytes()
        )
        return unpack_tensor, (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            buffer,
        )


def unpack_tensor(dtype_name: str, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    """The tensor whose bytes lie in `buffer`: without a copy, unless that is read-only, as Ray's shared memory is."""
    memory = np.frombuffer(buffer, dtype=np.uint8)
    tensor = tensor_over(memory, getattr(torch, dtype_name), shape)
    return tensor if memory.flags.writeable else copy_of(tensor)


def pack(value: Any, memo: dict[int, Any]) -> Any:
    """`value` with the tensors inside plain dictionaries, lists and tuples replaced by PackedTensor.

    A list is searched only if its first entry may hold a tensor; a tensor that is overlooked is pickled by torch,
    slower and just as exact. Objects that occur more than once (repeated rows) stay one object."""
    if id(value) in memo:
        return memo[id(value)][0]
    kind = type(value)
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
    # The memo keeps `value` alive as well: an id is only unique among living objects.
    memo[id(value)] = (packed, value)
    return packed


def rebuild_proto(
    cls: type, rows: int, columns: Any, arrays: dict[str, np.ndarray], meta_info: dict[str, Any]
) -> Any:
    """Inverse of `DataProto.__reduce_ex__`, called by unpickling; nested columns are dictionaries of columns."""
    batch = None if columns is None else TensorDict(columns, batch_size=[rows])
    writable = {
        key: value if value.flags.writeable else value.copy() for key, value in arrays.items()
    }
    return cls(batch=batch, non_tensor_batch=writable, meta_info=meta_info)
