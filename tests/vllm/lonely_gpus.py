# SPDX-License-Identifier: Apache-2.0
"""vLLM's communicators for CUDA in two processes that each see one GPU, which is not there.

    python lonely_gpus.py FOLDER

Gloo stands for NCCL, and the platform says that it is CUDA. vLLM's own coordinator makes the
groups and its queue in shared memory. Each rank writes to rankN.json the device on which a
tensor-parallel group starts, or the error: with vLLM's arguments as they are, and with those of a
rollout group.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import vllm.platforms
from vllm.platforms.interface import Platform, PlatformEnum

from quadriga.rollout.vllm.group import group_arguments

RANKS = 2


class FakeCuda(Platform):
    """A platform whose devices are those of CUDA_VISIBLE_DEVICES."""

    _enum = PlatformEnum.CUDA
    device_name = device_type = "cuda"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"

    @classmethod
    def is_fully_connected(cls, *_: Any) -> bool:
        return True

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return None

    @classmethod
    def has_device_capability(cls, *_: Any, **__: Any) -> bool:
        return False


def start_group(rank: int, arguments: dict[str, Any]) -> str:
    """Make vLLM's tensor-parallel group. Returns its device, or its error."""
    from vllm.distributed.device_communicators import (
        cuda_communicator,
        custom_all_reduce,
    )
    from vllm.distributed.parallel_state import GroupCoordinator, set_custom_all_reduce

    for module in (vllm.platforms, cuda_communicator, custom_all_reduce):
        module.current_platform = FakeCuda()
    # The library of kernels is not in the build for CPUs.
    custom_all_reduce.custom_ar = True
    custom_all_reduce.is_weak_contiguous = lambda tensor: True
    torch.cuda.can_device_access_peer = lambda one, other: True
    set_custom_all_reduce(not arguments.get("disable_custom_all_reduce", False))
    try:
        group = GroupCoordinator(
            group_ranks=[list(range(RANKS))],
            local_rank=0,
            torch_distributed_backend="gloo",
            use_device_communicator=True,
            use_message_queue_broadcaster=True,
            group_name="tp",
        )
    except (IndexError, AssertionError) as error:  # of the look-up of a peer, in any version
        return f"{type(error).__name__}: {error}"
    return str(group.device)


def rank_main(rank: int, folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(3 + rank)
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
    os.environ["VLLM_DISABLE_PYNCCL"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group: Any = SimpleNamespace(size=RANKS, device=torch.device("cuda", 0))
    torch.cuda.device_count = lambda: 1
    found = {
        "as they are": start_group(rank, {}),
        "of a group": start_group(rank, group_arguments(group)),
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    vllm.platforms.current_platform  # noqa: B018
    mp.start_processes(rank_main, (sys.argv[1],), RANKS, start_method="spawn")
