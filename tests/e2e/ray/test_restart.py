# SPDX-License-Identifier: Apache-2.0
"""A run that loses its workers and builds them anew ends with the numbers of a run that nothing happened to.

What it does not prove: the same for a machine that is lost, with what was on its disk.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.models.weight_files import open_weights

NUM_STEPS = 8
COMMON = (
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.save_freq=3",
    "trainer.test_freq=2",
    "trainer.log_val_generations=2",
    "data.shuffle=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
)
# Kills every worker a moment after each of the steps 2 and 5: in the midst of the next, and before and after there is
# a checkpoint to go on from. It runs in the driver's process, which has started the cluster.
ROWS = """
import os, signal, threading
from pathlib import Path
from quadriga.data import RLHFDataset
from watching import own_workers

def kill_workers():
    for pid in own_workers():
        os.kill(pid, signal.SIGKILL)

class Rows(RLHFDataset):
    def on_batch_end(self, batch):
        step = batch.meta_info["global_steps"]
        mark = Path(__file__).with_name("killed_after_" + str(step))
        if step in (2, 5) and not mark.exists():
            mark.touch()
            threading.Timer(0.02, kill_workers).start()
"""


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Those of the actor at the end."""
    files = open_weights(directory / f"global_step_{NUM_STEPS}" / "actor")
    return {name: files.read(name) for name in files.shapes}


@pytest.mark.usefixtures("ray_cluster")
def test_run_that_lost_its_workers_equals_the_run_left_alone(
    train: Callable[..., Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Bit for bit: from the start where there is no checkpoint yet, from step 3 later; an older one is left alone."""
    (tmp_path / "rows.py").write_text(ROWS)
    rows = (f"data.custom_cls.path={tmp_path / 'rows.py'}", "data.custom_cls.name=Rows", "trainer.resume_mode=disable")
    # What an earlier run left in the same directory is not what this one goes on from.
    earlier = ("trainer.total_training_steps=1", "trainer.save_freq=1", "data.seed=7")
    train(*COMMON, *earlier, run="disturbed")
    alone = train(*COMMON, run="alone")
    capfd.readouterr()
    on_ray = ("trainer.backend=ray", "trainer.state_copies=False")
    train(*COMMON, *rows, *on_ray, run="disturbed")
    output = capfd.readouterr().out
    assert [(tmp_path / f"killed_after_{step}").exists() for step in (2, 5)] == [True, True]
    assert [line.partition("goes on ")[2] for line in output.splitlines() if line.startswith("Recovery: ")] == [
        "from where it began, for it has written no checkpoint yet; 2 of 3 restarts are left "
        "(trainer.max_worker_restarts).",
        "from the checkpoint of step 3; 2 of 3 restarts are left (trainer.max_worker_restarts).",
    ]
    assert [line for line in output.splitlines() if line.startswith("resumed from ")] == [
        f"resumed from {tmp_path / 'disturbed' / 'global_step_3'}"
    ]
    assert metric_lines(tmp_path / "disturbed") == metric_lines(alone)
    assert (tmp_path / "disturbed" / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    left, right = weights(tmp_path / "disturbed"), weights(alone)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
