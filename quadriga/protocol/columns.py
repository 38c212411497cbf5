# SPDX-License-Identifier: Apache-2.0
"""Other forms of a DataProto: one TensorDict that holds everything, and text.

The functions that take or give a DataProto are methods of it; `proto.py` gives them their names.
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
"""Entry of a TensorDict with dtype and row shape of arrays, which it can only keep as objects, row by row."""


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A 1-D object array with one entry per value, where numpy would make a second dimension of equal lists."""
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def from_tensordict(
    cls: "type[DataProto]", tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None
) -> "DataProto":
    """Build from a TensorDict: its stacks of objects become columns, its single objects `meta_info`."""
    tensors: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for key in tensor_dict.keys():  # a TensorDict iterates over rows
        value = tensor_dict.get(key)
        if isinstance(value, NonTensorStack):
            arrays[key] = object_array(value.tolist())
        elif isinstance(value, NonTensorData):
            facts[key] = value.data
        else:
            tensors[key] = value
    for key, (dtype, shape) in facts.pop(ARRAY_TYPES, {}).items():
        if key in arrays:
            rows = arrays[key]
            arrays[key] = np.empty((len(rows), *shape), dtype=np.dtype(dtype))
            for row, value in enumerate(rows):
                arrays[key][row] = value
    # Without any column, the TensorDict's batch size still counts the rows.
    has_rows = tensors or not arrays
    batch = (
        TensorDict(tensors, batch_size=tensor_dict.batch_size, device=tensor_dict.device)
        if has_rows
        else None
    )
    return cls(batch=batch, non_tensor_batch=arrays, meta_info={**facts, **(meta_info or {})})


def to_tensordict(data: "DataProto") -> TensorDict:
    """One TensorDict with everything: arrays as stacks of objects, `meta_info` as single objects."""
    rows, arrays, facts = len(data), data.non_tensor_batch, data.meta_info
    joined = TensorDict({}, batch_size=[rows]) if data.batch is None else data.batch.copy()
    tensors = set(joined.keys())
    for key in [*arrays, *facts]:
        if key in tensors or (key in arrays and key in facts):
            where = f"to_tensordict: {key!r}"
            raise ProtocolError(
                where, got="two entries of this name", expected="one", fix="Rename one."
            )
    for key, array in arrays.items():
        entries = [NonTensorData(value, batch_size=[]) for value in array]
        joined.set(key, NonTensorStack(*entries) if entries else NonTensorStack(batch_size=[0]))
    types = {
        key: (a.dtype.str, a.shape[1:])
        for key, a in arrays.items()
        if a.dtype != object or a.ndim > 1
    }
    for key, value in (facts | ({ARRAY_TYPES: types} if types else {})).items():
        joined.set(key, NonTensorData(value, batch_size=[rows]))
    return joined


def get_data_info(data: "DataProto") -> str:
    """The layout as text: every column with shape, dtype and device, every fact with its type."""

    def tensor_lines(tensors: TensorDict, indent: str) -> list[str]:
        lines = []
        for key, value in tensors.items():
            if isinstance(value, TensorDict):
                lines += [f"{indent}{key}", *tensor_lines(value, indent + "  ")]
            else:
                lines.append(f"{indent}{key}: {tuple(value.shape)} ({value.dtype}) {value.device}")
        return lines

    arrays = [
        f"  {key}: ndarray{array.shape} ({array.dtype})"
        for key, array in data.non_tensor_batch.items()
    ]
    facts = [f"  {key}: {type(value).__name__}" for key, value in data.meta_info.items()]
    tensors = [] if data.batch is None else tensor_lines(data.batch, "  ")
    return "\n".join(["batch", *tensors, "non_tensor_batch", *arrays, "meta_info", *facts])


def print_size(data: "DataProto", prefix: str = "") -> None:
    """Print how much memory tensors and arrays take; of objects in arrays, what the outer two levels show."""

    def object_bytes(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.nbytes
        entries = value.values() if isinstance(value, Mapping) else ()
        return sys.getsizeof(value) + sum(object_bytes(entry) for entry in entries)

    in_tensors = (
        0 if data.batch is None else sum(column.nbytes for column in data.batch.values(True, True))
    )
    in_arrays = 0
    for array in data.non_tensor_batch.values():
        # Rows that share one object, as repeated rows do, are counted once.
        objects = {id(value): value for value in array.flat} if array.dtype == object else {}
        in_arrays += array.nbytes + sum(map(object_bytes, objects.values()))
    start = f"{prefix}: " if prefix else ""
    print(f"{start}tensors {in_tensors / 2**20:.4g} MiB, arrays {in_arrays / 2**20:.4g} MiB")


def one_line(data: "DataProto") -> str:
    """Rows, and each column with shape and dtype: what `repr` gives."""
    parts = [f"{len(data)} rows"]
    for key, value in () if data.batch is None else data.batch.items():
        kind = (
            "" if isinstance(value, TensorDict) else f" {str(value.dtype).removeprefix('torch.')}"
        )
        parts.append(f"{key} {tuple(value.shape)}{kind}")
    parts += [f"{key} {array.shape} {array.dtype}" for key, array in data.non_tensor_batch.items()]
    facts = f"; meta_info: {', '.join(data.meta_info)}" if data.meta_info else ""
    return f"DataProto({', '.join(parts)}{facts})"
