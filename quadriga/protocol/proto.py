# SPDX-License-Identifier: Apache-2.0
"""DataProto: the only thing that travels between the driver and the workers.

Rows are samples. Columns are tensors (`batch`) or numpy arrays (`non_tensor_batch`); what holds for
all rows at once stands in `meta_info`. `fields.py` lists every column of the training loop.

Three rules hold for every operation here:

- **No divisibility.** `chunk`, `split` and `make_iterator` take any number of rows. Chunks differ by
  at most one row, the larger ones first; with fewer rows than chunks the last ones are empty.
- **Copies are explicit.** `slice`, `chunk`, `split` and `select` share tensor memory with the
  original; `select_idxs`, `repeat`, `reorder`, `padding` and `concat` allocate each column once. The
  containers (and `meta_info`) are always the result's own.
- **Auto padding is a request to the dispatch**, made with `auto_padding=True`: give every rank the
  same number of rows, by repeating the first ones, and cut the repeats' results off again. It is for
  methods that treat each row for itself. Without it ranks get ragged chunks, which is exact for every
  method, also for one that averages over rows.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy as deep_copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol import columns, convert, layout, merge, wire

AUTO_PADDING = "_auto_padding"


@dataclass
class DataProtoItem:
    """One row: `batch` without its batch dimension, `non_tensor_batch` with the row's entries."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class DataProto:
    """Tensors, objects and facts about a batch of samples.

    Attributes:
        batch: the tensor columns, a TensorDict with exactly one batch dimension; None: there are none.
        non_tensor_batch: the other columns, numpy arrays whose first dimension is the batch.
        meta_info: what is true of the whole batch.

    Raises:
        ProtocolError: a column does not have one entry per row; the error names it, its shape and the batch size.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raise ProtocolError unless every column has one entry per row."""
        if self.batch is not None:
            columns.check_batch(self.batch)
        columns.check_arrays(self.non_tensor_batch, None if self.batch is None else self.batch.batch_size[0])

    # ---- construction -------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> "DataProto":
        """Sort one dictionary, such as a data loader's batch, into tensors and arrays by their type."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        for key, value in data.items():
            if key not in tensors and key not in arrays:
                raise ProtocolError(
                    f"DataProto.from_single_dict: {key!r}",
                    got=type(value).__name__,
                    expected="a tensor or a numpy array",
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
        """Build from columns.

        Args:
            tensors: tensor columns, the batch first.
            non_tensors: other columns; arrays are kept, any other sequence becomes an object array.
            meta_info: what is true of the whole batch.
            num_batch_dims: how many leading dimensions all tensors must agree in. Rows are counted
                along the first; 2 is for data that `unfold_batch_dim` is to unfold.
            auto_padding: ask the dispatch for chunks of equal size (module docstring).
        """
        if num_batch_dims < 1:
            raise ProtocolError("DataProto.from_dict: num_batch_dims", got=str(num_batch_dims), expected="1 or more")
        batch = None
        if tensors:
            columns.check_leading_dims(tensors, num_batch_dims)
            rows = next(iter(tensors.values())).shape[0]
            batch = TensorDict(dict(tensors), batch_size=[rows])
        arrays = {
            key: value if isinstance(value, np.ndarray) else columns.object_array(value)
            for key, value in (non_tensors or {}).items()
        }
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[AUTO_PADDING] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None) -> "DataProto":
        """Build from a TensorDict: its stacks of objects become columns, its single objects `meta_info`."""
        batch, arrays, facts = convert.split_tensordict(tensor_dict)
        return cls(batch=batch, non_tensor_batch=arrays, meta_info={**facts, **(meta_info or {})})

    def to_tensordict(self) -> TensorDict:
        """One TensorDict with everything: arrays as stacks of objects, `meta_info` as single objects."""
        return convert.join_tensordict(self.batch, self.non_tensor_batch, self.meta_info, len(self))

    # ---- rows ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        first = next(iter(self.non_tensor_batch.values()), None)
        return 0 if first is None else first.shape[0]

    def __getitem__(self, index: int | slice | columns.RowIndex) -> "DataProto | DataProtoItem":
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step)
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            return self._item(int(index))
        if isinstance(index, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(index)
        raise TypeError(f"DataProto rows are chosen by int, slice, list, array or tensor, not {type(index).__name__}")

    def _item(self, row: int) -> DataProtoItem:
        # IndexError ends `for row in data`, as the sequence protocol asks for.
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a DataProto of {len(self)} rows")
        arrays = {key: array[row] for key, array in self.non_tensor_batch.items()}
        return DataProtoItem(None if self.batch is None else self.batch[row], arrays, dict(self.meta_info))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """Rows start, start + step, ... before end, as a view."""
        rows = slice(start, end, step)
        if step is not None and step < 0:
            return self.select_idxs(list(range(*rows.indices(len(self)))))
        return DataProto(
            batch=None if self.batch is None else columns.slice_tensors(self.batch, rows),
            non_tensor_batch={key: array[rows] for key, array in self.non_tensor_batch.items()},
            meta_info=dict(self.meta_info),
        )

    def select_idxs(self, idxs: columns.RowIndex) -> "DataProto":
        """Rows by number, in the order given and as often as given, or by a boolean mask; a copy."""
        return self._gather(columns.row_index(idxs, len(self)))

    def _gather(self, index: torch.Tensor) -> "DataProto":
        numbers = index.numpy()
        return DataProto(
            batch=None if self.batch is None else columns.gather_tensors(self.batch, index),
            non_tensor_batch={key: array[numbers] for key, array in self.non_tensor_batch.items()},
            meta_info=dict(self.meta_info),
        )

    def reorder(self, indices: columns.RowIndex) -> None:
        """Put the rows into the order `indices`, a permutation of all of them, in place."""
        self._become(self._gather(columns.permutation(indices, len(self))))

    def _become(self, other: "DataProto") -> None:
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Each row `repeat_times` times: A A B B when interleaved, A B A B when not."""
        return self._gather(columns.repeat_index(len(self), repeat_times, interleave))

    def sample_level_repeat(self, repeat_times: columns.RowIndex) -> "DataProto":
        """Row i `repeat_times[i]` times, the copies next to each other; 0 leaves the row out."""
        return self._gather(columns.counted_index(repeat_times, len(self)))

    def chunk(self, chunks: int) -> "list[DataProto]":
        """Exactly `chunks` parts, as views, whose sizes differ by at most one row, the larger ones first.

        7 rows in 4 chunks: 2 2 2 1. 3 rows in 4 chunks: 1 1 1 0; the empty part has every column, with
        no rows. `padding` beforehand makes all parts equal.
        """
        return [self.slice(start, end) for start, end in columns.chunk_bounds(len(self), chunks)]

    def split(self, split_size: int) -> "list[DataProto]":
        """Parts of `split_size` rows, as views; the last may be shorter."""
        if split_size < 1:
            raise ProtocolError("DataProto.split", got=f"parts of {split_size} rows", expected="1 or more")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """All rows of all parts, one part below the other.

        A part without rows adds only its `meta_info`, so ranks that had nothing to do need not invent
        columns. `meta_info["metrics"]` becomes name -> list of the parts' values; any other entry must
        be equal in the parts that have it. A single part is not copied.
        """
        if not data:
            raise ProtocolError("DataProto.concat", got="no parts", expected="at least one")
        meta_info = merge.merge_meta_info([part.meta_info for part in data])
        parts = [part for part in data if len(part)] or [part for part in data if part._has_columns()][:1] or data[:1]
        batches = [part.batch for part in parts if part.batch is not None]
        if batches and len(batches) != len(parts):
            raise ProtocolError("DataProto.concat", got="parts with and without tensors", expected="the same columns")
        return DataProto(
            batch=merge.concat_tensors(batches) if batches else None,
            non_tensor_batch=merge.concat_arrays([part.non_tensor_batch for part in parts]),
            meta_info=meta_info,
        )

    # ---- padding ------------------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Whether `auto_padding=True` asked the dispatch for chunks of equal size."""
        return bool(self.meta_info.get(AUTO_PADDING, False))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of the "first" or the "last" row, in place; "" is "last"."""
        if padding_size:
            self._become(self._gather(columns.padded_index(len(self), padding_size, padding_candidate)))

    # ---- columns ------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """The columns and facts named; None means all of that kind. Shares memory unless `deepcopy`."""
        self._require(batch_keys, non_tensor_batch_keys, meta_info_keys)
        tensors = self.batch
        if tensors is not None:
            tensors = tensors.copy() if batch_keys is None else tensors.select(*batch_keys)
        arrays, facts = self.non_tensor_batch, self.meta_info
        selected = DataProto(
            batch=tensors,
            non_tensor_batch={
                key: arrays[key] for key in (arrays if non_tensor_batch_keys is None else non_tensor_batch_keys)
            },
            meta_info={key: facts[key] for key in (facts if meta_info_keys is None else meta_info_keys)},
        )
        return deep_copy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Remove the columns and facts named, and return them; None means none of that kind."""
        self._require(batch_keys, non_tensor_batch_keys, meta_info_keys)
        tensors = {key: self.batch.pop(key) for key in batch_keys or ()}
        return DataProto(
            batch=TensorDict(tensors, batch_size=self.batch.batch_size) if tensors else None,
            non_tensor_batch={key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()},
            meta_info={key: self.meta_info.pop(key) for key in meta_info_keys or ()},
        )

    def _require(self, *wanted: Sequence[str] | None) -> None:
        """Raise unless all keys are there, so that an operation happens wholly or not at all."""
        stores = {
            "batch": {} if self.batch is None else self.batch,
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }
        for (name, store), keys in zip(stores.items(), wanted, strict=True):
            columns.check_names(f"DataProto.{name}", keys or (), store.keys())

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Give columns, of either kind, other names, in place; returns self."""
        names = [*self._tensor_keys(), *self.non_tensor_batch]
        mapping = columns.new_names(names, old_keys, new_keys)
        if self.batch is not None:
            renamed = {mapping.get(key, key): value for key, value in self.batch.items()}
            self.batch = TensorDict(renamed, batch_size=self.batch.batch_size, device=self.batch.device)
        self.non_tensor_batch = {mapping.get(key, key): value for key, value in self.non_tensor_batch.items()}
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and facts of `other`, in place; returns self.

        Entries of both must be equal (NaN equals NaN, objects are compared deeply); the error names the
        entry and the first row that differs. The same rows are expected on both sides.
        """
        if len(self) != len(other) and self._has_columns() and other._has_columns():
            raise ProtocolError(
                "DataProto.union", got=f"{len(other)} rows", expected=f"{len(self)}", fix="Repeat or select rows first."
            )
        merged_meta = merge.union_meta_info(dict(self.meta_info), other.meta_info)
        merged_arrays = merge.union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        if other.batch is not None:
            self.batch = other.batch.copy() if self.batch is None else merge.union_tensor_dict(self.batch, other.batch)
        self.non_tensor_batch, self.meta_info = merged_arrays, merged_meta
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> "DataProto":
        """Each row becomes `n_split` rows: `split_keys` give one part of their second dimension to each.

        A column (B, n_split * W) becomes (B * n_split, W); columns not named are repeated, A A B B.
        """
        chosen = set(split_keys or ())
        arrays = self.non_tensor_batch
        tensor_keys = self._tensor_keys()
        columns.check_names("DataProto.unfold_column_chunks", chosen, [*tensor_keys, *arrays])
        unfolded = self.select(
            [key for key in tensor_keys if key not in chosen], [key for key in arrays if key not in chosen]
        ).repeat(n_split)
        for key in chosen.intersection(tensor_keys):
            unfolded.batch[key] = columns.unfold_column(key, self.batch[key], n_split)
        for key in chosen.intersection(arrays):
            unfolded.non_tensor_batch[key] = columns.unfold_column(key, arrays[key], n_split)
        return unfolded

    def _has_columns(self) -> bool:
        return self.batch is not None or bool(self.non_tensor_batch)

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

        Args:
            mini_batch_size: rows of a mini-batch.
            epochs: how often every row comes.
            seed: makes a shuffled order reproducible; None draws it from torch's global generator.
            dataloader_kwargs: `shuffle` (False) and `drop_last` (False), as torch's DataLoader takes them.
        """
        order = columns.mini_batch_rows(len(self), mini_batch_size, epochs, seed, dataloader_kwargs or {})
        return (self.slice(rows.start, rows.stop) if isinstance(rows, slice) else self._gather(rows) for rows in order)

    def to(self, device: torch.device | str | int) -> "DataProto":
        """Move the tensors, in place; returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write everything to a file, whole or not at all."""
        wire.save_atomically(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> "DataProto":
        """Read what `save_to_disk` wrote. The file is a pickle: open only files you trust."""
        return wire.load_from_file(filepath)

    def get_data_info(self) -> str:
        """The layout as text: every column with shape, dtype and device, every fact with its type."""
        return layout.describe(self.batch, self.non_tensor_batch, self.meta_info)

    def print_size(self, prefix: str = "") -> None:
        """Print how much memory tensors and arrays take."""
        print(layout.describe_size(self.batch, self.non_tensor_batch, prefix))

    def __repr__(self) -> str:
        return f"DataProto({layout.summary(self.batch, self.non_tensor_batch, self.meta_info, len(self))})"

    def __copy__(self) -> "DataProto":
        batch = None if self.batch is None else self.batch.copy()
        return DataProto(batch, dict(self.non_tensor_batch), dict(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataProto":
        batch = None if self.batch is None else self.batch.clone()
        return DataProto(batch, deep_copy(self.non_tensor_batch, memo), deep_copy(self.meta_info, memo))

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        return wire.reduce_proto(self)
