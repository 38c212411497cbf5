# SPDX-License-Identifier: Apache-2.0
"""Columns and rows: the checks and the row arithmetic under every DataProto.

Nothing here knows DataProto. Functions take a TensorDict with one batch dimension, a dictionary of
numpy arrays, or indices, and work at the speed of memory: slices are views, gathers allocate a
column once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from quadriga.errors import ProtocolError

RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A one-dimensional object array with one entry per value, whatever the values are.

    `np.array(values, dtype=object)` would turn lists of equal length into a second dimension.
    """
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def check_batch(batch: TensorDict) -> None:
    """Raise unless `batch` has one batch dimension and dense tensors in every column."""
    if len(batch.batch_size) != 1:
        raise ProtocolError(
            "DataProto.batch",
            got=f"a TensorDict of batch size {tuple(batch.batch_size)}",
            expected="exactly one batch dimension",
            fix="Build it with batch_size=[number of rows], or fold the others with fold_batch_dim.",
        )
    _check_dense(batch)


def _check_dense(batch: TensorDict) -> None:
    for key, value in batch.items():
        if isinstance(value, TensorDict):
            _check_dense(value)
        elif not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise ProtocolError(
                f"DataProto.batch[{key!r}]",
                got=type(value).__name__ if not isinstance(value, torch.Tensor) else f"a {value.layout} tensor",
                expected="a dense tensor",
                fix="Put objects into non_tensor_batch (from_tensordict does it), pad nested tensors.",
            )


def check_arrays(arrays: Mapping[str, Any], rows: int | None) -> None:
    """Raise unless every entry is a numpy array whose first dimension is `rows` (None: that of the first)."""
    source = "the batch size" if rows is not None else f"the length of {next(iter(arrays), None)!r}"
    for key, value in arrays.items():
        where = f"DataProto.non_tensor_batch[{key!r}]"
        if not isinstance(value, np.ndarray):
            raise ProtocolError(
                where,
                got=type(value).__name__,
                expected="a numpy array",
                fix="from_dict(non_tensors=...) turns lists into object arrays.",
            )
        if value.ndim == 0:
            raise ProtocolError(where, got="an array of shape ()", expected="one entry per row")
        rows = value.shape[0] if rows is None else rows
        if value.shape[0] != rows:
            raise ProtocolError(where, got=f"shape {value.shape}", expected=f"{rows} rows, {source}")


def check_leading_dims(tensors: Mapping[str, torch.Tensor], num_batch_dims: int) -> None:
    """Raise unless all tensors agree in their first `num_batch_dims` dimensions."""
    first_key, first = next(iter(tensors.items()))
    for key, value in tensors.items():
        if value.dim() < num_batch_dims:
            raise ProtocolError(
                f"DataProto column {key!r}",
                got=f"shape {tuple(value.shape)}",
                expected=f"at least {num_batch_dims} dimension(s), the batch first",
            )
        if value.shape[:num_batch_dims] != first.shape[:num_batch_dims]:
            raise ProtocolError(
                f"DataProto column {key!r}",
                got=f"shape {tuple(value.shape)}",
                expected=f"batch size {tuple(first.shape[:num_batch_dims])}, that of {first_key!r}",
                fix="Every column needs one entry per row.",
            )


def map_columns(batch: TensorDict, function: Callable[[torch.Tensor], torch.Tensor], rows: int) -> TensorDict:
    """A TensorDict of `rows` rows with `function` applied to every column, nested ones included."""
    columns = {
        key: map_columns(value, function, rows) if isinstance(value, TensorDict) else function(value)
        for key, value in batch.items()
    }
    return TensorDict(columns, batch_size=[rows], device=batch.device)


def row_index(index: RowIndex, rows: int) -> torch.Tensor:
    """Integers or a boolean mask as an int64 tensor of row numbers in [0, rows), on the CPU."""
    if not isinstance(index, torch.Tensor):
        array = np.asarray(index)
        index = torch.from_numpy(array.astype(np.int64) if array.size == 0 else array)
    index = index.detach().cpu()
    is_number = not (index.is_floating_point() or index.is_complex())
    if index.dim() != 1 or not is_number:
        raise ProtocolError(
            "row index",
            got=f"shape {tuple(index.shape)}, {index.dtype}",
            expected="one dimension of integers, or a boolean mask",
        )
    if index.dtype == torch.bool:
        if index.shape[0] != rows:
            raise ProtocolError("row mask", got=f"{index.shape[0]} entries", expected=f"{rows}, one per row")
        return index.nonzero().flatten()
    index = index.to(torch.int64)
    if index.numel() and (int(index.min()) < -rows or int(index.max()) >= rows):
        raise ProtocolError(
            "row index", got=f"values from {int(index.min())} to {int(index.max())}", expected=f"rows of {rows}"
        )
    return torch.where(index < 0, index + rows, index)


def gather_tensors(batch: TensorDict, index: torch.Tensor) -> TensorDict:
    """Rows `index` of every column, in that order: one allocation per column."""
    return map_columns(batch, lambda column: column.index_select(0, index.to(column.device)), index.shape[0])


