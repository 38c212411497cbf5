# SPDX-License-Identifier: Apache-2.0
"""Settings of a machine with GPUs that are refused or reported before a run starts."""

import os
import resource
import shutil
from types import SimpleNamespace

import pytest

from quadriga.errors import ConfigError
from quadriga.observe.gpu_machine import (
    check_machine,
    require_machine,
    require_plain_segments,
    require_visible_devices,
    visible_devices,
    warnings_of_machine,
)

LOCKED = (64 << 10, 64 << 10)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", r"CUDA_VISIBLE_DEVICES: got '', which hides all GPUs"),
        ("-1", r"got '-1', which hides all GPUs"),
        ("3,3", r"got '3,3', expected each device once"),
        ("MIG-a,MIG-b", r"got 2 parts of GPUs \(MIG\), expected whole GPUs"),
    ],
)
def test_devices_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(ConfigError, match=message):
        require_visible_devices()


@pytest.mark.parametrize("value", ["3", "0,1", "GPU-5a1b,GPU-77c2", "MIG-a"])
def test_devices_that_are_taken(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    require_visible_devices()
    assert visible_devices() == value.split(",")


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's 64 MB are refused for two processes; a small amount is a warning."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20))
    with pytest.raises(ConfigError, match=r"/dev/shm: got 64 MiB for 8 .* --shm-size=16g"):
        require_machine(8)
    require_machine(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2 << 30))
    require_machine(8)
    assert any("/dev/shm has 2.0 GiB" in line for line in warnings_of_machine(8, 1))


def test_a_run_without_gpus_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,3")
    check_machine("cpu", 8, 1)
    with pytest.raises(ConfigError, match="each device once"):
        check_machine("cuda", 8, 1)


def test_more_processes_than_cores_without_gpus_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    check_machine("cpu", 2, 1)
    assert capsys.readouterr().out == ""
    check_machine("cpu", 4, 1)
    assert "notice: 4 worker processes on 2 CPU cores, without GPUs" in capsys.readouterr().out


def test_limits_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open files are raised as far as allowed; locked memory matters between machines only."""
    limits = {resource.RLIMIT_NOFILE: (1024, 1 << 20), resource.RLIMIT_MEMLOCK: LOCKED}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 30))
    assert list(warnings_of_machine(8, 1)) == []
    assert limits[resource.RLIMIT_NOFILE] == (9 * 1024, 1 << 20)
    limits[resource.RLIMIT_NOFILE] = (1024, 1024)
    files, locked = warnings_of_machine(8, 2)
    assert "`ulimit -n` allows 1024 open files" in files
    assert "`ulimit -l` allows 64 KiB" in locked


def test_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ConfigError, match="no expandable segments while vLLM has processes of its"):
        require_plain_segments("vLLM")
