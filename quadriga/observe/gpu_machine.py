# SPDX-License-Identifier: Apache-2.0
"""Checks of a machine with GPUs before a run starts, for settings that would make it fail later.

They read environment variables, limits of the process and /dev/shm. None touches a GPU.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from quadriga.errors import ConfigError

GIB = 1 << 30
VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARED_MEMORY = Path("/dev/shm")
DRIVER = Path("/proc/driver/nvidia/version")
# NCCL and vLLM's queues need some 50 MiB of shared memory for each process.
LEAST_SHARED_BYTES_EACH = 64 << 20
# Below it, Ray moves its object store from shared memory to a disk.
ENOUGH_SHARED_BYTES = 8 * GIB
# Ray, NCCL and the threads of a process with a GPU open some hundred files.
LEAST_FILES_EACH = 1024
# Networks that read memory directly (InfiniBand, RoCE) lock the buffers of NCCL.
LEAST_LOCKED_BYTES = 1 * GIB


def visible_devices() -> list[str] | None:
    """Entries of CUDA_VISIBLE_DEVICES; None if it is not set, which shows all devices.

    Raises:
        ConfigError: a device occurs twice, so that two ranks would share it.
    """
    value = os.environ.get(VISIBLE)
    if value is None:
        return None
    devices = [entry.strip() for entry in value.split(",") if entry.strip()]
    # CUDA ignores the entries from the first invalid one on; -1 is the usual way to write "none".
    if "-1" in devices:
        devices = devices[: devices.index("-1")]
    if len(set(devices)) < len(devices):
        raise ConfigError(
            VISIBLE,
            got=repr(value),
            expected="each device once: two ranks cannot share one",
            fix="Remove the repeated entries, and set trainer.n_gpus_per_node to their number.",
        )
    return devices


def require_visible_devices() -> None:
    """Check that CUDA_VISIBLE_DEVICES, if it is set, names GPUs that ranks can use together.

    Raises:
        ConfigError: the variable hides all GPUs, repeats one, or names several MIG parts.
    """
    devices = visible_devices()
    if devices is None:
        return
    if not devices:
        raise ConfigError(
            VISIBLE,
            got=f"{os.environ[VISIBLE]!r}, which hides all GPUs",
            expected="the GPUs to use, such as 0,1",
            fix="Unset it to use all GPUs, or set trainer.device=cpu.",
        )
    parts = [device for device in devices if device.startswith("MIG-")]
    if len(parts) > 1:
        raise ConfigError(
            VISIBLE,
            got=f"{len(parts)} parts of GPUs (MIG)",
            expected="whole GPUs, or one part: NCCL does not connect parts",
            fix="Keep one of them, or switch MIG off.",
        )


def require_machine(num_processes: int) -> None:
    """Check that this machine has enough shared memory for processes with a GPU each.

    Args:
        num_processes: number of these processes on the machine.

    Raises:
        ConfigError: the processes would fail for lack of shared memory.
    """
    # A single process exchanges nothing with others.
    if num_processes < 2 or not SHARED_MEMORY.is_dir():
        return
    size = shutil.disk_usage(SHARED_MEMORY).total
    least = LEAST_SHARED_BYTES_EACH * num_processes
    if size < least:
        raise ConfigError(
            str(SHARED_MEMORY),
            got=f"{size >> 20} MiB for {num_processes} processes",
            expected=f"at least {least >> 20} MiB: NCCL and vLLM exchange data there",
            fix="Start the container with --ipc=host or --shm-size=16g.",
        )


def check_machine(device: str, num_processes: int, num_nodes: int) -> None:
    """Check this machine before a run starts worker processes, and print notices and warnings.

    Args:
        device: `trainer.device`.
        num_processes: number of worker processes on this machine.
        num_nodes: number of machines that take part.

    Raises:
        ConfigError: the list of devices is wrong, or a limit is too low.
    """
    uses_gpus = device.startswith("cuda")
    if device == "auto":
        # torch could tell, but loading it here would delay the first line of output. An empty list
        # of visible devices hides all GPUs; None shows all.
        uses_gpus = DRIVER.exists() and visible_devices() != []
    if not uses_gpus:
        num_cores = len(os.sched_getaffinity(0))
        if num_processes > num_cores:
            print(
                f"notice: {num_processes} worker processes on {num_cores} CPU cores, without GPUs. "
                "One process uses all cores and is faster: trainer.n_gpus_per_node=1 "
                "trainer.backend=local"
            )
        return
    require_visible_devices()
    require_machine(num_processes)
    for warning in warnings_of_machine(num_processes, num_nodes):
        print(f"warning: {warning}")


def warnings_of_machine(num_processes: int, num_nodes: int) -> Iterator[str]:
    """Yield warnings about limits that may slow a run down or end it later.

    Also raise this process's limit of open files if it is too low and the system allows that.

    Args:
        num_processes: number of processes with a GPU on this machine.
        num_nodes: number of machines that take part.
    """
    if num_processes > 1 and SHARED_MEMORY.is_dir():
        size = shutil.disk_usage(SHARED_MEMORY).total
        if size < ENOUGH_SHARED_BYTES:
            yield (
                f"{SHARED_MEMORY} has {size / GIB:.1f} GiB: Ray may keep its objects on a disk."
                " Start the container with --ipc=host or --shm-size=16g."
            )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # One share more, for the driver's process.
    least_files = LEAST_FILES_EACH * (num_processes + 1)
    if soft != resource.RLIM_INFINITY and soft < least_files:
        if hard == resource.RLIM_INFINITY or hard >= least_files:
            # A process may raise its soft limit up to the hard one. Its children inherit it.
            resource.setrlimit(resource.RLIMIT_NOFILE, (least_files, hard))
        else:
            yield (
                f"`ulimit -n` allows {hard} open files, which {num_processes} processes with a GPU"
                f" may exceed. Raise it to {least_files}."
            )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if num_nodes > 1 and locked != resource.RLIM_INFINITY and locked < LEAST_LOCKED_BYTES:
        yield (
            f"`ulimit -l` allows {locked >> 10} KiB of locked memory, too little for NCCL over"
            " InfiniBand. Set it to unlimited (--ulimit memlock=-1 of Docker)."
        )


def require_plain_segments(engine: str) -> None:
    """Refuse expandable segments of torch's allocator, for an engine whose process reads weights.

    To map memory of an expandable segment, the other process must take a file descriptor from this
    one, which the default profile of Docker forbids.

    Args:
        engine: name of the rollout engine, which is the other process.

    Raises:
        ConfigError: an environment variable turns expandable segments on.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            raise ConfigError(
                name,
                got=repr(value),
                expected=f"no expandable segments while {engine} has processes of its own,"
                " which cannot open this memory",
                fix="Remove expandable_segments:True.",
            )
