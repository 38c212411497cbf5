# SPDX-License-Identifier: Apache-2.0
"""The state of an engine copied into memory that outlives the process, and read back on any layout.

    memory of a rank    | step | sum | chunk | chunk ... | step | sum | chunk | chunk ... |
                          slot of the even steps           slot of the odd steps

A copy is made in a thread, which calls no collective; the engine's next optimizer step waits for it. `step` is 0 until
the last byte is there: a rank that dies on the way leaves the slot of the step before as it was. As in a checkpoint,
what is equal on several ranks is copied by one of them.

Legend: [...] is the shape of a parameter, or of a rank's part of it.
"""

import mmap
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import DTensor

from quadriga.background import in_background
from quadriga.engines.checkpoint import State
from quadriga.engines.process_group import ProcessGroup
from quadriga.protocol.memory import SLOT_HEADER_BYTES, slot_of

ALIGNMENT = SLOT_HEADER_BYTES
_UNSHARDED = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


@dataclass(frozen=True)
class CopyPlan:
    """Which rank copies which chunks of a state, and where they lie in its memory.

    Attributes:
        listed: shape, dtype and chunks of each tensor.
        places: rank and first byte in a slot, of each chunk.
        slot_bytes: of each rank.
    """

    listed: Metadata
    places: dict[MetadataIndex, tuple[int, int]]
    slot_bytes: list[int]


class StateCopier:
    """Copies the state of an engine, again and again. All ranks of the engine make one together.

    Args:
        state: tensors [...] that the engine changes in place and never replaces.

    Attributes:
        plan: the same on all ranks.
    """

    def __init__(self, state: State, world: ProcessGroup) -> None:
        planner = DefaultSavePlanner(**_UNSHARDED)
        planner.set_up_planner(dict(state), is_coordinator=world.is_first)
        plans, listed = planner.create_global_plan(world.gather(planner.create_local_plan()))
        self.plan = CopyPlan(listed, {}, [])
        self._rank = world.rank
        self._pieces: list[tuple[int, torch.Tensor]] = []
        for rank, plan in enumerate(plans):
            end = SLOT_HEADER_BYTES
            for item in plan.items:
                self.plan.places[item.index] = rank, end
                if rank == world.rank:
                    tensor = state[item.index.fqn].detach()
                    self._pieces.append((end, tensor.to_local() if isinstance(tensor, DTensor) else tensor))
                size = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
                end += -(-size // ALIGNMENT) * ALIGNMENT
            self.plan.slot_bytes.append(end)

    def open(self, path: str) -> None:
        """Copy into this file, which has room for two slots. Raises OSError: it cannot be opened."""
        with open(path, "r+b") as file:
            self._memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def start(self, step: int) -> Future[None]:
        """Begin to copy the state as it is after this step (from 1). It must not change until the future is done."""
        slot = slot_of(self._memory, step)
        header = slot[:16].view(torch.int64)

        @torch.no_grad()
        def copy() -> None:
            header[0] = 0
            windows = [slot[start : start + one.nbytes].view(one.dtype).view(one.shape) for start, one in self._pieces]
            torch._foreach_copy_(windows, [piece for _, piece in self._pieces])
            header[1] = slot[SLOT_HEADER_BYTES:].view(torch.int64).sum()
            header[0] = step

        return in_background(copy, "state copy")


def read_copy(plan: CopyPlan, read: Callable[[int, int, int], Any], state: State) -> None:
    """Fill tensors [...] in place, whatever layout has copied them; of DTensors each rank reads the part that it holds.

    Args:
        plan: of the layout that has copied them.
        read: gives bytes of the slot of a rank; called with the rank, the first byte, and their number.
    """
    planner = DefaultLoadPlanner(**_UNSHARDED)
    planner.set_up_planner(dict(state), plan.listed, is_coordinator=True)
    for item in planner.create_local_plan().items:
        entry: Any = plan.listed.state_dict_metadata[item.storage_index.fqn]
        chunk, dtype = entry.chunks[item.storage_index.index], entry.properties.dtype
        rank, start = plan.places[item.storage_index]
        content = read(rank, start, chunk.sizes.numel() * dtype.itemsize)
        copied = torch.frombuffer(content, dtype=dtype).view(chunk.sizes)
        for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            copied = copied.narrow(dim, first, length)
        planner.resolve_tensor(item).detach().copy_(copied)
