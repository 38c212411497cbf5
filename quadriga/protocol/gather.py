# SPDX-License-Identifier: Apache-2.0
"""A DataProto's rows from all processes of a group to all processes of it."""

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol import merge
from quadriga.protocol.proto import DataProto


def _collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must lie for the group's backend: its accelerator, or the CPU for gloo."""
    if "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _leaves(data: DataProto) -> list[Any]:
    """Keys of all columns, those of nested TensorDicts as tuples, in an order that all processes share."""
    return [] if data.batch is None else sorted(data.batch.keys(include_nested=True, leaves_only=True), key=str)


def _facts(data: DataProto) -> dict[str, Any]:
    """What the other processes must know before the tensors move."""
    layout = {key: (tuple(data.batch[key].shape[1:]), data.batch[key].dtype) for key in _leaves(data)}
    return {"rows": len(data), "layout": layout, "arrays": data.non_tensor_batch}


def _gather_column(column: torch.Tensor, rows: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Rows of one column of all processes. As bytes, so that every dtype travels on every backend."""
    device = _collective_device(group)
    size = max(rows)
    if size == 0:
        return column
    padded = column.new_zeros((size, *column.shape[1:]), device=device)
    padded[: column.shape[0]] = column.to(device)
    memory = padded.reshape(-1).view(torch.uint8)
    received = [torch.empty_like(memory) for _ in rows]
    dist.all_gather(received, memory, group=group)
    parts = [part.view(column.dtype).reshape(padded.shape)[:count] for part, count in zip(received, rows, strict=True)]
    return torch.cat(parts).to(column.device)


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace `data`'s rows by those of all processes of the group, in rank order, in place.

    Every process must call it. Numbers of rows may differ, zero included; columns may not. `meta_info`
    stays the caller's own.

    Raises:
        ProtocolError: on every process alike, if their columns differ in name, shape or dtype.
    """
    facts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(process_group))]
    dist.all_gather_object(facts, _facts(data), group=process_group)
    for rank, other in enumerate(facts):
        if other["layout"] != facts[0]["layout"] or other["arrays"].keys() != facts[0]["arrays"].keys():
            raise ProtocolError(
                f"all_gather_data_proto: rank {rank}",
                got=f"columns {other['layout']}, {sorted(other['arrays'])}",
                expected=f"those of rank 0, {facts[0]['layout']}, {sorted(facts[0]['arrays'])}",
            )
    rows = [other["rows"] for other in facts]
    data.non_tensor_batch = merge.concat_arrays([other["arrays"] for other in facts])
    if data.batch is not None:
        gathered = TensorDict({}, batch_size=[sum(rows)], device=data.batch.device)
        for key in _leaves(data):
            gathered[key] = _gather_column(data.batch[key], rows, process_group)
        data.batch = gathered
