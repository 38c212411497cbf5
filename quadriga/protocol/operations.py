# SPDX-License-Identifier: Apache-2.0
"""Functions on whole DataProtos: rows up to a multiple of a number and back, the batch dimension folded and unfolded,
the rows of all ranks on every rank; and the result of a call that has not been waited for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol.proto import DataProto, map_columns

Resolve = Callable[[Sequence[Any]], list[Any]]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows, cyclically, until `size_divisor` divides the number of rows.
    Returns the data (the same object if there is nothing to add, or no row to copy) and the number of rows added."""
    if size_divisor < 1:
        raise ProtocolError(
            f"pad_dataproto_to_divisor: got divisor {size_divisor}, expected 1 or more"
        )
    rows = len(data)
    pad_size = -rows % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows, as a view."""
    if not 0 <= pad_size <= len(data):
        raise ProtocolError(
            f"unpad_dataproto: got pad_size {pad_size}, expected 0 to {len(data)}, the rows there are"
        )
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(B, ...) as (new_batch_size, B / new_batch_size, ...): consecutive rows become one row; views.
    For work on groups that must stay together, such as the responses to one prompt."""
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise ProtocolError(
            f"fold_batch_dim: got {rows} rows into {new_batch_size}, expected a divisor of the rows"
        )
    return _with_leading_dims(data, 1, (new_batch_size, rows // new_batch_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Inverse of `fold_batch_dim`: the first `batch_dims` dimensions of every column become one."""
    tensors = () if data.batch is None else data.batch.values()
    shapes = {
        tuple(value.shape[:batch_dims]) for value in [*tensors, *data.non_tensor_batch.values()]
    }
    if batch_dims < 1 or len(shapes) > 1 or any(len(shape) < batch_dims for shape in shapes):
        expected = f"the same first {batch_dims} dimensions in every column"
        raise ProtocolError(
            "unfold_batch_dim", got=f"leading shapes {sorted(shapes)}", expected=expected
        )
    rows = torch.Size(next(iter(shapes), (len(data),))).numel()
    return _with_leading_dims(data, batch_dims, (rows,))


def _with_leading_dims(data: DataProto, count: int, dims: tuple[int, ...]) -> DataProto:
    """The same numbers with other sizes `dims` in place of the first `count` dimensions of every column."""

    def reshaped(column: Any) -> Any:
        return column.reshape(*dims, *column.shape[count:])

    batch = None
    if data.batch is not None:
        batch = TensorDict(
            map_columns(data.batch, reshaped), batch_size=dims[:1], device=data.batch.device
        )
    arrays = {key: reshaped(array) for key, array in data.non_tensor_batch.items()}
    return DataProto(batch, arrays, dict(data.meta_info))


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace `data`'s rows by those of all ranks of the group, in rank order, in place.

    Every rank must call it. Numbers of rows may differ, zero included; columns may not. `meta_info` stays the caller's
    own.
    Raises ProtocolError: on every rank alike, if their columns differ in name, shape or dtype."""
    ranks: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(ranks, DataProto(data.batch, data.non_tensor_batch), group=process_group)
    layouts = []
    for part in ranks:
        # Keys of nested columns are tuples.
        columns = (
            () if part.batch is None else part.batch.items(include_nested=True, leaves_only=True)
        )
        shapes = {name: (tuple(column.shape[1:]), column.dtype) for name, column in columns}
        layouts.append((shapes, sorted(part.non_tensor_batch)))
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            found, wanted = (f"{columns}, {arrays}" for columns, arrays in (layout, layouts[0]))
            where = f"all_gather_data_proto: rank {rank}"
            raise ProtocolError(
                where, got=f"columns {found}", expected=f"those of rank 0, {wanted}"
            )
    gathered = DataProto.concat(ranks)
    data.non_tensor_batch = gathered.non_tensor_batch
    if data.batch is not None:
        batch, names = data.batch, layouts[0][0]
        data.batch = TensorDict({}, batch_size=gathered.batch.batch_size, device=batch.device)
        for name in names:
            data.batch[name] = gathered.batch[name].to(batch[name].device)


def resolve_results(futures: Sequence[Any]) -> list[Any]:
    """Wait for `concurrent.futures.Future`-like objects (those with a `result` method), in order."""
    return [future.result() for future in futures]


def get_all(futures: "Sequence[DataProtoFuture]") -> list[Any]:
    """What several futures of one backend give, waited for at once: the first that fails is raised whichever it is."""
    if not futures:
        return []
    # One that does not copy its rows must not be given rows that are only lent.
    careful = next((future for future in futures if future.rows_of is None), futures[0])
    outputs = iter(careful.resolve([handle for future in futures for handle in future.futures]))
    return [
        replace(one, futures=list(islice(outputs, len(one.futures))), resolve=list).get()
        for one in futures
    ]


@dataclass(frozen=True)
class DataProtoFuture:
    """Outputs to come, and what is to be done with them when they are there.

    group.method(data)  with blocking=False
      returns a DataProtoFuture      the workers compute
      .get()                         waits for every worker, collects their outputs
      passed on to another group     each rank gets a future of its chunk and resolves it where it runs,
                                     so the rows never pass through the driver"""

    collect_fn: Callable[[list[Any]], Any]  # makes one value of the list of outputs
    futures: Sequence[Any]  # one handle per worker that was called
    dispatch_fn: Callable[[Any], Any] | None = None  # applied to what was collected
    resolve: Resolve = (
        resolve_results  # waits for the handles and returns their values; each backend has its own
    )
    # Numbers of the outputs whose rows `collect_fn` joins, in order: a part of the rows is then taken without copying
    # the others. None: `collect_fn` does something else.
    rows_of: Sequence[int] | None = None
    # The part that is taken: chunk `number` of `count`, of that chunk the next, and so on.
    chunks: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def concat(data: Sequence[Any], resolve: Resolve = resolve_results) -> "DataProtoFuture":
        """A future of all rows of the outputs behind the handles `data`."""
        return DataProtoFuture(
            DataProto.concat, list(data), resolve=resolve, rows_of=range(len(data))
        )

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Futures of the parts that `get().chunk(chunks)` would give; waits for nothing."""
        return [replace(self, chunks=(*self.chunks, (number, chunks))) for number in range(chunks)]

    def get(self) -> Any:
        """Wait, collect and return; a worker's error is raised here."""
        outputs = self.resolve(self.futures)
        parts = (
            [outputs[number] for number in self.rows_of or ()]
            if self.chunks and self.dispatch_fn is None
            else []
        )
        if not parts or not all(isinstance(part, DataProto) for part in parts):
            output = self.collect_fn(outputs)
            output = output if self.dispatch_fn is None else self.dispatch_fn(output)
            for number, count in self.chunks:
                output = output.chunk(count)[number]
            return output
        wanted = np.arange(sum(map(len, parts)))
        for number, count in self.chunks:
            wanted = np.array_split(wanted, count)[number]
        start, end = (int(wanted[0]), int(wanted[-1]) + 1) if len(wanted) else (0, 0)
        views, first = [], 0
        # No part is left out: `meta_info` counts in a concatenation even where there are no rows.
        for part in parts:
            views.append(part.slice(max(0, start - first), max(0, end - first)))
            first += len(part)
        return DataProto.concat(views)
