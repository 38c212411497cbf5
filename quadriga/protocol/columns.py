# SPDX-License-Identifier: Apache-2.0
"""Conversions of a DataProto to and from a single TensorDict, and to text.

`proto.py` binds the functions that take or return a DataProto as methods.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.errors import ProtocolError

if TYPE_CHECKING:
    from quadriga.protocol.proto import DataProto

ARRAY_TYPES = "_array_types"
"""Entry of a TensorDict with the dtype and row shape of each array column.

The rows of these columns are objects in the TensorDict, which does not keep dtype and shape.
"""


def object_array(values: Iterable[Any]) -> np.ndarray:
    """Make a 1-D object array with one entry per value.

    `np.array` would turn lists of equal length into a 2-D array.
    """
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def from_tensordict(
    cls: "type[DataProto]", tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None
) -> "DataProto":
    """Build a DataProto from a TensorDict.

    Args:
        tensor_dict: tensors become columns of `batch`, stacks of objects columns of
            `non_tensor_batch`, and single objects entries of `meta_info`.
        meta_info: further entries, which replace those of the same name.
    """
    tensors = {}
    arrays = {}
    facts = {}
    for key in tensor_dict.keys():  # a TensorDict iterates over rows
        value = tensor_dict.get(key)
        if isinstance(value, NonTensorStack):
            arrays[key] = object_array(value.tolist())
        elif isinstance(value, NonTensorData):
            facts[key] = value.data
        else:
            tensors[key] = value

    # `to_tensordict` stored the dtype and row shape of arrays whose rows it converted to objects.
    for key, (dtype, shape) in facts.pop(ARRAY_TYPES, {}).items():
        if key not in arrays:
            continue  # the column was removed from the TensorDict
        rows = arrays[key]
        array = np.empty((len(rows), *shape), dtype=np.dtype(dtype))
        for row, value in enumerate(rows):
            array[row] = value
        arrays[key] = array

    batch = None
    # A TensorDict without columns still has a number of rows.
    if tensors or not arrays:
        batch = TensorDict(tensors, batch_size=tensor_dict.batch_size, device=tensor_dict.device)
    return cls(batch=batch, non_tensor_batch=arrays, meta_info={**facts, **(meta_info or {})})


def to_tensordict(data: "DataProto") -> TensorDict:
    """Convert to a single TensorDict, which `from_tensordict` converts back.

    Arrays become stacks of objects, and entries of `meta_info` single objects.

    Raises:
        ProtocolError: two entries would have the same name.
    """
    num_rows = len(data)
    arrays = data.non_tensor_batch
    facts = data.meta_info
    joined = TensorDict({}, batch_size=[num_rows])
    if data.batch is not None:
        joined = data.batch.copy()

    # The entries of a TensorDict share one namespace.
    tensor_keys = set(joined.keys())
    for key in [*arrays, *facts]:
        if key in tensor_keys or (key in arrays and key in facts):
            where = f"to_tensordict: {key!r}"
            raise ProtocolError(
                where, got="two entries of this name", expected="one", fix="Rename one."
            )

    array_types = {}
    for key, array in arrays.items():
        entries = [NonTensorData(value, batch_size=[]) for value in array]
        if entries:
            joined.set(key, NonTensorStack(*entries))
        else:
            # An empty stack needs its batch size.
            joined.set(key, NonTensorStack(batch_size=[0]))
        # `from_tensordict` makes a 1-D array of objects, and needs dtype and row shape of any
        # other.
        if array.dtype != object or array.ndim > 1:
            array_types[key] = (array.dtype.str, array.shape[1:])

    if array_types:
        facts = facts | {ARRAY_TYPES: array_types}
    for key, value in facts.items():
        joined.set(key, NonTensorData(value, batch_size=[num_rows]))
    return joined


def get_data_info(data: "DataProto") -> str:
    """Describe the layout: shape, dtype, device of each column, type of each `meta_info` entry."""

    def tensor_lines(tensors: TensorDict, indent: str) -> list[str]:
        """A line for each column; those of nested columns are indented."""
        lines = []
        for key, value in tensors.items():
            if isinstance(value, TensorDict):
                lines.append(f"{indent}{key}")
                lines += tensor_lines(value, indent + "  ")
            else:
                lines.append(f"{indent}{key}: {tuple(value.shape)} ({value.dtype}) {value.device}")
        return lines

    lines = ["batch"]
    if data.batch is not None:
        lines += tensor_lines(data.batch, "  ")
    lines.append("non_tensor_batch")
    for key, array in data.non_tensor_batch.items():
        lines.append(f"  {key}: ndarray{array.shape} ({array.dtype})")
    lines.append("meta_info")
    for key, value in data.meta_info.items():
        lines.append(f"  {key}: {type(value).__name__}")
    return "\n".join(lines)


def print_size(data: "DataProto", prefix: str = "") -> None:
    """Print the memory of tensors and arrays, in MiB.

    For an object in an array, the object itself is counted, and for a dictionary also its values.
    The entries of lists and other containers are not counted.

    Args:
        data: the DataProto.
        prefix: beginning of the line.
    """

    def object_bytes(value: Any) -> int:
        """Size of an object in bytes; a dictionary is counted with its values."""
        if isinstance(value, torch.Tensor):
            return value.nbytes
        entries = value.values() if isinstance(value, Mapping) else ()
        return sys.getsizeof(value) + sum(object_bytes(entry) for entry in entries)

    tensor_bytes = 0
    if data.batch is not None:
        columns = data.batch.values(include_nested=True, leaves_only=True)
        tensor_bytes = sum(column.nbytes for column in columns)
    array_bytes = 0
    for array in data.non_tensor_batch.values():
        array_bytes += array.nbytes
        if array.dtype == object:
            # An object that several rows share, as repeated rows do, is counted once.
            objects = {id(value): value for value in array.flat}
            array_bytes += sum(map(object_bytes, objects.values()))
    start = f"{prefix}: " if prefix else ""
    print(f"{start}tensors {tensor_bytes / 2**20:.4g} MiB, arrays {array_bytes / 2**20:.4g} MiB")


def one_line(data: "DataProto") -> str:
    """Text for `repr`: the number of rows, and shape and dtype of each column."""
    parts = [f"{len(data)} rows"]
    if data.batch is not None:
        for key, value in data.batch.items():
            part = f"{key} {tuple(value.shape)}"
            if not isinstance(value, TensorDict):
                part += f" {str(value.dtype).removeprefix('torch.')}"
            parts.append(part)
    for key, array in data.non_tensor_batch.items():
        parts.append(f"{key} {array.shape} {array.dtype}")
    text = ", ".join(parts)
    if data.meta_info:
        text += f"; meta_info: {', '.join(data.meta_info)}"
    return f"DataProto({text})"
