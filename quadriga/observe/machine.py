# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine: cores, memory, GPUs, and the dtype that its hardware multiplies."""

import ctypes
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from quadriga.errors import PeerLostError

GIB = 1024**3
_CPUINFO = Path("/proc/cpuinfo")
_CLEAR = Path("/proc/self/clear_refs")
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
    if requested == "float16" and device.type != "cpu":
        # Every accelerator multiplies float16; only a CPU may be slow at it.
        return Choice(torch.float16, "float16: asked for")
    cpu_flags = FP16_CPU_FLAGS if requested == "float16" else BF16_CPU_FLAGS
    is_fast, reason = _multiplies_16_bits(device, cpu_flags)
    if requested == "auto":
        if is_fast:
            return Choice(torch.bfloat16, f"bfloat16: {reason}")
        return Choice(torch.float32, f"float32: {reason}")
    warning = "" if is_fast else f" (slow here: {reason})"
    return Choice(getattr(torch, requested), f"{requested}: asked for{warning}")


def _multiplies_16_bits(device: torch.device, cpu_flags: Sequence[str]) -> tuple[bool, str]:
    """Whether a device multiplies a 16-bit dtype in hardware, and the reason.

    Args:
        device: the device. For a device other than the CPU the dtype is bfloat16.
        cpu_flags: for a CPU, flags of the units that multiply the dtype; one of them is enough.
    """
    if device.type == "cpu":
        limit = cpu_limit()
        if limit:
            return False, limit
        # x86 lists `flags`, Arm `Features`.
        flags = (_kernel_value(_CPUINFO, "flags") or _kernel_value(_CPUINFO, "Features")).split()
        for flag in cpu_flags:
            if flag in flags:
                return True, f"this CPU multiplies it in hardware ({flag})"
        return False, f"this CPU has none of {', '.join(cpu_flags)}"
    if device.type != "cuda":
        return False, f"nothing is known about bfloat16 on {device.type} devices"
    name = torch.cuda.get_device_name(device)
    with torch.cuda.device(device):
        # Emulated bfloat16 is slower than float32.
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return True, f"{name} multiplies it in hardware"
    return False, f"{name} has no bfloat16 units"


def cpu_limit() -> str:
    """The setting that hides newer instructions of this CPU, as text; "" if there is none.

    `ATEN_CPU_CAPABILITY` limits the instructions that torch's operators use. Code of Quadriga that
    depends on instructions of the CPU asks this function, to respect the same limit.
    """
    capability = os.environ.get("ATEN_CPU_CAPABILITY", "")
    return f"ATEN_CPU_CAPABILITY={capability}" if capability in ("avx2", "default") else ""


def resident_bytes() -> tuple[int, int]:
    """Memory that this process has in RAM, and the peak of that memory so far, in bytes.

    Without /proc (macOS) both numbers are the peak.
    """
    # `ru_maxrss` is in KiB on Linux, in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    status = Path("/proc/self/status")
    return _kernel_bytes(status, "VmRSS", peak), _kernel_bytes(status, "VmHWM", peak)


def forget_peak() -> bool:
    """Reset the peak that `resident_bytes` returns. Returns whether the system can do that."""
    try:
        # Writing 5 to this file resets the peak (proc(5)).
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        # Not Linux, or a sandbox that forbids it.
        return False
    return True


def release_free_memory() -> bool:
    """Give memory that the C library (glibc) and torch's GPU allocator hold unused to the system.

    Training and generation allocate in different patterns. Each would leave gaps that the other
    cannot use, and the resident memory of a run would grow. An engine such as vLLM has another GPU
    allocator, which cannot use memory that torch's allocator holds.

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
    # The quota of computing time in each period, both in microseconds: "200000 100000" is 2 cores.
    quota, _, period = _read_kernel_file(_CGROUP / "cpu.max").partition(" ")
    if not quota:
        # Version 1 of the interface.
        quota = _read_kernel_file(_CGROUP / "cpu/cpu.cfs_quota_us")
        period = _read_kernel_file(_CGROUP / "cpu/cpu.cfs_period_us")
    # Without a limit the quota is "max" or -1.
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_bytes() -> int:
    """Memory that this process can get without swapping, from the machine and its control group."""
    free = _kernel_bytes(Path("/proc/meminfo"), "MemAvailable", _physical_bytes())
    limit, used = _memory_of_control_group()
    if limit is not None and used is not None:
        free = min(free, limit - used)
    return free


def _memory_of_control_group() -> tuple[int | None, int | None]:
    """Limit and use of the control group's memory, in bytes; None where there is none."""
    limit = _read_kernel_file(_CGROUP / "memory.max")
    used = _read_kernel_file(_CGROUP / "memory.current")
    if not limit:
        # Version 1 of the interface.
        limit = _read_kernel_file(_CGROUP / "memory/memory.limit_in_bytes")
        used = _read_kernel_file(_CGROUP / "memory/memory.usage_in_bytes")
    return (
        int(limit) if limit.isdigit() else None,
        int(used) if used.isdigit() else None,
    )


