# SPDX-License-Identifier: Apache-2.0
"""Whole runs on a CUDA device: the loop with `native` and with vLLM, and a step on Ray.

In the rehearsal (scripts/test --rehearse) the runs with `native` run on the stand-in.
"""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

IS_REHEARSAL = bool(os.environ.get("QUADRIGA_REHEARSAL"))
HAS_VLLM = importlib.util.find_spec("vllm") is not None and not IS_REHEARSAL
NUM_STEPS = 5
Train = Callable[..., Path]
Lines = Callable[[Path], list[dict[str, Any]]]
DTYPE = "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"
COMMON = (
    "trainer.device=cuda",
    DTYPE,
    "trainer.test_freq=-1",
    f"trainer.total_training_steps={NUM_STEPS}",
)


def require_steps(lines: list[dict[str, Any]], num_steps: int, largest: float) -> None:
    """As many steps, each with a gradient, and with log-probs of the rollout that are those of the trainer."""
    assert len(lines) == num_steps
    for line in lines:
        assert line["actor/grad_norm"] > 0 and line["rollout/log_prob_diff_max"] < largest


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_five_steps_with_native(train: Train, metric_lines: Lines, mode: str) -> None:
    lines = metric_lines(train(*COMMON, f"actor_rollout_ref.rollout.mode={mode}"))
    require_steps(lines, NUM_STEPS, 0.2)


@pytest.mark.skipif(IS_REHEARSAL, reason="the stand-in has no kernels to record")
def test_profiles_of_a_step(train: Train, tmp_path: Path) -> None:
    """A trace with the phases of the step and the kernels that they start on the device, and a snapshot of its
    memory."""
    for tool in ("torch", "torch_memory"):
        profile = (
            f"global_profiler.tool={tool}",
            "global_profiler.steps=[2]",
            f"global_profiler.save_path={tmp_path}",
        )
        train(*COMMON, *profile, "trainer.total_training_steps=2", run=tool)
    events = json.loads(gzip.decompress((tmp_path / "step_2.json.gz").read_bytes()))["traceEvents"]
    (step,) = [
        one for one in events if one.get("cat") == "user_annotation" and one["name"] == "step"
    ]
    kernels = [one for one in events if one.get("cat") == "kernel"]
    inside = [one for one in kernels if step["ts"] <= one["ts"] <= step["ts"] + step["dur"]]
    assert len(inside) > 100
    (snapshot,) = tmp_path.glob("step_2.*.memory.pickle")
    assert snapshot.stat().st_size > 1000


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed here")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_five_steps_with_vllm(train: Train, metric_lines: Lines, mode: str) -> None:
    """With CUDA graphs, asleep while the actor trains."""
    name = ("actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.mode={mode}")
    graphs = (
        "actor_rollout_ref.rollout.enforce_eager=False",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    )
    require_steps(metric_lines(train(*COMMON, *name, *graphs)), NUM_STEPS, 0.3)


@pytest.mark.skipif(IS_REHEARSAL, reason="Ray's processes do not have the stand-in")
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed here")
def test_a_step_on_ray(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """GRPO in a process that Ray gives a GPU."""
    words = arguments(*COMMON, "trainer.backend=ray", "trainer.total_training_steps=1")
    command = [sys.executable, "-m", "quadriga.cli.main", "train", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "on cuda" in done.stdout and (tmp_path / "run" / "metrics.jsonl").is_file()
