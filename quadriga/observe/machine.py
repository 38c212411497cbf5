# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine: cores, memory, and the data type that its hardware multiplies."""

import ctypes
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from quadriga.errors import PeerLostError

GIB = 1024**3
_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
# CPU flags (Linux names) of units that multiply matrices of 16 bits: Intel and AMD, then Arm.
BF16_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
FP16_CPU_FLAGS = ("amx_fp16", "avx512_fp16", "asimdhp")


@dataclass(frozen=True, slots=True)
class Choice:
    """A data type, and the reason for it as text that can be printed."""

    value: torch.dtype
    reason: str


def choose_dtype(requested: str, device: torch.device | str) -> Choice:
    """Choose the data type of the compute weights.

    Args:
        requested: "auto" (bfloat16 if the hardware multiplies it, else float32), "bfloat16",
            "float16" or "float32".
        device: the device of the weights.

    Returns:
        The data type and the reason for it.
    """
    device = torch.device(device)
    if requested == "float32":
        return Choice(torch.float32, "float32: asked for")
    # `fast` and `slow` say why the 16-bit type is fast or slow on the device.
    fast = ""
    if device.type == "cpu":
        units = FP16_CPU_FLAGS if requested == "float16" else BF16_CPU_FLAGS
        flags = (_field(_CPUINFO, "flags") or _field(_CPUINFO, "Features")).split()
        unit = next((flag for flag in units if flag in flags), None)
        limit = cpu_limit()
        is_fast = unit is not None and not limit
        fast = f"this CPU multiplies it in hardware ({unit})"
        slow = limit or f"this CPU has none of {', '.join(units)}"
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        # Emulated bfloat16 is slower than float32, so it does not count.
        with torch.cuda.device(device):
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        fast = f"{name} multiplies it in hardware"
        slow = f"{name} has no bfloat16 units"
    else:
        is_fast = False
        slow = f"nothing is known about bfloat16 on {device.type} devices"

    warning = "" if is_fast else f" (slow here: float32: {slow})"
    if requested == "float16":
        # Only a CPU may lack units for float16.
        if device.type != "cpu":
            warning = ""
        return Choice(torch.float16, f"float16: asked for{warning}")
    if requested == "bfloat16":
        return Choice(torch.bfloat16, f"bfloat16: asked for{warning}")
    if is_fast:
        return Choice(torch.bfloat16, f"bfloat16: {fast}")
    return Choice(torch.float32, f"float32: {slow}")


def cpu_limit() -> str:
    """The setting that makes this CPU stand in for an older one; empty if there is none.

    `ATEN_CPU_CAPABILITY` limits the instructions that torch's operators use. Everything else that
    depends on instructions of the CPU asks this function.
    """
    capability = os.environ.get("ATEN_CPU_CAPABILITY", "")
    return f"ATEN_CPU_CAPABILITY={capability}" if capability in ("avx2", "default") else ""


