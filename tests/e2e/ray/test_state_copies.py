# SPDX-License-Identifier: Apache-2.0
"""A run without checkpoints that loses a process goes on from the copies of its last step, bit for bit.

What it does not prove: that a copy which was cut short is left alone; tests/unit/engines has that.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.models.weight_files import open_weights

NUM_STEPS = 6
COMMON = (
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.save_freq=100",
    "trainer.test_freq=2",
    "trainer.log_val_generations=2",
    "data.shuffle=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
)
# Kills a worker when the steps 3 and 5 are over, before there are copies of them. The driver, in whose process it
# runs, has started the cluster: one session for both.
ROWS = """
import os, signal
from pathlib import Path
from quadriga.data import RLHFDataset

def kill_worker():
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            title = (entry / "cmdline").read_bytes()
            session = (entry / "stat").read_text().rpartition(")")[2].split()[3]
        except OSError:
            continue
        if title.startswith(b"ray::WorkerProcess") and int(session) == os.getsid(0):
            return os.kill(int(entry.name), signal.SIGKILL)

class Rows(RLHFDataset):
    def on_batch_end(self, batch):
        step = batch.meta_info["global_steps"]
        mark = Path(__file__).with_name("killed_after_" + str(step))
        if step in (3, 5) and not mark.exists():
            mark.touch()
            kill_worker()
"""


def weights(directory: Path, part: str) -> dict[str, torch.Tensor]:
    """Those of a role at the end."""
    files = open_weights(directory / f"global_step_{NUM_STEPS}" / part)
    return {name: files.read(name) for name in files.shapes}


@pytest.fixture
def losing(tmp_path: Path) -> tuple[str, ...]:
    """Overrides of a run that loses a worker twice."""
    (tmp_path / "rows.py").write_text(ROWS)
    return f"data.custom_cls.path={tmp_path / 'rows.py'}", "data.custom_cls.name=Rows"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("algorithm.adv_estimator=gae", "trainer.placement=apart"), marks=pytest.mark.slow),
        ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2"),
    ],
    ids=["critic", "adapter"],
)
@pytest.mark.usefixtures("ray_cluster")
def test_run_that_lost_a_worker_equals_the_run_left_alone(
    train: Callable[..., Path],
    losing: tuple[str, ...],
    overrides: tuple[str, ...],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """On two ranks, from the copy of the step before; no memory of theirs is left."""
    on_ray = (*COMMON, *overrides, "trainer.backend=ray", "trainer.n_gpus_per_node=2")
    alone = train(*on_ray, run="alone")
    capfd.readouterr()
    train(*on_ray, *losing, run="disturbed")
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("resumed from ")] == [
        "resumed from the copy of step 2 in memory",
        "resumed from the copy of step 4 in memory",
    ]
    assert metric_lines(tmp_path / "disturbed") == metric_lines(alone)
    assert (tmp_path / "disturbed" / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    for part in {"actor", "critic"} & {path.name for path in (alone / f"global_step_{NUM_STEPS}").iterdir()}:
        left, right = weights(tmp_path / "disturbed", part), weights(alone, part)
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []
    files = subprocess.run(["ls", "-l", f"/proc/{os.getpid()}/fd"], capture_output=True, text=True).stdout
    assert "quadriga-state-copy" not in files
