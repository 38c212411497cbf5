# SPDX-License-Identifier: Apache-2.0
"""Process groups of training layouts and rollout groups in four processes, as NCCL would make them.

    python nccl_groups.py FOLDER

Gloo stands for NCCL, with two of its rules. In a group that is bound to a device, torch makes every
new group by splitting a communicator, which all ranks of the parent must do, members or not, for
groups of gloo as well. In others each group of NCCL makes a communicator when it is first used.

Each rank writes to rankN.json how many communicators it would have, by layout.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import device_mesh, distributed_c10d

from quadriga.config import Layout
from quadriga.engines import process_group
from quadriga.engines.parallel.processes import Processes
from quadriga.rollout.group import RolloutGroup
from quadriga.single_controller import WorkerPlace

RANKS = 4
LAYOUTS = {
    "replicas": Layout(dp_shard=4),
    "tensor": Layout(dp_shard=2, tp=2),
    "sequence": Layout(dp_shard=2, sp=2),
    "stages": Layout(tp=2, pp=2),
}
CUDA = torch.device("cuda", 0)


class Nccl:
    """Counts the communicators of this rank. `is_bound`: the default group has a device."""

    def __init__(self) -> None:
        self.is_bound = False
        self.num_communicators = 0
        self.num_splits_for_gloo = 0

    def install(self) -> None:
        start = dist.init_process_group

        def start_group(backend: str, *, device_id: Any = None, **options: Any) -> None:
            self.is_bound = device_id is not None
            self.num_communicators += 1
            start("gloo", **options)

        make_group = dist.new_group

        def new_group(
            ranks: list[int] | None = None, *args: Any, backend: Any = None, **options: Any
        ) -> Any:
            # Without a backend it is the default group's.
            is_gloo = "gloo" in str(backend)
            if self.is_bound:
                self.num_communicators += 1
                self.num_splits_for_gloo += is_gloo
            elif not is_gloo and (ranks is None or dist.get_rank() in ranks):
                self.num_communicators += 1
            return make_group(ranks, *args, backend="gloo", **options)

        dist.init_process_group = start_group
        for module in (dist, distributed_c10d, device_mesh):
            module.new_group = new_group
        torch.cuda.set_device = lambda device: None


def rank_main(rank: int, folder: str) -> None:
    nccl = Nccl()
    nccl.install()
    place = WorkerPlace(
        rank, RANKS, rank, RANKS, "127.0.0.1", int(Path(folder, "port").read_text())
    )
    found = {}
    world = process_group.join(place, CUDA)
    # Groups on a CPU, because tensors of the checks in the layouts are exchanged.
    on_host = process_group.ProcessGroup(rank, RANKS)
    for name, layout in LAYOUTS.items():
        before = nccl.num_communicators
        Processes.arrange(on_host, layout)
        found[name] = nccl.num_communicators - before
    before = nccl.num_communicators
    RolloutGroup(rank, RANKS, 2, CUDA)
    found["rollout groups"] = nccl.num_communicators - before
    found["for gloo"] = nccl.num_splits_for_gloo
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    process_group.leave(world)


if __name__ == "__main__":
    mp.start_processes(rank_main, (sys.argv[1],), RANKS, start_method="spawn")
