# SPDX-License-Identifier: Apache-2.0
"""The workers of a command line of docs/first_gpu_run.md, up to their process groups, on eight claimed GPUs.

    python -m tests.rehearsal.line_groups NUMBER

NUMBER is that of the `quadriga train` line. Placement, pools, devices, layouts and groups are those of
a run: the page's own configuration starts the worker groups of its roles on Ray, and each rank chooses
its device and joins its groups as `init_model` does. There is no model and no engine. NCCL is the class of
nccl.py. Prints what each rank of each role found.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any

import ray
import torch.distributed as dist
from torch.distributed import distributed_c10d

from quadriga.config import load_config
from quadriga.config.placement import ACTOR, rollout_group_size
from quadriga.rollout.group import RolloutGroup
from quadriga.single_controller import Dispatch, register
from quadriga.single_controller.ray.cluster import cluster
from quadriga.trainer.build import start_workers
from quadriga.trainer.roles import Needs, Role
from quadriga.workers import ActorRolloutRefWorker, RolloutWorker, base
from tests.first_gpu_run import command_lines
from tests.rehearsal.nccl import Nccl, replace_nccl
from tests.rehearsal.stand_in import StandIn

NUM_GPUS = 8
# The stand-in is taken back when its context manager is garbage.
INSTALLED: list[Any] = []


def enter() -> None:
    """Put a GPU into this process, with the rules of NCCL and without its collectives."""
    installed = StandIn(num_devices=1).installed()
    installed.__enter__()
    INSTALLED.append(installed)
    dist.init_process_group = distributed_c10d.init_process_group
    replace_nccl()
    Nccl.current_device = int(os.environ["CUDA_VISIBLE_DEVICES"])
    base.warn_about_unequal_devices = lambda world, device: None


def facts(rollout_ranks: tuple[int, ...]) -> dict[str, Any]:
    """What this rank found; `rollout_ranks` are those of its rollout group."""
    return {
        "gpu": Nccl.current_device,
        "communicators": sum(group.size() > 1 for group in Nccl.living),
        "groups": len(Nccl.living),
        "splits": Nccl.num_splits,
        "rollout group": rollout_ranks,
    }


class TrainingRank(ActorRolloutRefWorker):
    """A rank that trains, and generates if its role does."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self) -> dict[str, Any]:
        enter()
        self.join(self.section, self.section.fsdp_config, ACTOR)
        if self.section.strategy == "megatron":
            megatron = import_module("quadriga.engines.megatron.engine")
            megatron.form_groups(self.processes, None)
        size = rollout_group_size(self.config)
        rollout_ranks = ()
        if self.has_rollout and size > 1:
            rollout_ranks = RolloutGroup(self.rank, self.world_size, size, self.device).ranks
        layout = self.processes.layout
        sizes = {"pp": layout.pp, "fsdp": layout.fsdp, "tp": layout.tp, "ep": layout.ep}
        return facts(rollout_ranks) | {"layout": sizes, "device": str(self.device)}


class RolloutRank(RolloutWorker):
    """A rank that generates with weights of another pool."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self) -> dict[str, Any]:
        enter()
        device = base.choose_device(self.config.trainer.device, self.local_rank)
        return facts(()) | {"device": str(device)}


if __name__ == "__main__":
    ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    config = load_config(command_lines("quadriga train")[int(sys.argv[1])]).config
    classes = {Role.Actor: TrainingRank, Role.Rollout: RolloutRank}
    with cluster({"num_gpus": NUM_GPUS, "num_cpus": NUM_GPUS}, NUM_GPUS):
        team = start_workers(config, None, Needs.of(config), classes)
        team.await_start()
        found = {role: group.meet() for role, group in team.groups.items()}
        team.end()
    print(json.dumps(found))
