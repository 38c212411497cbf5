# SPDX-License-Identifier: Apache-2.0
"""Rows up to a multiple of a number and back again, and the batch dimension folded and unfolded."""

import torch
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol import columns
from quadriga.protocol.proto import DataProto


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows, cyclically, until `size_divisor` divides the number of rows.

    Returns:
        the padded data (the same object if nothing was missing, or if there is no row to copy), and how
        many rows were added.
    """
    if size_divisor < 1:
        raise ProtocolError("pad_dataproto_to_divisor", got=f"divisor {size_divisor}", expected="1 or more")
    rows = len(data)
    pad_size = -rows % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows, as a view."""
    if not 0 <= pad_size <= len(data):
        raise ProtocolError(
            "unpad_dataproto", got=f"pad_size {pad_size}", expected=f"0 to {len(data)}, the rows there are"
        )
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(B, ...) as (new_batch_size, B / new_batch_size, ...): consecutive rows become one row; views.

    For work on groups that must stay together, such as the samples of one prompt.
    """
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise ProtocolError(
            "fold_batch_dim", got=f"{rows} rows into {new_batch_size}", expected="a divisor of the rows"
        )
    group = rows // new_batch_size
    return DataProto(
        batch=None
        if data.batch is None
        else columns.map_columns(
            data.batch, lambda column: column.reshape(new_batch_size, group, *column.shape[1:]), new_batch_size
        ),
        non_tensor_batch={
            key: array.reshape(new_batch_size, group, *array.shape[1:]) for key, array in data.non_tensor_batch.items()
        },
        meta_info=dict(data.meta_info),
    )


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Inverse of `fold_batch_dim`: the first `batch_dims` dimensions of every column become one."""
    shapes = {
        tuple(value.shape[:batch_dims])
        for value in [*(() if data.batch is None else data.batch.values()), *data.non_tensor_batch.values()]
    }
    if batch_dims < 1 or len(shapes) > 1 or any(len(shape) < batch_dims for shape in shapes):
        raise ProtocolError(
            "unfold_batch_dim",
            got=f"leading shapes {sorted(shapes)}",
            expected=f"the same first {batch_dims} dimensions in every column",
        )
    rows = int(torch.Size(next(iter(shapes), (len(data),))).numel())
    return DataProto(
        batch=None if data.batch is None else _flatten(data.batch, batch_dims, rows),
        non_tensor_batch={
            key: array.reshape(rows, *array.shape[batch_dims:]) for key, array in data.non_tensor_batch.items()
        },
        meta_info=dict(data.meta_info),
    )


def _flatten(batch: TensorDict, batch_dims: int, rows: int) -> TensorDict:
    return columns.map_columns(batch, lambda column: column.reshape(rows, *column.shape[batch_dims:]), rows)