def is_in_memory(folder: Path) -> bool:
    """Whether a folder is on a file system in memory, by the kernel's list of mounts.

    False if the system has no such list.
    """
    folder = folder.resolve()
    longest = -1
    folder_kind = ""
    for line in _read_kernel_file(Path("/proc/self/mounts")).splitlines():
        _, mount_point, kind, *_ = line.split()
        # The folder is on the innermost mount, which has the longest path. Of two mounts at the
        # same point, the later one in the list hides the earlier one.
        if folder.is_relative_to(mount_point) and len(mount_point) >= longest:
            longest = len(mount_point)
            folder_kind = kind
    return folder_kind in ("tmpfs", "ramfs")


def describe_machine() -> str:
    """A line for logs and reports: cores, memory, accelerators, system, versions."""
    num_cores = num_usable_cores()
    num_bytes = _physical_bytes()
    limit, _ = _memory_of_control_group()
    if limit is not None:
        num_bytes = min(num_bytes, limit)
    parts = [
        f"{num_cores} core{'s' if num_cores != 1 else ''} of {_describe_cpu()}",
        f"{num_bytes / GIB:.0f} GiB memory",
        describe_gpus(),
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}",
    ]
    return ", ".join(parts)


def describe_numerics() -> str:
    """CPU, kernels, threads, accelerator and torch: what the last bits of results depend on."""
    threads = f"{torch.get_num_threads()} threads"
    return f"{_describe_cpu()}, {threads}, {describe_gpus()}, torch {torch.__version__}"


def _describe_cpu() -> str:
    """Name of the CPU, and the kernels that torch chooses for it."""
    cpu = _kernel_value(_CPUINFO, "model name") or platform.processor() or platform.machine()
    return f"{cpu} ({torch.backends.cpu.get_cpu_capability()})"


def describe_gpus() -> str:
    """Number, name and memory of the visible GPUs."""
    if not torch.cuda.is_available():
        return "no GPU"
    count = torch.cuda.device_count()
    if torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(0)
        return f"{count} x {properties.name} with {properties.total_memory / GIB:.0f} GiB"
    # torch would make a CUDA context to find the name. A context takes half a gigabyte of the first
    # GPU, and fails on a GPU that admits one process only. nvidia-smi needs no context.
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            query, capture_output=True, encoding="utf-8", check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return f"{count} GPU{'s' if count != 1 else ''}"
    # The line of the first GPU, such as "NVIDIA H200, 143771".
    name, _, mebibytes = output.stdout.partition("\n")[0].rpartition(",")
    if not mebibytes.strip().isdigit():
        # For GPUs that share the memory of the host, nvidia-smi prints "[N/A]".
        return f"{count} x {name or 'GPU'}"
    return f"{count} x {name} with {int(mebibytes) / 1024:.0f} GiB"


def _physical_bytes() -> int:
    """Memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _kernel_bytes(path: Path, key: str, default: int) -> int:
    """Value of a key in a file of the kernel, converted from KiB to bytes; else `default`."""
    field = _kernel_value(path, key)
    return int(field.split()[0]) * 1024 if field else default


def _kernel_value(path: Path, key: str) -> str:
    """First value of a key in a file of the kernel with lines `key: value`; "" if it is missing."""
    for line in _read_kernel_file(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read_kernel_file(path: Path) -> str:
    """Text of a file of the kernel; "" if this system does not have it."""
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


@contextmanager
def detect_lost_peer(where: str) -> Iterator[None]:
    """Context manager for collectives: raise their errors as a `PeerLostError`.

    Args:
        where: name of the collectives, for the error message.

    Raises:
        PeerLostError: a collective failed because another rank is gone.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        # Although it is a RuntimeError, this rank caused it.
        raise
    except RuntimeError as error:
        raise PeerLostError(
            where,
            got=str(error).strip().partition("\n")[0],
            expected="all ranks to take part",
            fix="Look for the error of another rank: it left this one alone.",
        ) from error
