# SPDX-License-Identifier: Apache-2.0
"""The CPU of this machine as the device of a plan, with its speed measured."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from quadriga.models.flops import peak_flops
from quadriga.planning.devices import CPU, Devices

_COPY_NUMBERS = 1 << 25
_MEASURED_S = 0.5  # seconds of products, and again of copies
_SENT_NUMBERS = 1 << 22  # of a tensor that ranks gather
_NUM_GATHERED = 8
_TIMEOUT = timedelta(seconds=60)


def measured_cpu(
    count: int,
    dtype: str,
    available_bytes: float,
    *,
    packs_narrow: bool,
) -> Devices:
    """Measure matrix products and memory copies with all cores, for a second.

    Args:
        count: number of ranks, which share the cores and the memory.
        dtype: dtype that computes.
        available_bytes: memory that all ranks together can get.
        packs_narrow: whether the rollout's copy of the layers' weights is in `dtype`. Otherwise it
            is in float32.

    Returns:
        The devices; each rank has its share of the figures.
    """
    # The best of many measurements: other programs only make them slower.
    device = torch.device("cpu")
    flops = 0.0
    end = time.perf_counter() + _MEASURED_S
    while time.perf_counter() < end:
        flops = max(flops, peak_flops(device, getattr(torch, dtype)))
    source = torch.ones(_COPY_NUMBERS)
    target = torch.empty_like(source)
    fastest_s = float("inf")
    end = time.perf_counter() + _MEASURED_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        target.copy_(source)
        fastest_s = min(fastest_s, time.perf_counter() - start)
    # A copy reads and writes each number.
    bytes_per_s = 2 * source.nbytes / fastest_s / count
    link_bytes_per_s = bytes_per_s
    if count > 1:
        link_bytes_per_s = _gathered_bytes_per_s()
    num_threads = torch.get_num_threads()
    return Devices(
        name=CPU,
        count=count,
        memory_bytes=available_bytes / count,
        flops=flops / count,
        bytes_per_s=bytes_per_s,
        link_bytes_per_s=link_bytes_per_s,
        source=f"measured: {dtype} products and copies with {num_threads} threads",
        packed_itemsize=getattr(torch, dtype).itemsize if packs_narrow else 4,
    )


def _gathered_bytes_per_s() -> float:
    """Measure the bytes per second of tensors that two ranks gather from each other with Gloo.

    The ranks are two threads of this process: Gloo sends in the same way between processes.
    """
    store = dist.HashStore()
    shard = torch.ones(_SENT_NUMBERS // 2)

    def gather(rank: int) -> float:
        """Shortest time of a rank's calls."""
        group = dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)
        shards = [torch.empty_like(shard), torch.empty_like(shard)]
        fastest_s = float("inf")
        for _ in range(_NUM_GATHERED):
            start = time.perf_counter()
            group.allgather([shards], [shard]).wait()
            fastest_s = min(fastest_s, time.perf_counter() - start)
        return fastest_s

    with ThreadPoolExecutor(2) as threads:
        fastest_s = max(threads.map(gather, range(2)))
    return 4 * _SENT_NUMBERS / fastest_s
