# SPDX-License-Identifier: Apache-2.0
"""The ranks of one engine, seen from one of them, and their process groups.

Three meshes of the same ranks: which parameters a rank holds, and which part of the work it does.

    storage   (pp, dp_replicate, tp, fsdp)   parameters: sharded by tp, then fsdp = dp_shard x sp
    work      (pp, dp, sp, tp)               dp = dp_replicate x dp_shard; the order of the ranks
    experts   (pp, dp_replicate, ep, edp)    experts: sharded by ep, then edp = fsdp x tp / ep

Legend: V vocabulary, D hidden size.
"""

import functools
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from quadriga.config.layout import Layout, RankPlace
from quadriga.engines.process_group import ALONE, Membership, ProcessGroup

STORAGE_NAMES = ("pp", "dp_replicate", "tp", "fsdp")
WORK_NAMES = ("pp", "dp", "sp", "tp")
EXPERT_NAMES = ("pp", "dp_replicate", "ep", "edp")


@dataclass(frozen=True)
class Processes:
    """The ranks of one engine, seen from one of them."""

    layout: Layout  # arrangement of the ranks
    place: RankPlace  # coordinates of this rank
    world: ProcessGroup  # all ranks
    replicas: ProcessGroup  # ranks that differ from this one in the rows only
    # Meshes; None if every rank holds and computes everything.
    storage: DeviceMesh | None = None
    work: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @classmethod
    def arrange(cls, world: ProcessGroup, layout: Layout) -> "Processes":
        """Form the process groups of a layout.

        All ranks of the world must call this for the same layouts, in the same order.

        Args:
            world: all ranks.
            layout: arrangement of the ranks.

        Returns:
            The ranks, with meshes [pp, dp_replicate, tp, fsdp], [pp, dp, sp, tp] and
            [pp, dp_replicate, ep, edp].
        """
        place = layout.place(world.rank)
        if layout.is_whole:
            # Each rank has the whole model, so all ranks are replicas.
            return cls(layout, place, world, world)
        # Roles with the same layout share their groups, unless the ranks have met again in between,
        # which makes older groups invalid.
        storage, work, experts = _meshes_of(layout, world.device.type, Membership.num_meetings)
        replicas = ProcessGroup(place.dp_rank, layout.dp_size, world.device, work.get_group("dp"))
        return cls(layout, place, world, replicas, storage, work, experts)

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group along one axis of `work`."""
        assert self.work is not None, "one rank has no meshes"
        return self.work.get_group(name)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding [V, D]."""
        return self.place.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head, such as [V, D] of a policy."""
        return self.place.pp == self.layout.pp - 1


ONE_PROCESS = Processes(Layout(), Layout().place(0), ALONE, ALONE)


@functools.lru_cache(maxsize=16)
def _meshes_of(
    layout: Layout, device_type: str, meeting: int
) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh | None]:
    """Create the meshes `storage`, `work` and `experts`, once for each layout and meeting."""
    make_mesh = functools.partial(_make_mesh, device_type, meeting)
    ranks = torch.arange(layout.world_size)
    # In the numbers of ranks, tp is the last axis. In the meshes of parameters, fsdp comes last.
    ranks = ranks.view(layout.pp, layout.dp_replicate, layout.fsdp, layout.tp)
    experts = None
    if layout.ep > 1:
        # Neighbouring ranks hold different experts. -1: number of replicas of the experts, which
        # may be larger than that of other weights; see `Layout.edp`.
        expert_ranks = ranks.reshape(layout.pp, -1, layout.edp, layout.ep).transpose(2, 3)
        experts = make_mesh(expert_ranks, EXPERT_NAMES)
    storage = make_mesh(ranks.transpose(2, 3), STORAGE_NAMES)
    work = make_mesh(ranks.view(layout.pp, layout.dp_size, layout.sp, layout.tp), WORK_NAMES)
    return storage, work, experts


def _make_mesh(
    device_type: str, meeting: int, ranks: torch.Tensor, names: tuple[str, ...]
) -> DeviceMesh:
    """Create a mesh. Axes with the same ranks, also of different meshes, share a process group.

    DeviceMesh alone would form a group, and with NCCL a communicator, for each axis.

    Args:
        device_type: type of the device.
        meeting: number of the meeting of the ranks, in which groups are formed; see `Membership`.
        ranks: [pp, ...], the ranks by their coordinates.
        names: names of the axes.
    """
    groups = []
    for axis in range(ranks.dim()):
        # All ranks must form all groups, in the same order. A rank is in one group of each axis.
        for row in ranks.movedim(axis, -1).flatten(0, -2).tolist():
            group = _group_of(tuple(row), meeting)
            if dist.get_rank() in row:
                groups.append(group)
    return DeviceMesh.from_group(groups, device_type, ranks.contiguous(), mesh_dim_names=names)


@functools.cache
def _group_of(ranks: tuple[int, ...], meeting: int) -> dist.ProcessGroup:
    """Form the process group of some ranks, once for each meeting."""
    # A rank outside of the group gets a placeholder, which it does not use.
    return cast(dist.ProcessGroup, dist.new_group(list(ranks)))
