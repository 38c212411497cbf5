# SPDX-License-Identifier: Apache-2.0
"""The machine is described, and a number format is chosen with a reason."""

import os

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.observe import machine
from quadriga.observe.machine import choose_dtype, cpu_flags, describe_machine, peak_resident_bytes, resident_bytes


def test_memory_that_is_touched_is_seen_and_the_peak_stays():
    before = resident_bytes()
    block = torch.ones(64 * 1024**2, dtype=torch.uint8)
    grown = resident_bytes() - before
    assert 48 * 1024**2 < grown < 256 * 1024**2
    # The kernel sums these counters over the cores now and then, so two readings differ by some pages.
    slack = 4 * 1024**2
    peak = peak_resident_bytes()
    assert peak >= before + grown - slack
    del block
    assert peak_resident_bytes() >= peak - slack


def test_without_proc_the_peak_answers(monkeypatch):
    monkeypatch.setattr(machine, "_status_bytes", lambda key: 0)
    assert resident_bytes() == peak_resident_bytes() > 10 * 1024**2


@pytest.mark.parametrize(
    ("flags", "dtype", "named"),
    [
        ("fpu avx512f avx512_bf16", torch.bfloat16, "avx512_bf16"),
        ("fpu amx_bf16 avx512_bf16", torch.bfloat16, "amx_bf16"),
        ("fp asimd bf16", torch.bfloat16, "bf16"),
        ("fpu avx2", torch.float32, "none of"),
    ],
)
def test_auto_takes_bfloat16_where_the_cpu_multiplies_it(monkeypatch, flags, dtype, named):
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset(flags.split()))
    choice = choose_dtype("auto", "cpu")
    assert choice.value == dtype
    assert named in choice.reason


def test_a_request_is_followed_and_a_slow_one_is_said_to_be_slow(monkeypatch):
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset())
    assert choose_dtype("float32", "cpu").value == torch.float32
    choice = choose_dtype("bfloat16", torch.device("cpu"))
    assert choice.value == torch.bfloat16
    assert "asked for (slow here" in choice.reason


def test_an_unknown_word_is_refused():
    with pytest.raises(ConfigError, match="model_dtype: got 'fp8'"):
        choose_dtype("fp8", "cpu")


@pytest.mark.parametrize("key", ["flags", "Features"])
def test_flags_are_read_as_intel_and_arm_kernels_write_them(tmp_path, key):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: X\n{key}\t\t: fpu bf16 sse\nvmx flags\t: nothing\n")
    assert cpu_flags(cpuinfo) == {"fpu", "bf16", "sse"}
    assert cpu_flags(tmp_path / "absent") == frozenset()


def test_the_description_names_cores_memory_and_torch():
    text = describe_machine()
    assert text.startswith(f"{machine.num_usable_cores()} core")
    assert f"torch {torch.__version__}" in text
    assert "GiB memory" in text
    assert 1 <= machine.num_usable_cores() <= (os.cpu_count() or 1)
