# SPDX-License-Identifier: Apache-2.0
"""Functions on DataProtos (padding, folding, gathering), and `DataProtoFuture`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol.proto import DataProto, map_rows

Resolve = Callable[[Sequence[Any]], list[Any]]
"""Waits for handles of outputs, and returns the outputs in the same order."""


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows, cyclically, until the divisor divides the number of rows.

    Args:
        data: the rows to pad.
        size_divisor: the padded number of rows is a multiple of it; 1 or more.

    Returns:
        The padded data, and the number of rows added. The data are the same object if nothing has
        to be added, or if there is no row to copy.

    Raises:
        ProtocolError: the divisor is below 1.
    """
    if size_divisor < 1:
        raise ProtocolError(
            f"pad_dataproto_to_divisor: got divisor {size_divisor}, expected 1 or more"
        )
    num_rows = len(data)
    pad_size = -num_rows % size_divisor
    if pad_size == 0:
        return data, 0
    rows = torch.arange(num_rows + pad_size) % num_rows
    return data.select_idxs(rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows; the others are views.

    Raises:
        ProtocolError: `pad_size` is negative, or above the number of rows.
    """
    num_rows = len(data)
    if not 0 <= pad_size <= num_rows:
        raise ProtocolError(
            f"unpad_dataproto: got pad_size {pad_size}, expected 0 to {num_rows}, "
            "the number of rows"
        )
    return data.slice(0, num_rows - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape (B, ...) to (new_batch_size, B / new_batch_size, ...), as views.

    Consecutive rows become one row, for work on groups that must stay together, such as the
    responses to one prompt.

    Raises:
        ProtocolError: `new_batch_size` does not divide the number of rows.
    """
    num_rows = len(data)
    if new_batch_size < 1 or num_rows % new_batch_size:
        raise ProtocolError(
            f"fold_batch_dim: got {num_rows} rows to fold into {new_batch_size}, "
            "expected a number that divides them"
        )
    group_size = num_rows // new_batch_size
    return _with_leading_dims(data, 1, (new_batch_size, group_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Merge the first `batch_dims` dimensions of every column; the inverse of `fold_batch_dim`.

    Raises:
        ProtocolError: the columns differ in these dimensions, or do not have as many.
    """
    columns: list[Any] = list(data.non_tensor_batch.values())
    if data.batch is not None:
        columns += data.batch.values()
    # Leading dimensions of the columns, which must be a single shape.
    shapes = {tuple(column.shape[:batch_dims]) for column in columns}
    if batch_dims < 1 or len(shapes) > 1 or any(len(shape) < batch_dims for shape in shapes):
        raise ProtocolError(
            "unfold_batch_dim",
            got=f"leading shapes {sorted(shapes)}",
            expected=f"the same first {batch_dims} dimensions in every column",
        )
    # Without columns there are no rows either.
    shape = next(iter(shapes), (0,))
    num_rows = torch.Size(shape).numel()
    return _with_leading_dims(data, batch_dims, (num_rows,))


def _with_leading_dims(data: DataProto, count: int, dims: tuple[int, ...]) -> DataProto:
    """Reshape the first `count` dimensions of every column to `dims`."""

    def reshape(column: Any) -> Any:
        """Reshape a tensor or an array."""
        return column.reshape(*dims, *column.shape[count:])

    return map_rows(data, reshape, reshape, dims[0])


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace the rows of `data` by those of all ranks, in rank order, in place.

    Every rank of the group must call it. The ranks may have different numbers of rows, zero
    included, but must have the same columns. `meta_info` is not gathered, and stays as it is.

    Args:
        data: the rows of this rank; gets those of all ranks.
        process_group: ranks to gather from; None means all ranks.

    Raises:
        ProtocolError: the ranks' columns differ in name, row shape or dtype. Every rank raises it.
    """
    parts: list[Any] = [None] * dist.get_world_size(process_group)
    # Without `meta_info`, which ranks may have differently.
    local_part = DataProto(data.batch, data.non_tensor_batch)
    dist.all_gather_object(parts, local_part, group=process_group)

    # Every rank compares the columns of all ranks, so that all of them raise or none does.
    layouts = [_column_layout(part) for part in parts]
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            columns, arrays = layout
            first_columns, first_arrays = layouts[0]
            raise ProtocolError(
                f"all_gather_data_proto: rank {rank}",
                got=f"columns {columns}, {arrays}",
                expected=f"those of rank 0, {first_columns}, {first_arrays}",
            )

    gathered = DataProto.concat(parts)
    data.non_tensor_batch = gathered.non_tensor_batch
    if data.batch is not None:
        # Gathered tensors arrive on the CPU; move each column to the device that it had.
        batch = data.batch
        column_names, _ = layouts[0]
        data.batch = TensorDict({}, batch_size=gathered.batch.batch_size, device=batch.device)
        for name in column_names:
            data.batch[name] = gathered.batch[name].to(batch[name].device)


def _column_layout(data: DataProto) -> tuple[dict[Any, Any], list[str]]:
    """Row shape and dtype of each tensor column, and the names of the other columns."""
    tensors = {}
    if data.batch is not None:
        # The keys of nested columns are tuples.
        for name, column in data.batch.items(include_nested=True, leaves_only=True):
            tensors[name] = (tuple(column.shape[1:]), column.dtype)
    return tensors, sorted(data.non_tensor_batch)


def resolve_results(futures: Sequence[Any]) -> list[Any]:
    """Wait for handles, and return their outputs.

    Args:
        futures: futures, or objects with a method `future()`, such as Ray's references.
    """
    results = []
    for future in futures:
        if not hasattr(future, "result"):
            future = future.future()
        results.append(future.result())
    return results


def get_all(futures: "Sequence[DataProtoFuture]") -> list[Any]:
    """Wait for several futures of one backend together.

    Returns:
        Their values. The first error of any of them is raised.
    """
    if not futures:
        return []
    # One future's `resolve` waits for the handles of all futures in one call. It must suit each:
    # - Outputs of a future with `rows_of` may be lent (see `protocol.memory`): `get` concatenates
    #   them, which copies lent rows. So its `resolve` may lend.
    # - Outputs of a future without `rows_of` may be kept. So its `resolve` never lends, and suits
    #   all futures.
    resolves = (future.resolve for future in futures if future.rows_of is None)
    resolve = next(resolves, futures[0].resolve)
    handles = [handle for future in futures for handle in future.futures]
    outputs = iter(resolve(handles))

    values = []
    for future in futures:
        outputs_of_future = list(islice(outputs, len(future.futures)))
        # The outputs take the place of the handles, so there is nothing to wait for.
        resolved = replace(future, futures=outputs_of_future, resolve=list)
        values.append(resolved.get())
    return values


@dataclass(frozen=True)
class DataProtoFuture:
    """Outputs of a call in progress, with the functions to apply to them.

    group.method(data)  with blocking=False
      returns a DataProtoFuture      the workers compute
      .get()                         waits for every worker, collects their outputs
      passed on to another group     each rank gets a future of its chunk and resolves it where it
                                     runs, so the rows never pass through the driver

    Attributes:
        collect_fn: makes a single value of the list of outputs.
        futures: a handle for each worker that was called.
        dispatch_fn: applied to the collected value, before chunks are taken. None: nothing is
            applied.
        resolve: waits for the handles and returns the outputs.
        rows_of: which outputs `collect_fn` concatenates, as their numbers in the list, in order. A
            chunk can then be taken without copying the other rows. None: `collect_fn` does
            something else.
        chunks: the chunk to return, as pairs (number of the chunk, number of chunks): the first
            pair divides all rows, the next one the chunk that the first has taken, and so on.
            Empty: the whole value.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: Sequence[Any]
    dispatch_fn: Callable[[Any], Any] | None = None
    resolve: Resolve = resolve_results
    rows_of: Sequence[int] | None = None
    chunks: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def concat(data: Sequence[Any], resolve: Resolve = resolve_results) -> "DataProtoFuture":
        """Make a future of the concatenated rows of several outputs.

        Args:
            data: handles of DataProtos.
            resolve: waits for the handles.
        """
        return DataProtoFuture(
            DataProto.concat, list(data), resolve=resolve, rows_of=range(len(data))
        )

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Make futures of the parts of `get().chunk(chunks)`, without waiting."""
        return [replace(self, chunks=(*self.chunks, (part, chunks))) for part in range(chunks)]

    def get(self) -> Any:
        """Wait for the outputs and return the value; raise the error of a worker."""
        outputs = self.resolve(self.futures)
        # If only a chunk of concatenated rows is wanted, the other rows are not copied. `rows_of`
        # holds numbers of outputs.
        parts = []
        if self.chunks and self.dispatch_fn is None:
            parts = [outputs[number] for number in self.rows_of or ()]
        if parts and all(isinstance(part, DataProto) for part in parts):
            return self._concat_chunk(parts)

        output = self.collect_fn(outputs)
        if self.dispatch_fn is not None:
            output = self.dispatch_fn(output)
        for number, count in self.chunks:
            output = output.chunk(count)[number]
        return output

    def _concat_chunk(self, parts: list[DataProto]) -> DataProto:
        """Concatenate only the rows of this future's chunk.

        Args:
            parts: the outputs whose rows `collect_fn` would concatenate, in order.
        """
        # Divide the row numbers as `DataProto.chunk` divides rows. They stay consecutive.
        rows = np.arange(sum(map(len, parts)))
        for number, count in self.chunks:
            rows = np.array_split(rows, count)[number]
        start = int(rows[0]) if len(rows) else 0
        end = start + len(rows)

        views = []
        first_row = 0  # number of the part's first row among the rows of all parts
        # Parts without a row in the chunk are included, because their `meta_info` is merged too.
        for part in parts:
            views.append(part.slice(max(0, start - first_row), max(0, end - first_row)))
            first_row += len(part)
        return DataProto.concat(views)
