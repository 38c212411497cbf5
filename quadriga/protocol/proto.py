# SPDX-License-Identifier: Apache-2.0
"""DataProto, the batch that driver and workers exchange.

Rows are sequences. Columns are tensors (`batch`) or numpy arrays (`non_tensor_batch`); `meta_info`
has entries that apply to all rows. `fields.tsv` lists every column of the training loop.

Three rules apply to every operation:

- **No divisibility.** `chunk`, `split` and `make_iterator` accept any number of rows. The parts that
  `chunk` returns differ by at most one row, the larger ones first; if there are fewer rows than
  parts, the last ones are empty.
- **Copies are explicit.** `slice`, `chunk`, `split` and `select` share tensor memory with the
  original; `select_idxs`, `repeat`, `reorder`, `padding` and `concat` allocate each column once. A
  result never shares its dictionaries with the original.
- **Auto padding is a request to the dispatch**, made with `auto_padding=True`: give every rank the
  same number of rows by repeating the first ones, and drop the results of the repeats. It is for
  methods that treat each row separately. Without it, chunks may differ in size, which gives exact
  results for every method, also for one that averages over rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy as deep_copy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, RandomSampler

from quadriga.errors import ProtocolError
from quadriga.protocol import columns, disk, merge, wire

RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor
AUTO_PADDING = "_auto_padding"


def map_columns(batch: TensorDict, function: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """Apply a function to each column; the columns of a nested TensorDict become a dictionary."""
    results = {}
    for key, value in batch.items():
        if isinstance(value, TensorDict):
            results[key] = map_columns(value, function)
        else:
            results[key] = function(value)
    return results


def map_rows(
    data: "DataProto",
    take_tensor: Callable[[torch.Tensor], torch.Tensor],
    take_array: Callable[[np.ndarray], np.ndarray],
    num_rows: int,
) -> "DataProto":
    """Apply functions to all columns of a DataProto.

    Args:
        data: the rows to take from.
        take_tensor: applied to each column of `batch`, also nested ones.
        take_array: applied to each column of `non_tensor_batch`.
        num_rows: number of rows that the functions return.

    Returns:
        The new rows, with a copy of the dictionary `meta_info`.
    """
    batch = None
    if data.batch is not None:
        tensors = map_columns(data.batch, take_tensor)
        batch = TensorDict(tensors, batch_size=[num_rows], device=data.batch.device)
    arrays = {key: take_array(array) for key, array in data.non_tensor_batch.items()}
    return DataProto(batch, arrays, dict(data.meta_info))


def checked_num_rows(batch: TensorDict) -> int:
    """Number of rows of a batch, which must have one batch dimension and only dense columns.

    Raises:
        ProtocolError: the batch does not have exactly one batch dimension, or a column is no dense
            tensor.
    """
    if len(batch.batch_size) != 1:
        size = tuple(batch.batch_size)
        raise ProtocolError(
            f"DataProto.batch: got a TensorDict of batch size {size}, "
            "expected exactly one batch dimension",
            fix="Build it with batch_size=[number of rows], or fold the others with "
            "fold_batch_dim.",
        )
    # The batch and its nested TensorDicts.
    unchecked = [batch]
    while unchecked:
        for key, value in unchecked.pop().items():
            if isinstance(value, TensorDict):
                unchecked.append(value)
                continue
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.layout is torch.strided:
                continue
            got = f"a {value.layout} tensor" if is_tensor else type(value).__name__
            raise ProtocolError(
                f"DataProto.batch[{key!r}]: got {got}, expected a dense tensor",
                fix="Put objects into non_tensor_batch (from_tensordict does it), "
                "pad nested tensors.",
            )
    return batch.batch_size[0]


def check_names(where: str, names: Iterable[str], present: Iterable[str]) -> None:
    """Raise a ProtocolError unless every name is present.

    Args:
        where: the called function or the container, for the error.
        names: names that are asked for.
        present: names that exist.
    """
    present = set(present)
    for name in names:
        if name not in present:
            raise ProtocolError(
                f"{where}: got no entry {name!r}, expected one of {sorted(present)}"
            )


def take_entries(
    where: str, entries: Mapping[str, Any], names: Iterable[str] | None
) -> dict[str, Any]:
    """Take entries of a container by name.

    Args:
        where: the container, for the error.
        entries: the container.
        names: names of the entries to take. None: all.

    Raises:
        ProtocolError: a name does not exist.
    """
    if names is None:
        return dict(entries)
    check_names(where, names, entries)
    return {name: entries[name] for name in names}


@dataclass
class DataProtoItem:
    """A single row of a DataProto.

    Attributes:
        batch: the row's tensors, without the batch dimension.
        non_tensor_batch: the row's entries of the arrays.
        meta_info: as in the DataProto.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class DataProto:
    """Rows of tensors and numpy arrays, with entries that apply to all rows.

    Attributes:
        batch: tensor columns, with one batch dimension.
        non_tensor_batch: array columns; the first dimension is that of rows.
        meta_info: entries that apply to all rows.

    Raises:
        ProtocolError: a column does not have one entry per row; the error names the column, its
            shape and the number of rows.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that every column has one entry per row."""
        # Callers may pass None for either dictionary.
        if self.non_tensor_batch is None:
            self.non_tensor_batch = {}
        if self.meta_info is None:
            self.meta_info = {}
        # The number of rows is that of the batch; without a batch, that of the first array.
        num_rows = None
        if self.batch is not None:
            num_rows = checked_num_rows(self.batch)
        for key, array in self.non_tensor_batch.items():
            where = f"DataProto.non_tensor_batch[{key!r}]"
            if not isinstance(array, np.ndarray):
                raise ProtocolError(
                    f"{where}: got {type(array).__name__}, expected a numpy array",
                    fix="from_dict(non_tensors=...) turns lists into object arrays.",
                )
            if array.ndim == 0:
                raise ProtocolError(
                    f"{where}: got an array of shape (), expected one entry per row"
                )
            if num_rows is None:
                num_rows = array.shape[0]
            if array.shape[0] != num_rows:
                first = next(iter(self.non_tensor_batch))
                source = f"the length of {first!r}" if self.batch is None else "the batch size"
                raise ProtocolError(
                    f"{where}: got shape {array.shape}, expected {num_rows} rows, {source}"
                )

    def check_consistency(self) -> None:
        """Check again, as at construction, that every column has one entry per row.

        Raises:
            ProtocolError: a column does not have one entry per row.
        """
        self.__post_init__()

    # ---- construction -------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Any],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Build from one dictionary of tensors and numpy arrays, such as a data loader's batch.

        Args:
            data: columns by name, the batch dimension first in each.
            meta_info: entries that apply to all rows.
            auto_padding: ask the dispatch to repeat rows until all chunks have equal size.

        Returns:
            The DataProto; it shares memory with `data`.

        Raises:
            ProtocolError: a value is no tensor or numpy array, or the columns differ in their
                length.
        """
        tensors = {}
        arrays = {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                raise ProtocolError(
                    f"DataProto.from_single_dict: {key!r}: got {type(value).__name__}, "
                    "expected a tensor or a numpy array",
                    fix="Use an object array, or pass lists through from_dict(non_tensors=...).",
                )
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Build from columns by name, the batch dimension first in each.

        Args:
            tensors: columns of `batch`.
            non_tensors: columns of `non_tensor_batch`; a sequence that is no array becomes an
                object array.
            meta_info: entries that apply to all rows.
            num_batch_dims: number of leading dimensions that must be equal in all tensors. Rows are
                counted along the first one; 2 is for data that `unfold_batch_dim` will unfold.
            auto_padding: ask the dispatch to repeat rows until all chunks have equal size.

        Returns:
            The DataProto; it shares memory with the columns.

        Raises:
            ProtocolError: the tensors differ in their leading dimensions, the columns in their number
                of rows, or `num_batch_dims` is below 1.
        """
        if num_batch_dims < 1:
            raise ProtocolError(
                f"DataProto.from_dict: num_batch_dims: got {num_batch_dims}, expected 1 or more"
            )
        tensors = dict(tensors or {})
        batch = None
        # The first tensor decides on the leading dimensions.
        if tensors:
            first, first_tensor = next(iter(tensors.items()))
            batch_shape = tuple(first_tensor.shape[:num_batch_dims])
            for key, tensor in tensors.items():
                shape = tuple(tensor.shape)
                if len(shape) < num_batch_dims or shape[:num_batch_dims] != batch_shape:
                    raise ProtocolError(
                        f"DataProto column {key!r}: got shape {shape}, expected batch size "
                        f"{batch_shape}, that of {first!r}, in at least {num_batch_dims} "
                        "dimension(s)",
                        fix="Every column needs one entry per row, the batch first.",
                    )
            batch = TensorDict(tensors, batch_size=batch_shape[:1])

        arrays = {}
        for key, value in (non_tensors or {}).items():
            if not isinstance(value, np.ndarray):
                value = columns.object_array(value)
            arrays[key] = value
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[AUTO_PADDING] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    from_tensordict = classmethod(columns.from_tensordict)
    to_tensordict = columns.to_tensordict

    # ---- rows ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        first = next(iter(self.non_tensor_batch.values()), None)
        return 0 if first is None else first.shape[0]

    def has_columns(self) -> bool:
        """Whether there is anything in addition to `meta_info`."""
        return self.batch is not None or bool(self.non_tensor_batch)

    def __getitem__(self, index: int | slice | RowIndex) -> "DataProto | DataProtoItem":
        """Take a single row by number, or several rows by slice, numbers or mask.

        Raises:
            IndexError: there is no row of that number.
            TypeError: the index is of another type.
            ProtocolError: as for `select_idxs`.
        """
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step)
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            # Iteration over rows ends with this error, as the sequence protocol requires.
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a DataProto of {len(self)} rows")
            tensors = None if self.batch is None else self.batch[int(index)]
            entries = {key: array[index] for key, array in self.non_tensor_batch.items()}
            return DataProtoItem(tensors, entries, dict(self.meta_info))
        if isinstance(index, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(index)
        kind = type(index).__name__
        raise TypeError(
            f"DataProto rows are chosen by int, slice, list, array or tensor, not {kind}"
        )

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> "DataProto":
        """Take rows as slices of a list do; as views, or as copies if `step` is negative."""
        rows = slice(start, end, step)
        numbers = range(*rows.indices(len(self)))
        if numbers.step < 0:
            # torch has no views with a negative step.
            return self.select_idxs(numbers)
        take = itemgetter(rows)
        return map_rows(self, take, take, len(numbers))

    def select_idxs(self, idxs: RowIndex) -> "DataProto":
        """Copy rows by number or by a boolean mask.

        Args:
            idxs: row numbers in any order, repeated or negative ones included; or a mask with one
                entry per row.

        Returns:
            The rows, in the order of `idxs`.

        Raises:
            ProtocolError: `idxs` is not one-dimensional, of another dtype or out of range.
        """
        rows = self._row_numbers(idxs)
        return map_rows(
            self,
            lambda tensor: tensor.index_select(0, rows.to(tensor.device)),
            itemgetter(rows.numpy()),
            num_rows=len(rows),
        )

    def _row_numbers(self, idxs: RowIndex) -> torch.Tensor:
        """Convert an index to row numbers from 0 on, int64 on the CPU.

        Raises:
            ProtocolError: as for `select_idxs`.
        """
        num_rows = len(self)
        if isinstance(idxs, torch.Tensor):
            rows = idxs.detach().cpu()
        else:
            array = np.asarray(idxs)
            # numpy makes a float array of an empty list, which would be refused below.
            rows = torch.from_numpy(array.astype(np.int64) if array.size == 0 else array)

        if rows.dim() != 1 or rows.is_floating_point() or rows.is_complex():
            raise ProtocolError(
                f"row index: got shape {tuple(rows.shape)}, {rows.dtype}, "
                "expected one dimension of integers, or a boolean mask"
            )
        if rows.dtype == torch.bool:
            if len(rows) != num_rows:
                raise ProtocolError(
                    f"row mask: got {len(rows)} entries, expected {num_rows}, one per row"
                )
            rows = rows.nonzero().flatten()

        rows = rows.to(torch.int64)
        if len(rows):
            smallest = int(rows.min())
            largest = int(rows.max())
            if smallest < -num_rows or largest >= num_rows:
                raise ProtocolError(
                    f"row index: got values from {smallest} to {largest}, "
                    f"expected numbers of {num_rows} rows"
                )
        # Negative numbers count from the end.
        return torch.where(rows < 0, rows + num_rows, rows)

    def reorder(self, indices: RowIndex) -> None:
        """Put the rows into the order of `indices`, a permutation of all of them, in place.

        Raises:
            ProtocolError: `indices` is no permutation of the row numbers.
        """
        rows = self._row_numbers(indices)
        num_rows = len(self)
        if not torch.equal(rows.sort().values, torch.arange(num_rows)):
            raise ProtocolError(
                f"DataProto.reorder: got {len(rows)} indices that are no permutation of "
                f"{num_rows} rows, expected each row once",
                fix="select_idxs takes any choice of rows.",
            )
        self._take_columns(self.select_idxs(rows))

    def _take_columns(self, other: "DataProto") -> None:
        """Replace the columns by those of another DataProto."""
        self.batch = other.batch
        self.non_tensor_batch = other.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Repeat every row: A A B B when interleaved, A B A B when not.

        Raises:
            ProtocolError: `repeat_times` is negative.
        """
        if repeat_times < 0:
            raise ProtocolError(f"DataProto.repeat: got {repeat_times} times, expected 0 or more")
        rows = torch.arange(len(self))
        repeat = rows.repeat_interleave if interleave else rows.repeat
        return self.select_idxs(repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: RowIndex) -> "DataProto":
        """Repeat row i `repeat_times[i]` times, with its copies next to each other; 0 drops it.

        Raises:
            ProtocolError: there is not one number for each row, or one is negative.
        """
        counts = torch.as_tensor(repeat_times, dtype=torch.int64).cpu()
        num_rows = len(self)
        is_one_per_row = counts.shape == (num_rows,)
        if not is_one_per_row or (counts < 0).any():
            shape = tuple(counts.shape)
            got = "a negative count" if is_one_per_row else f"counts of shape {shape}"
            raise ProtocolError(
                f"DataProto.sample_level_repeat: got {got}, "
                f"expected {num_rows} counts, one per row, 0 or more"
            )
        return self.select_idxs(torch.arange(num_rows).repeat_interleave(counts))

    def chunk(self, chunks: int) -> "list[DataProto]":
        """Divide the rows into exactly `chunks` parts, as views.

        7 rows in 4 chunks are 2 2 2 1, and 3 rows are 1 1 1 0. An empty part has every column. To
        get parts of equal size, call `padding` first.

        Raises:
            ProtocolError: `chunks` is below 1.
        """
        if chunks < 1:
            raise ProtocolError(f"DataProto.chunk: got {chunks} chunks, expected at least 1")
        size, num_larger = divmod(len(self), chunks)
        # The first `num_larger` parts have one row more. The last entry is the number of rows.
        starts = [part * size + min(part, num_larger) for part in range(chunks + 1)]
        return [self.slice(start, end) for start, end in pairwise(starts)]

    def split(self, split_size: int) -> "list[DataProto]":
        """Divide the rows into parts of `split_size`, as views; the last may be smaller.

        Raises:
            ProtocolError: `split_size` is below 1.
        """
        if split_size < 1:
            raise ProtocolError(
                f"DataProto.split: got parts of {split_size} rows, expected 1 or more"
            )
        starts = range(0, len(self), split_size)
        return [self.slice(start, start + split_size) for start in starts]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """Concatenate the rows of all parts.

        A part without rows contributes only its `meta_info`, so ranks without work need no columns.
        `meta_info["metrics"]` becomes name -> list of the parts' values; any other entry must be
        equal in all parts that have it. If only one part has rows, its columns are not copied,
        unless they are lent.

        Raises:
            ProtocolError: there is no part, or the parts differ in their columns or entries.
        """
        if not data:
            raise ProtocolError("DataProto.concat: got no parts, expected at least one")
        meta_info = merge.merge_meta_info([part.meta_info for part in data])
        # If no part has rows, take the columns of the first part that has columns.
        parts = [part for part in data if len(part)]
        if not parts:
            parts = [part for part in data if part.has_columns()][:1] or data[:1]

        batches = [part.batch for part in parts if part.batch is not None]
        if batches and len(batches) != len(parts):
            raise ProtocolError(
                "DataProto.concat: got parts with and without tensors, expected the same columns"
            )
        batch = merge.concat_tensors(batches) if batches else None
        arrays = merge.concat_arrays([part.non_tensor_batch for part in parts])
        return DataProto(batch, arrays, meta_info)

    def is_padding_enabled(self) -> bool:
        """Whether this DataProto was made with `auto_padding=True`: a request to the dispatch."""
        return bool(self.meta_info.get(AUTO_PADDING, False))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append copies of a row, in place.

        Args:
            padding_size: number of copies.
            padding_candidate: row to copy, "first" or "last"; "" means "last".

        Raises:
            ProtocolError: the candidate is unknown, the number is negative, or there is no row.
        """
        num_rows = len(self)
        if padding_size == 0:
            return
        if padding_candidate not in ("", "first", "last"):
            raise ProtocolError(
                f"DataProto.padding: got {padding_candidate!r}, expected 'first', 'last' or ''"
            )
        if padding_size < 0 or not num_rows:
            raise ProtocolError(
                f"DataProto.padding: got {padding_size} copies of {num_rows} rows, "
                "expected a row to copy"
            )
        row = 0 if padding_candidate == "first" else num_rows - 1
        rows = torch.cat([torch.arange(num_rows), torch.full((padding_size,), row)])
        self._take_columns(self.select_idxs(rows))

    # ---- columns ------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """Take columns and entries by name.

        Args:
            batch_keys: tensor columns; None means all.
            non_tensor_batch_keys: other columns; None means all.
            meta_info_keys: entries of `meta_info`; None means all.
            deepcopy: whether to copy the values. By default memory is shared.

        Returns:
            A DataProto with its own containers.

        Raises:
            ProtocolError: a name does not exist.
        """
        tensors = self.batch
        check_names("DataProto.batch", batch_keys or (), self._tensor_keys())
        if tensors is not None:
            tensors = tensors.copy() if batch_keys is None else tensors.select(*batch_keys)
        arrays = self.non_tensor_batch
        arrays = take_entries("DataProto.non_tensor_batch", arrays, non_tensor_batch_keys)
        meta_info = take_entries("DataProto.meta_info", self.meta_info, meta_info_keys)
        selected = DataProto(tensors, arrays, meta_info)
        return deep_copy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Remove columns and entries by name, and return them.

        Args:
            batch_keys: tensor columns; None means none.
            non_tensor_batch_keys: other columns; None means none.
            meta_info_keys: entries of `meta_info`; None means none.

        Returns:
            The removed columns and entries.

        Raises:
            ProtocolError: a name does not exist.
        """
        batch_keys = batch_keys or ()
        non_tensor_batch_keys = non_tensor_batch_keys or ()
        meta_info_keys = meta_info_keys or ()
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        # `select` of no tensor columns makes a TensorDict with a number of rows and nothing else.
        if not batch_keys:
            popped.batch = None
        for key in batch_keys:
            del self.batch[key]
        for key in non_tensor_batch_keys:
            del self.non_tensor_batch[key]
        for key in meta_info_keys:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Rename columns in place.

        Args:
            old_keys: name or names of columns.
            new_keys: as many new names.

        Returns:
            `self`.

        Raises:
            ProtocolError: a column does not exist, two columns would have one name, or there are
                not as many new names as old ones.
        """
        old_names = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new_names = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        names = [*self._tensor_keys(), *self.non_tensor_batch]
        check_names("DataProto.rename", old_names, names)
        mapping = dict(zip(old_names, new_names, strict=False))
        # A set is smaller than the list if two columns would have one name.
        renamed = {mapping.get(name, name) for name in names}
        if len(old_names) != len(new_names) or len(renamed) != len(names):
            raise ProtocolError(
                f"DataProto.rename: got {old_names} to {new_names}, "
                "expected an unused name for each column"
            )

        batch = self.batch
        if batch is not None:
            tensors = {mapping.get(key, key): value for key, value in batch.items()}
            self.batch = TensorDict(tensors, batch_size=batch.batch_size, device=batch.device)
        arrays = self.non_tensor_batch
        self.non_tensor_batch = {mapping.get(key, key): value for key, value in arrays.items()}
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and entries of `other`, which has the same rows, in place.

        Returns:
            `self`.

        Raises:
            ProtocolError: the numbers of rows differ, or an entry that both have is not equal in
                them (NaN equals NaN); the error names the entry and the first row that differs.
        """
        if len(self) != len(other) and self.has_columns() and other.has_columns():
            raise ProtocolError(
                f"DataProto.union: got {len(other)} rows, expected {len(self)}",
                fix="Repeat or select rows first.",
            )
        # Merge into copies, so that after an error `self` is unchanged.
        meta_info = merge.union_meta_info(dict(self.meta_info), other.meta_info)
        arrays = merge.union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        if other.batch is not None:
            if self.batch is None:
                self.batch = other.batch.copy()
            else:
                self.batch = merge.union_tensor_dict(self.batch, other.batch)
        self.non_tensor_batch = arrays
        self.meta_info = meta_info
        return self

    def unfold_column_chunks(
        self, n_split: int, split_keys: Sequence[str] | None = None
    ) -> "DataProto":
        """Turn each row into `n_split` rows, each with one part of the split columns.

        Args:
            n_split: number of parts.
            split_keys: columns to split along their second dimension: (B, n_split * W) becomes
                (B * n_split, W). The other columns are repeated, A A B B.

        Returns:
            The new rows. The `n_split` rows made of one row follow each other.

        Raises:
            ProtocolError: a column does not exist, or its second dimension is not divisible.
        """
        split_names = set(split_keys or ())
        tensor_keys = split_names.intersection(self._tensor_keys())
        array_keys = split_names.intersection(self.non_tensor_batch)
        names = [*self._tensor_keys(), *self.non_tensor_batch]
        check_names("DataProto.unfold_column_chunks", split_names, names)

        def unfold(key: str, column: Any) -> Any:
            """Reshape (B, n_split * W, ...) to (B * n_split, W, ...)."""
            shape = tuple(column.shape)
            if n_split < 1 or len(shape) < 2 or shape[1] % n_split:
                raise ProtocolError(
                    f"unfold_column_chunks: column {key!r}",
                    got=f"shape {shape} in {n_split} parts",
                    expected="a second dimension divisible by the number of parts",
                )
            return column.reshape(shape[0] * n_split, shape[1] // n_split, *shape[2:])

        # Repeat the other columns, then add the split ones.
        other_columns = self.select()
        other_columns.pop(list(tensor_keys), list(array_keys))
        unfolded = other_columns.repeat(n_split)
        for key in tensor_keys:
            unfolded.batch[key] = unfold(key, self.batch[key])
        for key in array_keys:
            unfolded.non_tensor_batch[key] = unfold(key, self.non_tensor_batch[key])
        return unfolded

    def _tensor_keys(self) -> list[str]:
        """Names of the tensor columns."""
        return [] if self.batch is None else [str(key) for key in self.batch.keys()]

    # ---- iteration, devices, files, text ------------------------------------------------------

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> "Iterator[DataProto]":
        """Iterate over all rows in mini-batches, several times.

        Args:
            mini_batch_size: rows of a mini-batch; the last one of an epoch may be smaller.
            epochs: number of passes over the rows.
            seed: seed of the shuffled order. None: it is drawn from torch's global generator.
            dataloader_kwargs: `shuffle` (False) and `drop_last` (False), as in torch's DataLoader.

        Returns:
            An iterator over mini-batches: views of the rows, or copies if they are shuffled.

        Raises:
            ProtocolError: a number is too small, or an option is unknown.
        """
        options = dataloader_kwargs or {}
        unknown = sorted(options.keys() - {"shuffle", "drop_last"})
        if mini_batch_size < 1 or epochs < 0 or unknown:
            got = f"mini_batch_size {mini_batch_size}, epochs {epochs}"
            if unknown:
                got += f", dataloader_kwargs {unknown}"
            raise ProtocolError(
                "DataProto.make_iterator",
                got=got,
                expected="mini_batch_size of at least 1, epochs of at least 0, and only shuffle "
                "and drop_last in dataloader_kwargs",
            )

        num_rows = len(self)
        end = num_rows  # the number of the row at which an epoch ends
        if options.get("drop_last", False):
            end -= num_rows % mini_batch_size
        if not options.get("shuffle", False):
            starts = range(0, end, mini_batch_size)
            return (
                self.slice(start, min(start + mini_batch_size, end))
                for _ in range(epochs)
                for start in starts
            )

        generator = None if seed is None else torch.Generator().manual_seed(seed)
        # torch's sampler and loader are used because the order for a given seed must stay the same.
        sampler = RandomSampler(range(num_rows), generator=generator) if num_rows else ()
        loader = DataLoader(
            range(num_rows),
            mini_batch_size,
            sampler=sampler,
            drop_last=end < num_rows,
            generator=generator,
        )
        return (self.select_idxs(rows) for _ in range(epochs) for rows in loader)

    def to(self, device: torch.device | str | int) -> "DataProto":
        """Move the tensors to a device in place; return `self`."""
        if self.batch is not None:
            self.batch = self.batch.to(device, non_blocking=False)
        return self

    save_to_disk = disk.save_to_disk
    load_from_disk = classmethod(disk.load_from_disk)
    get_data_info = columns.get_data_info
    print_size = columns.print_size
    __repr__ = columns.one_line

    def __copy__(self) -> "DataProto":
        batch = None if self.batch is None else self.batch.copy()
        return DataProto(batch, dict(self.non_tensor_batch), dict(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataProto":
        """Copy columns and entries with their memory."""
        batch = None if self.batch is None else self.batch.clone()
        arrays = deep_copy(self.non_tensor_batch, memo)
        return DataProto(batch, arrays, deep_copy(self.meta_info, memo))

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        """Pickle columns and entries, with tensors in the form of `wire.py`."""
        tensors = None
        if self.batch is not None:
            tensors = map_columns(self.batch, wire.PackedTensor)
        # One memo for all arrays and entries, so that an object which occurs in several stays one.
        memo = {}
        pack = partial(wire.pack, memo=memo)
        arrays = {}
        for key, array in self.non_tensor_batch.items():
            if array.dtype == object:
                # Apply `pack` to each entry.
                array = np.frompyfunc(pack, 1, 1)(array)
            arrays[key] = array
        return wire.rebuild_proto, (type(self), len(self), tensors, arrays, pack(self.meta_info))
