# SPDX-License-Identifier: Apache-2.0
"""Process groups of training layouts and rollout groups in four processes, as NCCL would make them.

    python nccl_groups.py FOLDER

torch's own code makes the groups, with a class in the place of `ProcessGroupNCCL` that has NCCL's
rules. In a group that is bound to a device, torch makes every new group by splitting a
communicator, for which all ranks of the parent must come, members or not. In others each group of
NCCL makes a communicator when it is first used. Host tensors are refused, because the groups have
no backend for them.

Each rank writes to rankN.json how many communicators it would have, by layout, and its splits.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from quadriga.config import Layout
from quadriga.engines import process_group
from quadriga.engines.parallel.processes import Processes
from quadriga.rollout.group import RolloutGroup
from quadriga.single_controller import WorkerPlace
from tests.limits import SOON_S

RANKS = 4
LAYOUTS = {
    "replicas": Layout(dp_shard=4),
    "tensor": Layout(dp_shard=2, tp=2),
    "sequence": Layout(dp_shard=2, sp=2),
    "stages": Layout(tp=2, pp=2),
    "experts": Layout(dp_shard=2, tp=2, ep=2),
}


class Nccl(dist.ProcessGroupGloo):
    """A group of NCCL: counts communicators, and blocks where NCCL would."""

    # torch keeps the C++ part of a group only.
    living: ClassVar[list["Nccl"]] = []
    num_splits: ClassVar[int] = 0
    current_device: ClassVar[int] = 0

    class Options(SimpleNamespace):
        """Options that torch sets."""

        split_from: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        # A rank that waits in vain must not wait for the timeout of a run.
        super().__init__(store, rank, size, timedelta(seconds=SOON_S))
        self.living.append(self)
        if options.split_from is not None:
            options.split_from.split()
        store.set(f"device of {rank}", str(self.current_device))
        devices = [store.get(f"device of {other}").decode() for other in range(size)]
        if len(set(devices)) < size:
            raise RuntimeError(f"Duplicate GPU detected: {devices}")

    @property
    def supports_splitting(self) -> bool:
        return True

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make the communicator now; it is counted with the group."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.split()

    def split(self) -> None:
        """Wait for all ranks of the group, as `ncclCommSplit` does."""
        Nccl.num_splits += 1
        self.barrier().wait()


def install(rank: int) -> None:
    """Make torch see NCCL, and a GPU for each rank."""
    distributed_c10d.ProcessGroupNCCL = Nccl
    distributed_c10d._NCCL_AVAILABLE = True
    torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: RANKS
    torch.cuda.current_device = lambda: Nccl.current_device

    def set_device(device: torch.device) -> None:
        Nccl.current_device = device.index

    torch.cuda.set_device = set_device


def rank_main(rank: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    install(rank)
    port = int(Path(folder, "port").read_text())
    place = WorkerPlace(rank, RANKS, rank, RANKS, "127.0.0.1", port)
    found = {}
    world = process_group.join(place, device)
    for name, layout in LAYOUTS.items():
        before = len(Nccl.living)
        Processes.arrange(world, layout)
        found[name] = len(Nccl.living) - before
    before = len(Nccl.living)
    RolloutGroup(rank, RANKS, 2, device)
    found["rollout groups"] = len(Nccl.living) - before
    before = len(Nccl.living)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=2
    )
    found["megatron"] = len(Nccl.living) - before
    refusal = ""
    try:
        dist.group.WORLD.allreduce([torch.zeros(1)])
    except RuntimeError as error:
        refusal = str(error)
    result = {"communicators": found, "splits": Nccl.num_splits, "host tensors": refusal}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    process_group.leave(world)


if __name__ == "__main__":
    mp.start_processes(rank_main, (sys.argv[1],), RANKS, start_method="spawn")
