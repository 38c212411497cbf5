# SPDX-License-Identifier: Apache-2.0
"""A run with the default keys on a cluster of its own that loses a worker, and later the cluster's head.

What it does not prove: deaths at any other moment (`benchmarks/campaigns/ray_kills.py` has random ones).
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.limits import RUN_LOSES_A_NODE_S

COMMON = (
    # Enough steps that the run has not ended before it needs the head that has died.
    "trainer.total_training_steps=16",
    "trainer.save_freq=2",
    "trainer.n_gpus_per_node=2",
    "data.shuffle=True",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
)
# In the driver, which has started the cluster: one process of it dies after step 2, another after step 4.
ROWS = """
import os, signal
from pathlib import Path
from quadriga.data import RLHFDataset
from quadriga.descendants import descendants

VICTIMS = {2: b"ray::WorkerProcess", 4: b"gcs_server"}

class Rows(RLHFDataset):
    def on_batch_end(self, batch):
        step = batch.meta_info["global_steps"]
        mark = Path(__file__).with_name(f"killed_after_{step}")
        if step in VICTIMS and not mark.exists():
            mark.touch()
            programs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())}
            victims = [pid for pid, words in programs.items() if VICTIMS[step] in words.split(b"\\0")[0]]
            os.kill(min(victims), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_gets_over_the_death_of_a_worker_and_of_the_head(
    ray_cluster: str,
    train: Callable[..., Path],
    start_on: Callable[..., subprocess.Popen[str]],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    session_members: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """By itself, with the numbers of the run left alone; of its clusters nothing is left."""
    alone = train("trainer.backend=ray", *COMMON, run="alone")
    (tmp_path / "rows.py").write_text(ROWS)
    rows = (f"data.custom_cls.path={tmp_path / 'rows.py'}", "data.custom_cls.name=Rows")
    process = start_on("", *COMMON, *rows)
    output, _ = process.communicate(timeout=RUN_LOSES_A_NODE_S)
    assert process.returncode == 0, output
    lost = [line for line in output.splitlines() if line.startswith("  in step ")]
    assert [line.split(":")[1].split("[")[0].split(" at ")[0] for line in lost] == [
        " actor_rollout",
        " Ray cluster",
    ]
    assert metric_lines(tmp_path / "run") == metric_lines(alone)
    assert session_members(process.pid) == []
