# SPDX-License-Identifier: Apache-2.0
"""Small messages as bytes, the one kind of value that Ray passes on as it is.

Ray pickles anything else with a pickler in Python, on both ends and each argument by itself; for the small messages of
a call that is most of what the controller costs. Plain pickle takes its place where every object in the message comes
from a module that each process has: Quadriga's, torch's, numpy's, Python's. What does not makes Ray carry the whole
message: a function or class of the user's script, which must travel by value; a reference to one of Ray's objects, of
which Ray keeps count.
"""

import io
import pickle
import sys
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

# Larger memory must not be copied into the message: Ray takes it out of band.
INLINE_BYTES = 64 * 1024

_EVERYWHERE = (sys.stdlib_module_names | {"quadriga", "torch", "numpy", "tensordict"}) - {"__main__"}


class _NotPlainError(Exception):
    """The message is Ray's to carry."""


def _array_over(memory: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(memory), dtype=np.uint8)


class _Allowance:
    """How much memory may still go into a message."""

    def __init__(self) -> None:
        self._left_bytes = INLINE_BYTES

    def count(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise _NotPlainError

    def inline(self, buffer: pickle.PickleBuffer) -> bool:
        self.count(buffer.raw().nbytes)
        return True


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        # Not with a callback of its own: the cycle would keep what it pickled until the next garbage collection.
        self._allowance = _Allowance()
        super().__init__(file, protocol=5, buffer_callback=self._allowance.inline)

    def reducer_override(self, obj: Any) -> Any:
        """Called for whatever is no built-in value: passes what every process can import."""
        if type(obj) is np.ndarray and obj.dtype == np.uint8 and obj.ndim == 1:
            # How columns lie in a message; numpy's own way takes three times as long.
            self._allowance.count(obj.nbytes)
            return _array_over, (obj.tobytes(),)
        named = obj if isinstance(obj, (type, FunctionType, BuiltinFunctionType)) else type(obj)
        if (named.__module__ or "builtins").partition(".")[0] not in _EVERYWHERE:
            raise _NotPlainError
        return NotImplemented


def seal(value: Any) -> Any:
    """The bytes of a value; the value itself if Ray has to carry it."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except (_NotPlainError, pickle.PicklingError, AttributeError, TypeError):
        # The last three are pickle's ways to say that something has no name by which it could be found again.
        return value
    return file.getvalue()


def unseal(sealed: Any) -> Any:
    """What `seal` was given: bytes are always sealed."""
    return pickle.loads(sealed) if type(sealed) is bytes else sealed
