# SPDX-License-Identifier: Apache-2.0
"""What a DataProto looks like: its layout in full, in one line, and its size in memory."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict


def _tensor_lines(batch: TensorDict, indent: str) -> list[str]:
    lines = []
    for key, value in batch.items():
        if isinstance(value, TensorDict):
            lines += [f"{indent}{key}", *_tensor_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {tuple(value.shape)} ({value.dtype}) {value.device}")
    return lines


def describe(batch: TensorDict | None, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> str:
    """One line for every column and fact, under the name of the store it is in."""
    lines = ["batch", *([] if batch is None else _tensor_lines(batch, "  "))]
    lines += ["non_tensor_batch", *(f"  {key}: ndarray{array.shape} ({array.dtype})" for key, array in arrays.items())]
    lines += ["meta_info", *(f"  {key}: {type(value).__name__}" for key, value in facts.items())]
    return "\n".join(lines)


def summary(batch: TensorDict | None, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], rows: int) -> str:
    """One line: rows, columns with shapes, names of the facts."""
    parts = [f"{rows} rows"]
    for key, value in [] if batch is None else batch.items():
        kind = "" if isinstance(value, TensorDict) else f" {str(value.dtype).removeprefix('torch.')}"
        parts.append(f"{key} {tuple(value.shape)}{kind}")
    parts += [f"{key} {array.shape} {array.dtype}" for key, array in arrays.items()]
    return ", ".join(parts) + (f"; meta_info: {', '.join(facts)}" if facts else "")


def _object_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sys.getsizeof(value) + sum(_object_bytes(entry) for entry in value.values())
    return sys.getsizeof(value)


def _array_bytes(array: np.ndarray) -> int:
    # Rows that share one object, as repeated rows do, are counted once.
    objects = {id(value): value for value in array.flat} if array.dtype == object else {}
    return array.nbytes + sum(_object_bytes(value) for value in objects.values())


def _tensor_bytes(batch: TensorDict) -> int:
    return sum(_tensor_bytes(value) if isinstance(value, TensorDict) else value.nbytes for value in batch.values())


def _readable(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def describe_size(batch: TensorDict | None, arrays: Mapping[str, np.ndarray], prefix: str = "") -> str:
    """Memory of tensors and of arrays; of objects in arrays, what the outer two levels show."""
    tensors = 0 if batch is None else _tensor_bytes(batch)
    objects = sum(_array_bytes(array) for array in arrays.values())
    start = f"{prefix}: " if prefix else ""
    return f"{start}tensors {_readable(tensors)}, arrays {_readable(objects)}"
