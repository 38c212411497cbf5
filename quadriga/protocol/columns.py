# SPDX-License-Identifier: Apache-2.0
"""The columns of a DataProto: checks, row numbers, what they look like, and how one TensorDict holds them all.

Nothing here knows DataProto. Functions take a TensorDict with one batch dimension, a dictionary of numpy arrays, or
indices, and work at the speed of memory: slices are views, gathers allocate a column once.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.errors import ProtocolError

RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor

ARRAY_TYPES = "_array_types"
"""Entry of a TensorDict with dtype and row shape of arrays, which it can only keep as objects, row by row."""


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A one-dimensional object array with one entry per value, whatever the values are.

    `np.array(values, dtype=object)` would turn lists of equal length into a second dimension.
    """
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


# ---- checks -------------------------------------------------------------------------------------


def check_batch(batch: TensorDict) -> None:
    """Raise unless `batch` has one batch dimension and dense tensors in every column, nested ones included."""
    if len(batch.batch_size) != 1:
        raise ProtocolError(
            f"DataProto.batch: got a TensorDict of batch size {tuple(batch.batch_size)}, expected exactly one batch "
            "dimension",
            fix="Build it with batch_size=[number of rows], or fold the others with fold_batch_dim.",
        )
    nested = [batch]
    while nested:
        for key, value in nested.pop().items():
            if isinstance(value, TensorDict):
                nested.append(value)
            elif not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                got = f"a {value.layout} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ProtocolError(
                    f"DataProto.batch[{key!r}]: got {got}, expected a dense tensor",
                    fix="Put objects into non_tensor_batch (from_tensordict does it), pad nested tensors.",
                )


def check_arrays(arrays: Mapping[str, Any], rows: int | None) -> None:
    """Raise unless every entry is a numpy array whose first dimension is `rows` (None: that of the first)."""
    source = "the batch size" if rows is not None else f"the length of {next(iter(arrays), None)!r}"
    for key, value in arrays.items():
        where = f"DataProto.non_tensor_batch[{key!r}]"
        if not isinstance(value, np.ndarray):
            fix = "from_dict(non_tensors=...) turns lists into object arrays."
            raise ProtocolError(f"{where}: got {type(value).__name__}, expected a numpy array", fix=fix)
        if value.ndim == 0:
            raise ProtocolError(f"{where}: got an array of shape (), expected one entry per row")
        rows = value.shape[0] if rows is None else rows
        if value.shape[0] != rows:
            raise ProtocolError(f"{where}: got shape {value.shape}, expected {rows} rows, {source}")


def check_leading_dims(tensors: Mapping[str, torch.Tensor], num_batch_dims: int) -> None:
    """Raise unless all tensors agree in their first `num_batch_dims` dimensions."""
    first_key, first = next(iter(tensors.items()))
    for key, value in tensors.items():
        found = f"DataProto column {key!r}: got shape {tuple(value.shape)}, expected"
        if value.dim() < num_batch_dims:
            raise ProtocolError(f"{found} at least {num_batch_dims} dimension(s), the batch first")
        if value.shape[:num_batch_dims] != first.shape[:num_batch_dims]:
            wanted = f"batch size {tuple(first.shape[:num_batch_dims])}, that of {first_key!r}"
            raise ProtocolError(f"{found} {wanted}", fix="Every column needs one entry per row.")


def check_names(where: str, names: Iterable[str], present: Iterable[str]) -> None:
    """Raise unless every name is present."""
    present = set(present)
    for name in names:
        if name not in present:
            raise ProtocolError(f"{where}: got no entry {name!r}, expected one of {sorted(present)}")


# ---- rows ---------------------------------------------------------------------------------------


def map_columns(batch: TensorDict, function: Callable[[torch.Tensor], torch.Tensor], rows: int) -> TensorDict:
    """A TensorDict of `rows` rows with `function` applied to every column, nested ones included."""
    columns = {
        key: map_columns(value, function, rows) if isinstance(value, TensorDict) else function(value)
        for key, value in batch.items()
    }
    return TensorDict(columns, batch_size=[rows], device=batch.device)