def slice_tensors(batch: TensorDict, rows: slice) -> TensorDict:
    """A view of the rows of a slice with a positive step."""
    size = len(range(*rows.indices(batch.batch_size[0])))
    return map_columns(batch, lambda column: column[rows], size)


def permutation(index: RowIndex, rows: int) -> torch.Tensor:
    """`index` as row numbers, after making sure that each row is in it once."""
    numbers = row_index(index, rows)
    if not torch.equal(numbers.sort().values, torch.arange(rows)):
        raise ProtocolError(
            "DataProto.reorder",
            got=f"{numbers.numel()} indices that are no permutation of {rows} rows",
            expected="each row once",
            fix="select_idxs takes any choice of rows.",
        )
    return numbers


def repeat_index(rows: int, times: int, interleave: bool) -> torch.Tensor:
    """Row numbers that repeat each row `times` times: 0 0 1 1 (interleaved) or 0 1 0 1."""
    if times < 0:
        raise ProtocolError("DataProto.repeat", got=f"{times} times", expected="0 or more")
    index = torch.arange(rows)
    return index.repeat_interleave(times) if interleave else index.repeat(times)


def counted_index(counts: RowIndex, rows: int) -> torch.Tensor:
    """Row numbers that repeat row i `counts[i]` times, the copies next to each other."""
    numbers = torch.as_tensor(counts, dtype=torch.int64).cpu()
    if numbers.shape != (rows,) or (numbers < 0).any():
        raise ProtocolError(
            "DataProto.sample_level_repeat",
            got=f"counts of shape {tuple(numbers.shape)}" if numbers.shape != (rows,) else "a negative count",
            expected=f"{rows} counts, one per row, 0 or more",
        )
    return torch.arange(rows).repeat_interleave(numbers)


def padded_index(rows: int, padding_size: int, candidate: str) -> torch.Tensor:
    """All row numbers, then `padding_size` times that of the "first" or the "last" row ("": the last)."""
    if candidate not in ("", "first", "last"):
        raise ProtocolError("DataProto.padding", got=repr(candidate), expected="'first', 'last' or ''")
    if padding_size < 0 or (padding_size and not rows):
        raise ProtocolError("DataProto.padding", got=f"{padding_size} copies of {rows} rows", expected="a row to copy")
    return torch.cat([torch.arange(rows), torch.full((padding_size,), 0 if candidate == "first" else rows - 1)])


def mini_batch_rows(
    rows: int, size: int, epochs: int, seed: int | None, options: Mapping[str, Any]
) -> Iterator[slice | torch.Tensor]:
    """The rows of each mini-batch of each epoch: slices in order, or row numbers when shuffled."""
    unknown = sorted(options.keys() - {"shuffle", "drop_last"})
    if size < 1 or epochs < 0 or unknown:
        raise ProtocolError(
            "DataProto.make_iterator",
            got=f"mini_batch_size {size}, epochs {epochs}" + (f", dataloader_kwargs {unknown}" if unknown else ""),
            expected="mini_batch_size of at least 1, epochs of at least 0, no kwargs but shuffle and drop_last",
        )
    end = rows - rows % size if options.get("drop_last", False) else rows
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if not options.get("shuffle", False):
        return (slice(start, min(start + size, end)) for _ in range(epochs) for start in range(0, end, size))
    return (
        part
        for _ in range(epochs)
        for part in torch.randperm(rows, generator=generator)[:end].split(size)
        if part.numel()
    )


def check_names(where: str, names: Iterable[str], present: Iterable[str]) -> None:
    """Raise unless every name is present."""
    present = set(present)
    for name in names:
        if name not in present:
            raise ProtocolError(where, got=f"no entry {name!r}", expected=f"one of {sorted(present)}")


def new_names(names: Sequence[str], old: str | Sequence[str], new: str | Sequence[str]) -> dict[str, str]:
    """Old name -> new name, after making sure that every column keeps a name of its own."""
    old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old, new))
    check_names("DataProto.rename", old, names)
    mapping = dict(zip(old, new, strict=False))
    if len(old) != len(new) or len({mapping.get(name, name) for name in names}) != len(names):
        raise ProtocolError("DataProto.rename", got=f"{old} to {new}", expected="a free name for each column")
    return mapping


def chunk_bounds(rows: int, chunks: int) -> list[tuple[int, int]]:
    """(start, end) of `chunks` parts whose sizes differ by at most one, the larger ones first."""
    if chunks < 1:
        raise ProtocolError("chunk", got=f"{chunks} chunks", expected="at least 1")
    size, larger = divmod(rows, chunks)
    starts = [part * size + min(part, larger) for part in range(chunks + 1)]
    return list(pairwise(starts))


def unfold_column(key: str, column: Any, parts: int) -> Any:
    """A tensor or array (B, parts * W, ...) as (B * parts, W, ...): row b's parts one below the other."""
    shape = tuple(column.shape)
    if parts < 1 or len(shape) < 2 or shape[1] % parts:
        raise ProtocolError(
            f"unfold_column_chunks: column {key!r}",
            got=f"shape {shape} in {parts} parts",
            expected="a second dimension that the parts divide",
        )
    return column.reshape(shape[0] * parts, shape[1] // parts, *shape[2:])
