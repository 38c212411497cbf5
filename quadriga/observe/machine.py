# SPDX-License-Identifier: Apache-2.0
"""What this machine is, how much of it the process uses, and which number format suits it."""

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from quadriga.errors import PeerLostError

GIB = 1024**3
_CPUINFO = Path("/proc/cpuinfo")
# CPU flags (Linux names) of units that multiply matrices of 16 bits: Intel and AMD, then Arm.
BF16_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
FP16_CPU_FLAGS = ("amx_fp16", "avx512_fp16", "asimdhp")


@dataclass(frozen=True, slots=True)
class Choice:
    """A data type and the reason for it, fit to be printed."""

    value: torch.dtype
    reason: str


def choose_dtype(requested: str, device: torch.device | str) -> Choice:
    """The data type of the compute weights.
    `requested`: "auto" (bfloat16 where the hardware multiplies it), "bfloat16", "float16" or "float32".
    `device`: where the weights will live."""
    device = torch.device(device)
    if requested == "float32":
        return Choice(torch.float32, "float32: asked for")
    units = FP16_CPU_FLAGS if requested == "float16" else BF16_CPU_FLAGS
    if device.type == "cpu":
        flags = (_field(_CPUINFO, "flags") or _field(_CPUINFO, "Features")).split()
        unit = next((flag for flag in units if flag in flags), None)
        has_bf16, fast = unit is not None, f"this CPU multiplies it in hardware ({unit})"
        slow = f"this CPU has none of {', '.join(units)}"
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        # Emulated bfloat16 is slower than float32, so it does not count.
        with torch.cuda.device(device):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        fast, slow = f"{name} multiplies it in hardware", f"{name} has no bfloat16 units"
    else:
        has_bf16, fast, slow = (
            False,
            "",
            f"nothing is known about bfloat16 on {device.type} devices",
        )
    if requested == "float16":
        is_slow = device.type == "cpu" and not has_bf16
        return Choice(
            torch.float16,
            f"float16: asked for{f' (slow here: float32: {slow})' if is_slow else ''}",
        )
    if requested == "bfloat16":
        return Choice(
            torch.bfloat16,
            f"bfloat16: asked for{'' if has_bf16 else f' (slow here: float32: {slow})'}",
        )
    if has_bf16:
        return Choice(torch.bfloat16, f"bfloat16: {fast}")
    return Choice(torch.float32, f"float32: {slow}")


def resident_bytes() -> tuple[int, int]:
    """Memory of this process in RAM, and the most it has held; without /proc (macOS) twice the latter."""
    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    fields = (_field(Path("/proc/self/status"), key) for key in ("VmRSS", "VmHWM"))
    held, most = (int(field.split()[0]) * 1024 if field else peak for field in fields)
    return held, most


def release_free_memory() -> bool:
    """Give unused pages back to the system, where the C library keeps them (glibc), and what torch's allocator keeps
    of a GPU. Returns whether the C library does.

    Training and generation allocate in different patterns; without this each leaves holes for the other, and the
    resident memory of a run creeps up. An engine like vLLM's has an allocator of its own: what torch's keeps is lost
    to it."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def num_usable_cores() -> int:
    """CPU cores this process may use, by its affinity and the limit of its control group."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_bytes() -> int:
    """Memory that this process can have without swapping, of the machine and of its control group."""
    field = _field(Path("/proc/meminfo"), "MemAvailable")
    free = (
        int(field.split()[0]) * 1024
        if field
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    limit, held = (_read(Path(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
    return min(free, int(limit) - int(held)) if limit.isdigit() and held.isdigit() else free


def is_in_memory(folder: Path) -> bool:
    """Whether a folder is on a file system in memory, by the kernel's list of mounts; False where there is none."""
    lines = enumerate(line.split() for line in _read(Path("/proc/self/mounts")).splitlines())
    place = folder.resolve()
    found = [
        (len(where), number, kind)
        for number, (_, where, kind, *_) in lines
        if place.is_relative_to(where)
    ]
    return max(found, default=(0, 0, ""))[2] in ("tmpfs", "ramfs")


def describe_machine() -> str:
    """One line for logs and reports: cores, memory, accelerators, system, versions."""
    cpu = _field(_CPUINFO, "model name") or platform.processor() or platform.machine()
    num_cores = num_usable_cores()
    # The memory of the control group, where that is less.
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(Path("/sys/fs/cgroup/memory.max"))
    num_bytes = min(num_bytes, int(limit)) if limit.isdigit() else num_bytes
    accelerators = "no GPU"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory = f"{properties.total_memory / GIB:.0f} GiB"
        accelerators = f"{torch.cuda.device_count()} x {properties.name} with {memory}"
    parts = [
        f"{num_cores} core{'s' if num_cores != 1 else ''} of {cpu} ({torch.backends.cpu.get_cpu_capability()})",
        f"{num_bytes / GIB:.0f} GiB memory",
        accelerators,
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}",
    ]
    return ", ".join(parts)


def _field(path: Path, key: str) -> str:
    """The first value under a key of one of the kernel's files of `key: value` lines; empty if there is none."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read(path: Path) -> str:
    """The text of a file of the kernel, or nothing where this system has no such file."""
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


@contextmanager
def taking_part(where: str) -> Iterator[None]:
    """Collectives of several ranks. Raises PeerLostError: one failed, because another rank is gone."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        got, fix = (
            str(error).strip().partition("\n")[0],
            "Look for the error of another rank: it left this one alone.",
        )
        raise PeerLostError(where, got=got, expected="all ranks to take part", fix=fix) from error
