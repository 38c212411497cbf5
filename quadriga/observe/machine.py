# SPDX-License-Identifier: Apache-2.0
"""What this machine is, how much of it the process uses, and which number format suits it."""

import ctypes
import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from quadriga.errors import ConfigError

GIB = 1024**3
_CPUINFO = Path("/proc/cpuinfo")
# CPU flags (Linux names) of units that multiply bfloat16 matrices: Intel and AMD, then Arm.
BF16_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class Choice:
    """A data type and the reason for it, fit to be printed."""

    value: torch.dtype
    reason: str


def choose_dtype(requested: str, device: torch.device | str) -> Choice:
    """The data type of the compute weights.

    Args:
        requested: "auto", "bfloat16" or "float32", as in `fsdp_config.model_dtype`.
        device: where the weights will live.
    """
    device = torch.device(device)
    if requested == "auto":
        return _dtype_for(device)
    if requested == "float32":
        return Choice(torch.float32, "float32: asked for")
    if requested == "bfloat16":
        natural = _dtype_for(device)
        slow = "" if natural.value == torch.bfloat16 else f" (slow here: {natural.reason})"
        return Choice(torch.bfloat16, f"bfloat16: asked for{slow}")
    found = f"fsdp_config.model_dtype: got {requested!r}, expected auto, bfloat16 or float32"
    raise ConfigError(found, fix="auto takes bfloat16 where the hardware multiplies it.")


def _dtype_for(device: torch.device) -> Choice:
    if device.type == "cpu":
        flag = next((flag for flag in BF16_CPU_FLAGS if flag in cpu_flags()), None)
        if flag:
            return Choice(torch.bfloat16, f"bfloat16: this CPU multiplies it in hardware ({flag})")
        return Choice(torch.float32, f"float32: this CPU has none of {', '.join(BF16_CPU_FLAGS)}")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        # Emulated bfloat16 is slower than float32, so it does not count.
        with torch.cuda.device(device):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if has_bf16:
            return Choice(torch.bfloat16, f"bfloat16: {name} multiplies it in hardware")
        return Choice(torch.float32, f"float32: {name} has no bfloat16 units")
    return Choice(torch.float32, f"float32: nothing is known about bfloat16 on {device.type} devices")


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """The CPU's feature flags as Linux names them; empty where the system does not have them."""
    return frozenset((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())


def resident_bytes() -> int:
    """Memory of this process in RAM; without /proc (macOS) its peak, which is an upper bound."""
    return _status_bytes("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most memory this process has held in RAM since it started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return _status_bytes("VmHWM") or (peak if sys.platform == "darwin" else peak * 1024)


def release_free_memory() -> bool:
    """Give unused pages back to the system, where the C library keeps them (glibc). Returns whether it does.

    Training and generation allocate in different patterns; without this each leaves holes for the other, and the
    resident memory of a run creeps up.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def num_usable_cores() -> int:
    """CPU cores this process may use, by its affinity and the limit of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory_bytes() -> int:
    """Memory of the machine, or of the control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(Path("/sys/fs/cgroup/memory.max"))
    return min(total, int(limit)) if limit.isdigit() else total


def describe_machine() -> str:
    """One line for logs and reports: cores, memory, accelerators, system, versions."""
    cpu = _field(_CPUINFO, "model name") or platform.processor() or platform.machine()
    num_cores = num_usable_cores()
    accelerators = "no GPU"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory = f"{properties.total_memory / GIB:.0f} GiB"
        accelerators = f"{torch.cuda.device_count()} x {properties.name} with {memory}"
    parts = [
        f"{num_cores} core{'s' if num_cores != 1 else ''} of {cpu} ({torch.backends.cpu.get_cpu_capability()})",
        f"{usable_memory_bytes() / GIB:.0f} GiB memory",
        accelerators,
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}",
    ]
    return ", ".join(parts)


def _status_bytes(key: str) -> int:
    """A size in /proc/self/status; 0 where there is none."""
    return int((_field(Path("/proc/self/status"), key) or "0").split()[0]) * 1024


def _field(path: Path, key: str) -> str:
    """The first value under a key of one of the kernel's files of `key: value` lines; empty if there is none."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read(path: Path) -> str:
    """The text of a file of the kernel, or nothing where this system has no such file."""
    return path.read_text().strip() if path.exists() else ""
