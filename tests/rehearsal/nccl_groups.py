# SPDX-License-Identifier: Apache-2.0
"""Process groups of training layouts and rollout groups in four processes, as NCCL would make them.

    python nccl_groups.py FOLDER

torch's own code makes the groups, with the class `Nccl` in the place of `ProcessGroupNCCL`.

Each rank writes to rankN.json how many communicators it would have, by layout, and its splits.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state

from quadriga.config import Layout
from quadriga.engines import process_group
from quadriga.engines.parallel.processes import Processes
from quadriga.rollout.group import RolloutGroup
from quadriga.single_controller import WorkerPlace
from tests.rehearsal.nccl import Nccl, replace_nccl

RANKS = 4
LAYOUTS = {
    "replicas": Layout(dp_shard=4),
    "tensor": Layout(dp_shard=2, tp=2),
    "sequence": Layout(dp_shard=2, sp=2),
    "stages": Layout(tp=2, pp=2),
    "experts": Layout(dp_shard=2, tp=2, ep=2),
}


def install(rank: int) -> None:
    """Make torch see NCCL, and a GPU for each rank."""
    replace_nccl()
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
