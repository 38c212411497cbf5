# SPDX-License-Identifier: Apache-2.0
"""Chosen steps leave a readable trace, others cost nothing."""

import gzip
import json

import pytest
import torch

from quadriga.config import ProfilerConfig
from quadriga.errors import ConfigError
from quadriga.observe.profiler import Profiler


def run(profiler: Profiler, steps: range) -> None:
    for step in steps:
        with profiler.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)


def names(path) -> set[str]:
    return {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def test_each_chosen_step_has_its_own_trace(tmp_path):
    told = []
    run(Profiler(ProfilerConfig(tool="torch", steps=[2, 3], save_path=str(tmp_path)), emit=told.append), range(1, 5))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["step_2.json.gz", "step_3.json.gz"]
    assert "aten::matmul" in names(files[0])
    assert told == [f"profile written to {file}" for file in files]


def test_neighbouring_steps_can_share_one_trace(tmp_path):
    config = ProfilerConfig(tool="torch", steps=[1, 2, 4], save_path=str(tmp_path), profile_continuous_steps=True)
    run(Profiler(config, emit=lambda _: None), range(1, 5))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step_4.json.gz", "steps_1-2.json.gz"]


def test_a_step_that_raises_and_a_run_that_ends_early_still_leave_their_trace(tmp_path):
    config = ProfilerConfig(tool="torch", steps=[1, 2, 3], save_path=str(tmp_path), profile_continuous_steps=True)
    profiler = Profiler(config, emit=lambda _: None)
    with pytest.raises(RuntimeError), profiler.step(1):
        raise RuntimeError
    assert (tmp_path / "step_1.json.gz").exists()
    run(profiler, range(2, 3))
    assert not (tmp_path / "step_2.json.gz").exists()
    profiler.close()
    assert (tmp_path / "step_2.json.gz").exists()


def test_without_a_tool_nothing_is_written(tmp_path):
    run(Profiler(ProfilerConfig(steps=[1], save_path=str(tmp_path / "none"))), range(1, 3))
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, where memory snapshots work")
def test_a_memory_snapshot_without_cuda_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"global_profiler\.tool: got torch_memory on a machine without CUDA"):
        Profiler(ProfilerConfig(tool="torch_memory", steps=[1], save_path=str(tmp_path)))