def row_numbers(index: RowIndex, rows: int) -> torch.Tensor:
    """Integers or a boolean mask as an int64 tensor of row numbers in [0, rows), on the CPU."""
    if not isinstance(index, torch.Tensor):
        array = np.asarray(index)
        index = torch.from_numpy(array.astype(np.int64) if array.size == 0 else array)
    index = index.detach().cpu()
    if index.dim() != 1 or index.is_floating_point() or index.is_complex():
        raise ProtocolError(
            f"row index: got shape {tuple(index.shape)}, {index.dtype}, expected one dimension of integers, or a "
            "boolean mask"
        )
    if index.dtype == torch.bool:
        if index.shape[0] != rows:
            raise ProtocolError(f"row mask: got {index.shape[0]} entries, expected {rows}, one per row")
        return index.nonzero().flatten()
    index = index.to(torch.int64)
    if index.numel() and (int(index.min()) < -rows or int(index.max()) >= rows):
        found = f"values from {int(index.min())} to {int(index.max())}"
        raise ProtocolError(f"row index: got {found}, expected rows of {rows}")
    return torch.where(index < 0, index + rows, index)


def chunk_bounds(rows: int, chunks: int) -> list[tuple[int, int]]:
    """(start, end) of `chunks` parts whose sizes differ by at most one, the larger ones first."""
    if chunks < 1:
        raise ProtocolError(f"chunk: got {chunks} chunks, expected at least 1")
    size, larger = divmod(rows, chunks)
    return list(pairwise(part * size + min(part, larger) for part in range(chunks + 1)))


# ---- looks --------------------------------------------------------------------------------------


def describe_size(batch: TensorDict | None, arrays: Mapping[str, np.ndarray], prefix: str) -> str:
    """Memory of tensors and of arrays; of objects in arrays, what the outer two levels show."""

    def object_bytes(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.nbytes
        entries = value.values() if isinstance(value, Mapping) else ()
        return sys.getsizeof(value) + sum(object_bytes(entry) for entry in entries)

    def readable(num_bytes: float) -> str:
        for unit in ("B", "KiB", "MiB"):
            if num_bytes < 1024:
                return f"{num_bytes:.4g} {unit}"
            num_bytes /= 1024
        return f"{num_bytes:.4g} GiB"

    in_tensors = 0 if batch is None else sum(column.nbytes for column in batch.values(True, True))
    in_arrays = 0
    for array in arrays.values():
        # Rows that share one object, as repeated rows do, are counted once.
        objects = {id(value): value for value in array.flat} if array.dtype == object else {}
        in_arrays += array.nbytes + sum(map(object_bytes, objects.values()))
    return f"{prefix}{': ' if prefix else ''}tensors {readable(in_tensors)}, arrays {readable(in_arrays)}"


# ---- one TensorDict for everything --------------------------------------------------------------


def split_tensordict(tensor_dict: TensorDict) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    """Tensors, stacks of objects (as arrays) and single objects of a TensorDict."""
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
    batch = TensorDict(tensors, batch_size=tensor_dict.batch_size, device=tensor_dict.device) if has_rows else None
    return batch, arrays, facts


def join_tensordict(
    batch: TensorDict | None, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], rows: int
) -> TensorDict:
    """Inverse of `split_tensordict`: arrays become stacks of objects, entries of `meta_info` single objects."""
    joined = TensorDict({}, batch_size=[rows]) if batch is None else batch.copy()
    tensors = set(joined.keys())
    for key in [*arrays, *facts]:
        if key in tensors or (key in arrays and key in facts):
            raise ProtocolError(
                f"to_tensordict: {key!r}: got two entries of this name, expected one", fix="Rename one."
            )
    for key, array in arrays.items():
        entries = [NonTensorData(value, batch_size=[]) for value in array]
        joined.set(key, NonTensorStack(*entries) if entries else NonTensorStack(batch_size=[0]))
    types = {key: (a.dtype.str, a.shape[1:]) for key, a in arrays.items() if a.dtype != object or a.ndim > 1}
    if types:
        joined.set(ARRAY_TYPES, NonTensorData(types, batch_size=[rows]))
    for key, value in facts.items():
        joined.set(key, NonTensorData(value, batch_size=[rows]))
    return joined
