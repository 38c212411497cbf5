# SPDX-License-Identifier: Apache-2.0
"""The ranks of one engine, seen from one of them, and their process groups.

Two views of the same ranks: `storage` says where parameters lie, `work` who computes what.

    storage   (pp, dp_replicate, tp, fsdp)     a parameter is cut by tp, and each part by fsdp = dp_shard x sp
    work      (pp, dp, sp, tp)                 dp = dp_replicate x dp_shard; the order of the ranks
    experts   (pp, dp_replicate, ep, edp)      those of a layer are cut by ep, and each part by edp = fsdp x tp / ep

Legend: N packed tokens, V vocabulary, D hidden size.
"""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quadriga.config.layout import Layout, RankPlace
from quadriga.engines.process_group import ALONE, Membership, ProcessGroup

STORAGE_NAMES = ("pp", "dp_replicate", "tp", "fsdp")
WORK_NAMES = ("pp", "dp", "sp", "tp")
EXPERT_NAMES = ("pp", "dp_replicate", "ep", "edp")


@dataclass(frozen=True)
class Processes:
    """The ranks of one engine, seen from one of them."""

    layout: Layout  # how they are arranged
    place: RankPlace  # of this one
    world: ProcessGroup  # all of them
    replicas: ProcessGroup  # those with other rows, at the same place otherwise
    # The meshes; None where every rank has everything.
    storage: DeviceMesh | None = None
    work: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @classmethod
    def arrange(cls, world: ProcessGroup, layout: Layout) -> "Processes":
        """Form the groups of a layout, meshes [pp, dp_replicate, tp, fsdp], [pp, dp, sp, tp] and
        [pp, dp_replicate, ep, edp]; every rank of the world calls it, in the same order of layouts."""
        place = layout.place(world.rank)
        if layout.is_whole:
            return cls(layout, place, world, world)
        # Roles with the same layout on the same ranks share their groups; those of an earlier meeting are gone.
        storage, work, experts = _meshes_of(layout, world.device.type, Membership.num_meetings)
        replicas = ProcessGroup(place.dp_rank, layout.dp_size, world.device, work.get_group("dp"))
        return cls(layout, place, world, replicas, storage, work, experts)

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group along one direction of `work`."""
        assert self.work is not None, "one rank has no meshes"
        return self.work.get_group(name)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding [V, D]."""
        return self.place.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head, [V, D] of a policy."""
        return self.place.pp == self.layout.pp - 1


ONE_PROCESS = Processes(Layout(), Layout().place(0), ALONE, ALONE)


@functools.lru_cache(maxsize=16)
def _meshes_of(
    layout: Layout, device_type: str, meeting: int
) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh | None]:
    ranks = torch.arange(layout.world_size).view(
        layout.pp, layout.dp_replicate, layout.fsdp, layout.tp
    )
    work, experts = (layout.pp, layout.dp_size, layout.sp, layout.tp), None
    if layout.ep > 1:
        divided = ranks.reshape(layout.pp, -1, layout.edp, layout.ep).transpose(2, 3)
        experts = DeviceMesh(device_type, divided, mesh_dim_names=EXPERT_NAMES)
    return (
        DeviceMesh(device_type, ranks.transpose(2, 3), mesh_dim_names=STORAGE_NAMES),
        init_device_mesh(device_type, work, mesh_dim_names=WORK_NAMES),
        experts,
    )
