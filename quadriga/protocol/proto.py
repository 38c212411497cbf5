# SPDX-License-Identifier: Apache-2.0
"""DataProto: the only thing that travels between the driver and the workers.

Rows are sequences. Columns are tensors (`batch`) or numpy arrays (`non_tensor_batch`); what holds for
all rows at once stands in `meta_info`. `fields.tsv` lists every column of the training loop.

Three rules hold for every operation here:

- **No divisibility.** `chunk`, `split` and `make_iterator` take any number of rows. Chunks differ by at most one row,
  the larger ones first; with fewer rows than chunks the last ones are empty.
- **Copies are explicit.** `slice`, `chunk`, `split` and `select` share tensor memory with the original; `select_idxs`,
  `repeat`, `reorder`, `padding` and `concat` allocate each column once. Containers are always the result's own.
- **Auto padding is a request to the dispatch**, made with `auto_padding=True`: give every rank the same number of rows,
  by repeating the first ones, and cut the repeats' results off again. It is for methods that treat each row for itself.
  Ragged chunks, without it, are exact for every method, also for one that averages over rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy as deep_copy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
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
    """The columns by name with `function` applied to each; those of a nested TensorDict are a dictionary again."""
    return {
        key: map_columns(value, function) if isinstance(value, TensorDict) else function(value)
        for key, value in batch.items()
    }


def check_batch(batch: TensorDict) -> int:
    """Raise unless `batch` has one batch dimension and dense columns, also nested ones. Returns the number of rows."""
    if len(batch.batch_size) != 1:
        found = f"a TensorDict of batch size {tuple(batch.batch_size)}"
        fix = "Build it with batch_size=[number of rows], or fold the others with fold_batch_dim."
        raise ProtocolError(
            f"DataProto.batch: got {found}, expected exactly one batch dimension", fix=fix
        )
    nested = [batch]
    while nested:
        for key, value in nested.pop().items():
            if isinstance(value, TensorDict):
                nested.append(value)
            elif not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                got = (
                    f"a {value.layout} tensor"
                    if isinstance(value, torch.Tensor)
                    else type(value).__name__
                )
                fix = "Put objects into non_tensor_batch (from_tensordict does it), pad nested tensors."
                raise ProtocolError(
                    f"DataProto.batch[{key!r}]: got {got}, expected a dense tensor", fix=fix
                )
    return batch.batch_size[0]


def check_names(where: str, names: Iterable[str], present: Iterable[str]) -> None:
    """Raise unless every name is present."""
    present = set(present)
    for name in names:
        if name not in present:
            raise ProtocolError(
                f"{where}: got no entry {name!r}, expected one of {sorted(present)}"
            )


@dataclass
class DataProtoItem:
    """One row: `batch` without its batch dimension, `non_tensor_batch` with the row's entries."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class DataProto:
    """Columns and facts of a batch.
    Raises ProtocolError: a column does not have one entry per row; the error names it, its shape and the batch size."""

    batch: TensorDict | None = (
        None  # tensor columns, with one batch dimension; None: there are none
    )
    non_tensor_batch: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # other columns, arrays with the batch first
    meta_info: dict[str, Any] = field(default_factory=dict)  # what is true of the whole batch

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        rows = None if self.batch is None else check_batch(self.batch)
        for key, value in self.non_tensor_batch.items():
            where = f"DataProto.non_tensor_batch[{key!r}]"
            if not isinstance(value, np.ndarray):
                fix = "from_dict(non_tensors=...) turns lists into object arrays."
                raise ProtocolError(
                    f"{where}: got {type(value).__name__}, expected a numpy array", fix=fix
                )
            if value.ndim == 0:
                raise ProtocolError(
                    f"{where}: got an array of shape (), expected one entry per row"
                )
            rows = value.shape[0] if rows is None else rows
            if value.shape[0] != rows:
                first = next(iter(self.non_tensor_batch))
                source = "the batch size" if self.batch is not None else f"the length of {first!r}"
                raise ProtocolError(
                    f"{where}: got shape {value.shape}, expected {rows} rows, {source}"
                )

    # ---- construction -------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Any],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Sort one dictionary, such as a data loader's batch, into tensors and arrays by their type."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        for key, value in data.items():
            if key not in tensors and key not in arrays:
                found = f"DataProto.from_single_dict: {key!r}: got {type(value).__name__}"
                fix = "Use an object array, or pass lists through from_dict(non_tensors=...)."
                raise ProtocolError(f"{found}, expected a tensor or a numpy array", fix=fix)
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
        """Build from columns, the batch first in each.
        `non_tensors`: arrays are kept, any other sequence becomes an object array.
        `num_batch_dims`: how many leading dimensions all tensors must agree in. Rows are counted along the first; 2 is
        for data that `unfold_batch_dim` is to unfold.
        `auto_padding`: ask the dispatch for chunks of equal size (module docstring)."""
        if num_batch_dims < 1:
            raise ProtocolError(
                f"DataProto.from_dict: num_batch_dims: got {num_batch_dims}, expected 1 or more"
            )
        tensors = dict(tensors or {})
        first = next(iter(tensors), "")
        wanted = tuple(tensors[first].shape[:num_batch_dims]) if tensors else ()
        for key, tensor in tensors.items():
            if tensor.dim() < num_batch_dims or tuple(tensor.shape[:num_batch_dims]) != wanted:
                sizes = f"batch size {wanted}, that of {first!r}, in at least {num_batch_dims} dimension(s)"
                found = (
                    f"DataProto column {key!r}: got shape {tuple(tensor.shape)}, expected {sizes}"
                )
                raise ProtocolError(
                    found, fix="Every column needs one entry per row, the batch first."
                )
        arrays = {
            key: value if isinstance(value, np.ndarray) else columns.object_array(value)
            for key, value in (non_tensors or {}).items()
        }
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[AUTO_PADDING] = True
        batch = TensorDict(tensors, batch_size=wanted[:1]) if tensors else None
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
        """Whether there is more than `meta_info`."""
        return self.batch is not None or bool(self.non_tensor_batch)

    def __getitem__(self, index: int | slice | RowIndex) -> "DataProto | DataProtoItem":
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step)
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            # IndexError ends `for row in data`, as the sequence protocol asks for.
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a DataProto of {len(self)} rows")
            tensors = None if self.batch is None else self.batch[int(index)]
            arrays = {key: array[index] for key, array in self.non_tensor_batch.items()}
            return DataProtoItem(tensors, arrays, dict(self.meta_info))
        if isinstance(index, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(index)
        raise TypeError(
            f"DataProto rows are chosen by int, slice, list, array or tensor, not {type(index).__name__}"
        )

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> "DataProto":
        """Rows start, start + step, ... before end, as a view."""
        rows = slice(start, end, step)
        if step is not None and step < 0:
            return self.select_idxs(range(*rows.indices(len(self))))
        batch = None
        if self.batch is not None:
            size = len(range(*rows.indices(len(self))))
            batch = TensorDict(
                map_columns(self.batch, lambda x: x[rows]),
                batch_size=[size],
                device=self.batch.device,
            )
        arrays = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        return DataProto(batch, arrays, dict(self.meta_info))

    def select_idxs(self, idxs: RowIndex) -> "DataProto":
        """Rows by number, in the order given and as often as given, or by a boolean mask; a copy."""
        rows, size = idxs, len(self)
        if not isinstance(rows, torch.Tensor):
            array = np.asarray(rows)
            rows = torch.from_numpy(array.astype(np.int64) if array.size == 0 else array)
        rows = rows.detach().cpu()
        if rows.dim() != 1 or rows.is_floating_point() or rows.is_complex():
            found = f"shape {tuple(rows.shape)}, {rows.dtype}"
            raise ProtocolError(
                f"row index: got {found}, expected one dimension of integers, or a boolean mask"
            )
        if rows.dtype == torch.bool:
            if len(rows) != size:
                raise ProtocolError(
                    f"row mask: got {len(rows)} entries, expected {size}, one per row"
                )
            rows = rows.nonzero().flatten()
        rows = rows.to(torch.int64)
        if len(rows) and (int(rows.min()) < -size or int(rows.max()) >= size):
            found = f"values from {int(rows.min())} to {int(rows.max())}"
            raise ProtocolError(f"row index: got {found}, expected rows of {size}")
        rows = torch.where(rows < 0, rows + size, rows)
        batch = None
        if self.batch is not None:
            chosen = map_columns(self.batch, lambda x: x.index_select(0, rows.to(x.device)))
            batch = TensorDict(chosen, batch_size=[len(rows)], device=self.batch.device)
        arrays = {key: array[rows.numpy()] for key, array in self.non_tensor_batch.items()}
        return DataProto(batch, arrays, dict(self.meta_info))

    def reorder(self, indices: RowIndex) -> None:
        """Put the rows into the order `indices`, a permutation of all of them, in place."""
        rows = (
            DataProto.from_dict({"row_index": torch.arange(len(self))})
            .select_idxs(indices)
            .batch["row_index"]
        )
        if not torch.equal(rows.sort().values, torch.arange(len(self))):
            found = f"got {len(rows)} indices that are no permutation of {len(self)} rows, expected each row once"
            raise ProtocolError(
                f"DataProto.reorder: {found}", fix="select_idxs takes any choice of rows."
            )
        ordered = self.select_idxs(rows)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Each row `repeat_times` times: A A B B when interleaved, A B A B when not."""
        if repeat_times < 0:
            raise ProtocolError(f"DataProto.repeat: got {repeat_times} times, expected 0 or more")
        rows = torch.arange(len(self))
        return self.select_idxs(
            rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)
        )

    def sample_level_repeat(self, repeat_times: RowIndex) -> "DataProto":
        """Row i `repeat_times[i]` times, the copies next to each other; 0 leaves the row out."""
        counts, rows = torch.as_tensor(repeat_times, dtype=torch.int64).cpu(), len(self)
        if counts.shape != (rows,) or (counts < 0).any():
            found = (
                "a negative count"
                if counts.shape == (rows,)
                else f"counts of shape {tuple(counts.shape)}"
            )
            wanted = f"{rows} counts, one per row, 0 or more"
            raise ProtocolError(f"DataProto.sample_level_repeat: got {found}, expected {wanted}")
        return self.select_idxs(torch.arange(rows).repeat_interleave(counts))

    def chunk(self, chunks: int) -> "list[DataProto]":
        """Exactly `chunks` parts, as views: 7 rows in 4 chunks are 2 2 2 1, 3 rows 1 1 1 0.
        An empty part has every column, with no rows. `padding` beforehand makes all parts equal."""
        if chunks < 1:
            raise ProtocolError(f"DataProto.chunk: got {chunks} chunks, expected at least 1")
        size, larger = divmod(len(self), chunks)
        starts = [part * size + min(part, larger) for part in range(chunks + 1)]
        return [self.slice(start, end) for start, end in pairwise(starts)]

    def split(self, split_size: int) -> "list[DataProto]":
        """Parts of `split_size` rows, as views; the last may be shorter."""
        if split_size < 1:
            raise ProtocolError(
                f"DataProto.split: got parts of {split_size} rows, expected 1 or more"
            )
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """All rows of all parts, one part below the other.

        A part without rows adds only its `meta_info`, so ranks that had nothing to do need no columns.
        `meta_info["metrics"]` becomes name -> list of the parts' values; any other entry must be equal in the parts
        that have it. A single part is not copied."""
        if not data:
            raise ProtocolError("DataProto.concat: got no parts, expected at least one")
        meta_info = merge.merge_meta_info([part.meta_info for part in data])
        parts = (
            [part for part in data if len(part)]
            or [part for part in data if part.has_columns()][:1]
            or data[:1]
        )
        batches = [part.batch for part in parts if part.batch is not None]
        if batches and len(batches) != len(parts):
            raise ProtocolError(
                "DataProto.concat: got parts with and without tensors, expected the same columns"
            )
        batch = merge.concat_tensors(batches) if batches else None
        return DataProto(
            batch, merge.concat_arrays([part.non_tensor_batch for part in parts]), meta_info
        )

    def is_padding_enabled(self) -> bool:
        """Whether `auto_padding=True` requests chunks of equal size from the dispatch."""
        return bool(self.meta_info.get(AUTO_PADDING, False))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of the "first" or the "last" row, in place; "" is "last"."""
        rows = len(self)
        if padding_size == 0:
            return
        if padding_candidate not in ("", "first", "last"):
            raise ProtocolError(
                f"DataProto.padding: got {padding_candidate!r}, expected 'first', 'last' or ''"
            )
        if padding_size < 0 or not rows:
            raise ProtocolError(
                f"DataProto.padding: got {padding_size} copies of {rows} rows, expected a row to copy"
            )
        copies = torch.full((padding_size,), 0 if padding_candidate == "first" else rows - 1)
        padded = self.select_idxs(torch.cat([torch.arange(rows), copies]))
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    # ---- columns ------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """The columns and facts named; None means all of that kind. Shares memory unless `deepcopy`."""
        for name, store, keys in (
            ("batch", self.batch, batch_keys),
            ("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys),
            ("meta_info", self.meta_info, meta_info_keys),
        ):
            check_names(f"DataProto.{name}", keys or (), () if store is None else store.keys())
        tensors = self.batch
        if tensors is not None:
            tensors = tensors.copy() if batch_keys is None else tensors.select(*batch_keys)
        names = self.non_tensor_batch if non_tensor_batch_keys is None else non_tensor_batch_keys
        arrays = {key: self.non_tensor_batch[key] for key in names}
        facts = self.meta_info if meta_info_keys is None else meta_info_keys
        selected = DataProto(tensors, arrays, {key: self.meta_info[key] for key in facts})
        return deep_copy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Remove the columns and facts named, and return them; None means none of that kind."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        if not batch_keys:
            popped.batch = None
        for key in batch_keys or ():
            del self.batch[key]
        for key in non_tensor_batch_keys or ():
            del self.non_tensor_batch[key]
        for key in meta_info_keys or ():
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Give columns, of either kind, other names, in place; returns self."""
        names = [*self._tensor_keys(), *self.non_tensor_batch]
        old, new = (
            [keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys)
        )
        check_names("DataProto.rename", old, names)
        mapping = dict(zip(old, new, strict=False))
        if len(old) != len(new) or len({mapping.get(name, name) for name in names}) != len(names):
            raise ProtocolError(
                f"DataProto.rename: got {old} to {new}, expected a free name for each column"
            )
        if self.batch is not None:
            renamed = {mapping.get(key, key): value for key, value in self.batch.items()}
            self.batch = TensorDict(
                renamed, batch_size=self.batch.batch_size, device=self.batch.device
            )
        self.non_tensor_batch = {
            mapping.get(key, key): value for key, value in self.non_tensor_batch.items()
        }
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and facts of `other`, which has the same rows, in place; returns self.
        Entries of both must be equal (NaN equals NaN); the error names the entry and the first row that differs."""
        if len(self) != len(other) and self.has_columns() and other.has_columns():
            fix = "Repeat or select rows first."
            raise ProtocolError(
                f"DataProto.union: got {len(other)} rows, expected {len(self)}", fix=fix
            )
        merged_meta = merge.union_meta_info(dict(self.meta_info), other.meta_info)
        merged_arrays = merge.union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        if other.batch is not None:
            self.batch = (
                other.batch.copy()
                if self.batch is None
                else merge.union_tensor_dict(self.batch, other.batch)
            )
        self.non_tensor_batch, self.meta_info = merged_arrays, merged_meta
        return self

    def unfold_column_chunks(
        self, n_split: int, split_keys: Sequence[str] | None = None
    ) -> "DataProto":
        """Each row becomes `n_split` rows: `split_keys` give one part of their second dimension to each.
        A column (B, n_split * W) becomes (B * n_split, W); columns not named are repeated, A A B B."""
        chosen = set(split_keys or ())
        tensor_keys, arrays = self._tensor_keys(), self.non_tensor_batch
        check_names("DataProto.unfold_column_chunks", chosen, [*tensor_keys, *arrays])

        def unfold(key: str, column: Any) -> Any:
            """(B, n_split * W, ...) as (B * n_split, W, ...): the parts of a row one below the other."""
            shape = tuple(column.shape)
            if n_split < 1 or len(shape) < 2 or shape[1] % n_split:
                where, got = (
                    f"unfold_column_chunks: column {key!r}",
                    f"shape {shape} in {n_split} parts",
                )
                raise ProtocolError(
                    where, got=got, expected="a second dimension that the parts divide"
                )
            return column.reshape(shape[0] * n_split, shape[1] // n_split, *shape[2:])

        others = ([key for key in keys if key not in chosen] for keys in (tensor_keys, arrays))
        unfolded = self.select(*others).repeat(n_split)
        for key in chosen.intersection(tensor_keys):
            unfolded.batch[key] = unfold(key, self.batch[key])
        for key in chosen.intersection(arrays):
            unfolded.non_tensor_batch[key] = unfold(key, arrays[key])
        return unfolded

    def _tensor_keys(self) -> list[str]:
        return [] if self.batch is None else [str(key) for key in self.batch.keys()]

    # ---- iteration, devices, disk, looks ------------------------------------------------------

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> "Iterator[DataProto]":
        """Mini-batches of all rows, `epochs` times; the last of an epoch may be smaller.
        `seed`: makes a shuffled order reproducible; None draws it from torch's global generator.
        `dataloader_kwargs`: `shuffle` (False) and `drop_last` (False), as torch's DataLoader takes them."""
        options, rows = dataloader_kwargs or {}, len(self)
        unknown = sorted(options.keys() - {"shuffle", "drop_last"})
        if mini_batch_size < 1 or epochs < 0 or unknown:
            found = f"mini_batch_size {mini_batch_size}, epochs {epochs}"
            got = found + (f", dataloader_kwargs {unknown}" if unknown else "")
            expected = "mini_batch_size of at least 1, epochs of at least 0, no kwargs but shuffle and drop_last"
            raise ProtocolError("DataProto.make_iterator", got=got, expected=expected)
        end = rows - rows % mini_batch_size if options.get("drop_last", False) else rows
        if not options.get("shuffle", False):
            starts = (start for _ in range(epochs) for start in range(0, end, mini_batch_size))
            return (self.slice(start, min(start + mini_batch_size, end)) for start in starts)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        # Its order for a seed is part of the contract.
        order = RandomSampler(range(rows), generator=generator) if rows else ()
        numbers = DataLoader(
            range(rows), mini_batch_size, sampler=order, drop_last=end < rows, generator=generator
        )
        return (self.select_idxs(part) for _ in range(epochs) for part in numbers)

    def to(self, device: torch.device | str | int) -> "DataProto":
        """Move the tensors, in place; returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device, non_blocking=False)
        return self

    save_to_disk, load_from_disk = disk.save_to_disk, classmethod(disk.load_from_disk)
    get_data_info, print_size, __repr__ = (
        columns.get_data_info,
        columns.print_size,
        columns.one_line,
    )

    def __copy__(self) -> "DataProto":
        batch = None if self.batch is None else self.batch.copy()
        return DataProto(batch, dict(self.non_tensor_batch), dict(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataProto":
        batch = None if self.batch is None else self.batch.clone()
        return DataProto(
            batch, deep_copy(self.non_tensor_batch, memo), deep_copy(self.meta_info, memo)
        )

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        memo: dict[int, Any] = {}
        pack = partial(wire.pack, memo=memo)
        tensors = None if self.batch is None else map_columns(self.batch, wire.PackedTensor)
        arrays = {
            key: np.frompyfunc(pack, 1, 1)(array) if array.dtype == object else array
            for key, array in self.non_tensor_batch.items()
        }
        rows = 0 if self.batch is None else self.batch.batch_size[0]
        return wire.rebuild_proto, (type(self), rows, tensors, arrays, pack(self.meta_info))
