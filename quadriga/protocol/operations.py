# SPDX-License-Identifier: Apache-2.0
"""Functions on whole DataProtos: rows up to a multiple of a number and back, the batch dimension folded and unfolded,
the rows of all ranks on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol.merge import concat_arrays
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

    Every rank must call it. Numbers of rows may differ, zero included; columns may not. `meta_info` stays the
    caller's own.

    Raises ProtocolError: on every rank alike, if their columns differ in name, shape or dtype.
    """
    batch = TensorDict({}, batch_size=[len(data)]) if data.batch is None else data.batch
    # Keys of nested columns are tuples; all ranks take the columns in one order.
    names = sorted(batch.keys(include_nested=True, leaves_only=True), key=str)
    layout = {name: (tuple(batch[name].shape[1:]), batch[name].dtype) for name in names}
    ranks: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(ranks, (len(data), layout, data.non_tensor_batch), group=process_group)
    _, first, first_arrays = ranks[0]
    for rank, (_, columns, arrays) in enumerate(ranks):
        if columns != first or arrays.keys() != first_arrays.keys():
            raise ProtocolError(
                f"all_gather_data_proto: rank {rank}: got columns {columns}, {sorted(arrays)}, "
                f"expected those of rank 0, {first}, {sorted(first_arrays)}"
            )
    counts = [rows for rows, _, _ in ranks]
    data.non_tensor_batch = concat_arrays([arrays for _, _, arrays in ranks])
    if data.batch is None or not any(counts):
        return
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and "gloo" not in dist.get_backend(process_group):
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    gathered = TensorDict({}, batch_size=[sum(counts)], device=batch.device)
    for name in names:
        column = batch[name]
        padded = column.new_zeros((max(counts), *column.shape[1:]), device=device)
        padded[: column.shape[0]] = column.to(device)
        # As bytes, so that every dtype travels on every backend.
        memory = padded.reshape(-1).view(torch.uint8)
        received = [torch.empty_like(memory) for _ in counts]
        dist.all_gather(received, memory, group=process_group)
        parts = zip(received, counts, strict=True)
        rows = [part.view(column.dtype).reshape(padded.shape)[:count] for part, count in parts]
        gathered[name] = torch.cat(rows).to(column.device)
    data.batch = gathered
