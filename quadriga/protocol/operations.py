# SPDX-License-Identifier: Apache-2.0
"""Functions on whole DataProtos: rows up to a multiple of a number and back, the batch dimension folded and unfolded,
the rows of all ranks on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol.proto import DataProto, map_columns


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows, cyclically, until `size_divisor` divides the number of rows.

    Returns the data (the same object if there is nothing to add, or no row to copy) and the number of rows added.
    """
    if size_divisor < 1:
        raise ProtocolError(f"pad_dataproto_to_divisor: got divisor {size_divisor}, expected 1 or more")
    rows = len(data)
    pad_size = -rows % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows, as a view."""
    if not 0 <= pad_size <= len(data):
        raise ProtocolError(f"unpad_dataproto: got pad_size {pad_size}, expected 0 to {len(data)}, the rows there are")
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(B, ...) as (new_batch_size, B / new_batch_size, ...): consecutive rows become one row; views.

    For work on groups that must stay together, such as the responses to one prompt.
    """
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise ProtocolError(f"fold_batch_dim: got {rows} rows into {new_batch_size}, expected a divisor of the rows")
    return _with_leading_dims(data, 1, (new_batch_size, rows // new_batch_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Inverse of `fold_batch_dim`: the first `batch_dims` dimensions of every column become one."""
    tensors = () if data.batch is None else data.batch.values()
    shapes = {tuple(value.shape[:batch_dims]) for value in [*tensors, *data.non_tensor_batch.values()]}
    if batch_dims < 1 or len(shapes) > 1 or any(len(shape) < batch_dims for shape in shapes):
        raise ProtocolError(
            f"unfold_batch_dim: got leading shapes {sorted(shapes)}, expected the same first {batch_dims} dimensions "
            "in every column"
        )
    rows = torch.Size(next(iter(shapes), (len(data),))).numel()
    return _with_leading_dims(data, batch_dims, (rows,))


def _with_leading_dims(data: DataProto, count: int, dims: tuple[int, ...]) -> DataProto:
    """The same numbers with other sizes `dims` in place of the first `count` dimensions of every column."""

    def reshaped(column: Any) -> Any:
        return column.reshape(*dims, *column.shape[count:])

    batch = None
    if data.batch is not None:
        batch = TensorDict(map_columns(data.batch, reshaped), batch_size=dims[:1], device=data.batch.device)
    arrays = {key: reshaped(array) for key, array in data.non_tensor_batch.items()}
    return DataProto(batch, arrays, dict(data.meta_info))


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace `data`'s rows by those of all ranks of the group, in rank order, in place.

    Every rank must call it. Numbers of rows may differ, zero included; columns may not. `meta_info` stays the caller's
    own.

    Raises ProtocolError: on every rank alike, if their columns differ in name, shape or dtype.
    """
    ranks: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(ranks, DataProto(data.batch, data.non_tensor_batch), group=process_group)
    layouts = []
    for part in ranks:
        # Keys of nested columns are tuples.
        columns = () if part.batch is None else part.batch.items(include_nested=True, leaves_only=True)
        shapes = {name: (tuple(column.shape[1:]), column.dtype) for name, column in columns}
        layouts.append((shapes, sorted(part.non_tensor_batch)))
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            found, wanted = (f"{columns}, {arrays}" for columns, arrays in (layout, layouts[0]))
            raise ProtocolError(
                f"all_gather_data_proto: rank {rank}: got columns {found}, expected those of rank 0, {wanted}"
            )
    gathered = DataProto.concat(ranks)
    data.non_tensor_batch = gathered.non_tensor_batch
    if data.batch is not None:
        batch, names = data.batch, layouts[0][0]
        data.batch = TensorDict({}, batch_size=gathered.batch.batch_size, device=batch.device)
        for name in names:
            data.batch[name] = gathered.batch[name].to(batch[name].device)
