# SPDX-License-Identifier: Apache-2.0
"""Object arrays as one stream of bytes and large buffers beside it.

All arrays of a DataProto are pickled together, so objects that rows or columns share stay shared. What
is large inside them does not go into the stream: the memory of a tensor or of a numpy array becomes a
buffer of its own, which a transport can keep in its store and refer to.
"""

import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle

from quadriga.protocol.memory import bytes_of
from quadriga.protocol.wire import unpack_tensor

# A buffer of its own costs an entry in every table on the way; below this size the bytes go with the stream.
BUFFER_FROM_BYTES = 4096


class NeedsRayError(Exception):
    """The objects hold references to Ray's objects, which only Ray's own serialization keeps count of."""


@dataclass(frozen=True)
class PickledArrays:
    """Arrays as bytes.

    Attributes:
        stream: what pickle wrote.
        buffers: in the order in which the stream asks for them: bytes of arrays, or contiguous tensors.
    """

    stream: bytes
    buffers: tuple[np.ndarray | torch.Tensor, ...]

    def nbytes(self) -> int:
        """Stream and bytes of arrays; tensors are counted by whoever keeps them."""
        return len(self.stream) + sum(part.nbytes for part in self.buffers if isinstance(part, np.ndarray))

    def digest(self) -> bytes:
        """Fingerprint of the stream and of the bytes of arrays."""
        digest = hashlib.sha256(self.stream, usedforsecurity=False)
        for part in self.buffers:
            if isinstance(part, np.ndarray):
                digest.update(part)
        return digest.digest()


class _Buffers:
    """The large buffers of a stream, in the order in which pickle gives them out."""

    def __init__(self) -> None:
        self.taken: list[np.ndarray | torch.Tensor] = []
        self._tensor_of: dict[int, tuple[pickle.PickleBuffer, torch.Tensor]] = {}

    def of_tensor(self, tensor: torch.Tensor, memory: np.ndarray) -> pickle.PickleBuffer:
        """A buffer that will be taken as the tensor itself."""
        buffer = pickle.PickleBuffer(memory)
        self._tensor_of[id(buffer)] = (buffer, tensor)
        return buffer

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a large buffer out of the stream; True sends it into the stream."""
        if id(buffer) in self._tensor_of:
            self.taken.append(self._tensor_of[id(buffer)][1])
            return False
        memory = buffer.raw()
        if memory.nbytes < BUFFER_FROM_BYTES:
            return True
        self.taken.append(np.frombuffer(memory, dtype=np.uint8))
        return False


class _Pickler(cloudpickle.Pickler):
    # The buffers know nothing of the pickler: a cycle would keep the objects until the next garbage collection.
    def __init__(self, file: io.BytesIO, buffers: _Buffers) -> None:
        self._buffers = buffers
        super().__init__(file, protocol=5, buffer_callback=buffers.take)

    def reducer_override(self, obj: Any) -> Any:
        """How an object is pickled that is no built-in."""
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            return self._reduce_tensor(obj)
        if isinstance(obj, (ray.ObjectRef, ray.actor.ActorHandle)):
            raise NeedsRayError(type(obj).__name__)
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        plain = tensor.detach() if tensor.requires_grad else tensor
        plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
        facts = str(plain.dtype).removeprefix("torch."), tuple(plain.shape)
        memory = bytes_of(plain)
        if memory.nbytes < BUFFER_FROM_BYTES:
            return unpack_tensor, (*facts, memory.tobytes())
        return unpack_tensor, (*facts, self._buffers.of_tensor(plain, memory))


def pickle_arrays(arrays: Mapping[str, np.ndarray]) -> PickledArrays:
    """The arrays as bytes.

    Raises:
        NeedsRayError: see there; the arrays have to travel by Ray's own serialization.
    """
    file, buffers = io.BytesIO(), _Buffers()
    pickler = _Pickler(file, buffers)
    pickler.dump(dict(arrays))
    pickler.clear_memo()
    return PickledArrays(file.getvalue(), tuple(buffers.taken))


def unpickle_arrays(stream: Any, buffers: Sequence[Any]) -> dict[str, np.ndarray]:
    """Inverse of `pickle_arrays`; arrays and tensors inside lie over `buffers`, which must be writable."""
    arrays = pickle.loads(stream, buffers=buffers)
    return {key: array if array.flags.writeable else array.copy() for key, array in arrays.items()}