def resident_bytes() -> tuple[int, int]:
    """Memory of this process in RAM, and its maximum so far; without /proc (macOS) the maximum twice."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    status = Path("/proc/self/status")
    return _field_bytes(status, "VmRSS", peak), _field_bytes(status, "VmHWM", peak)


def release_free_memory() -> bool:
    """Return memory that the C library (glibc) and torch's GPU allocator do not use to the system.

    Training and generation allocate in different patterns. Without this each would leave gaps that
    the other cannot use, and the resident memory of a run would grow. An engine such as vLLM has
    another GPU allocator, which cannot use memory that torch's allocator holds.

    Returns:
        Whether the C library returned memory.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def num_usable_cores() -> int:
    """Number of CPU cores that this process may use, by its affinity and its control group."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if not quota:
        # Version 1 of the interface; a quota of -1 is none.
        quota = _read(_CGROUP / "cpu/cpu.cfs_quota_us")
        period = _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_bytes() -> int:
    """Memory that this process can get without swapping, from the machine and its control group."""
    free = _field_bytes(Path("/proc/meminfo"), "MemAvailable", _physical_bytes())
    limit, used = _memory_of_control_group()
    if limit is not None and used is not None:
        free = min(free, limit - used)
    return free


def _memory_of_control_group() -> tuple[int | None, int | None]:
    """Limit and use of the control group's memory, in bytes, by version 2 or 1 of the interface."""
    files = [_CGROUP / "memory.max", _CGROUP / "memory.current"]
    if not files[0].exists():
        folder = _CGROUP / "memory"
        files = [folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"]
    texts = [_read(file) for file in files]
    limit, used = (int(text) if text.isdigit() else None for text in texts)
    return limit, used


def is_in_memory(folder: Path) -> bool:
    """Whether a folder is on a file system in memory, by the kernel's list of mounts.

    False if the system has no such list.
    """
    place = folder.resolve()
    longest = -1
    kind = ""
    for line in _read(Path("/proc/self/mounts")).splitlines():
        _, mount_point, mounted_kind, *_ = line.split()
        # The longest mount point counts; of two mounts at the same point the later one hides the first.
        if place.is_relative_to(mount_point) and len(mount_point) >= longest:
            longest = len(mount_point)
            kind = mounted_kind
    return kind in ("tmpfs", "ramfs")


def describe_machine() -> str:
    """A line for logs and reports: cores, memory, accelerators, system, versions."""
    cpu = _field(_CPUINFO, "model name") or platform.processor() or platform.machine()
    num_cores = num_usable_cores()
    num_bytes = _physical_bytes()
    limit, _ = _memory_of_control_group()
    if limit is not None:
        num_bytes = min(num_bytes, limit)
    parts = [
        f"{num_cores} core{'s' if num_cores != 1 else ''} of {cpu} ({torch.backends.cpu.get_cpu_capability()})",
        f"{num_bytes / GIB:.0f} GiB memory",
        describe_gpus(),
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}",
    ]
    return ", ".join(parts)


def describe_numerics() -> str:
    """CPU, kernels, threads, accelerator and torch: what the last bits of results depend on."""
    cpu = _field(_CPUINFO, "model name") or platform.processor() or platform.machine()
    capability = torch.backends.cpu.get_cpu_capability()
    threads = f"{torch.get_num_threads()} threads"
    return f"{cpu} ({capability}), {threads}, {describe_gpus()}, torch {torch.__version__}"


def describe_gpus() -> str:
    """Number, name and memory of the visible GPUs.

    A process that does not compute must not make a CUDA context, which takes half a gigabyte of the
    first GPU, and fails on one that admits a single process. It asks the driver's program instead.
    """
    if not torch.cuda.is_available():
        return "no GPU"
    count = torch.cuda.device_count()
    if torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(0)
        return f"{count} x {properties.name} with {properties.total_memory / GIB:.0f} GiB"
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            query, capture_output=True, encoding="utf-8", check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return f"{count} GPU{'s' if count != 1 else ''}"
    name, _, mebibytes = output.stdout.partition("\n")[0].rpartition(",")
    if not mebibytes.strip().isdigit():
        # GPUs that share the memory of the host have "[N/A]".
        return f"{count} x {name or 'GPU'}"
    return f"{count} x {name} with {int(mebibytes) / 1024:.0f} GiB"


def _physical_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _field_bytes(path: Path, key: str, default: int) -> int:
    """A number of bytes in one of the kernel's files, which counts in KiB; `default` if there is none."""
    field = _field(path, key)
    return int(field.split()[0]) * 1024 if field else default


def _field(path: Path, key: str) -> str:
    """First value of a key in one of the kernel's files of `key: value` lines; "" if there is none."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read(path: Path) -> str:
    """Text of a file of the kernel; "" if this system does not have it."""
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


@contextmanager
def taking_part(where: str) -> Iterator[None]:
    """Context manager for collectives of several ranks.

    Args:
        where: the collectives, for the error message.

    Raises:
        PeerLostError: a collective failed because another rank is gone.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLostError(
            where,
            got=str(error).strip().partition("\n")[0],
            expected="all ranks to take part",
            fix="Look for the error of another rank: it left this one alone.",
        ) from error
