# SPDX-License-Identifier: Apache-2.0
"""The machine is described, and a number format is chosen with a reason."""

import os

import pytest
import torch

from quadriga.observe import machine
from quadriga.observe.machine import choose_dtype, describe_machine, resident_bytes


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    """Stands for the kernel's file about the CPU; it does not exist at first, as on macOS."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", path)
    return path


def test_memory_that_is_touched_is_seen_and_the_peak_stays():
    before, _ = resident_bytes()
    block = torch.ones(512 * 1024**2, dtype=torch.uint8)
    held, peak = resident_bytes()
    # What tests before have freed may be given back meanwhile.
    assert 384 * 1024**2 < held - before < 640 * 1024**2
    # The kernel sums these counters over the cores now and then, so two readings differ by some pages.
    slack = 4 * 1024**2
    assert peak >= held - slack
    del block
    assert resident_bytes()[1] >= peak - slack


def test_without_proc_the_peak_counts(monkeypatch):
    monkeypatch.setattr(machine, "_kernel_value", lambda path, key: "")
    held, peak = resident_bytes()
    assert held == peak > 10 * 1024**2


@pytest.mark.parametrize("key", ["flags", "Features"])
@pytest.mark.parametrize(
    ("flags", "dtype", "named"),
    [
        ("fpu avx512f avx512_bf16", torch.bfloat16, "avx512_bf16"),
        ("fpu amx_bf16 avx512_bf16", torch.bfloat16, "amx_bf16"),
        ("fp asimd bf16", torch.bfloat16, "bf16"),
        ("fpu avx2", torch.float32, "none of"),
    ],
)
def test_auto_takes_bfloat16_where_the_cpu_multiplies_it(cpuinfo, key, flags, dtype, named):
    """Flags stand in the file as the kernels for Intel and for Arm write them."""
    cpuinfo.write_text(
        f"processor\t: 0\nmodel name\t: X\n{key}\t\t: {flags}\nvmx flags\t: amx_bf16\n"
    )
    choice = choose_dtype("auto", "cpu")
    assert choice.value == dtype
    assert named in choice.reason


def test_a_cpu_that_stands_in_for_an_older_one_takes_float32(cpuinfo, monkeypatch):
    cpuinfo.write_text("flags : avx512f avx512_bf16")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    choice = choose_dtype("auto", "cpu")
    assert (choice.value, choice.reason) == (torch.float32, "float32: ATEN_CPU_CAPABILITY=avx2")


def test_a_request_is_followed_and_a_slow_one_is_said_to_be_slow(cpuinfo):
    assert choose_dtype("float32", "cpu").value == torch.float32
    choice = choose_dtype("bfloat16", torch.device("cpu"))
    assert choice.value == torch.bfloat16
    assert "asked for (slow here: this CPU has none of" in choice.reason
    choice = choose_dtype("float16", "cpu")
    assert choice.value == torch.float16
    assert "asked for (slow here: this CPU has none of amx_fp16" in choice.reason
    cpuinfo.write_text("flags : bf16")
    assert choose_dtype("bfloat16", "cpu").reason == "bfloat16: asked for"


def test_the_description_names_cores_memory_and_torch():
    text = describe_machine()
    assert text.startswith(f"{machine.num_usable_cores()} core")
    assert f"torch {torch.__version__}" in text
    assert "GiB memory" in text
    assert 1 <= machine.num_usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "5000", "memory.current": "2000", "cpu.max": "100000 100000"},
        {
            "memory/memory.limit_in_bytes": "5000",
            "memory/memory.usage_in_bytes": "2000",
            "cpu/cpu.cfs_quota_us": "100000",
            "cpu/cpu.cfs_period_us": "100000",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_limits_of_a_control_group(monkeypatch, tmp_path, files):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + "\n")
    assert machine.available_bytes() == 3000
    assert machine.num_usable_cores() == 1
