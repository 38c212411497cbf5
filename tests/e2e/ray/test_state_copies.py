# SPDX-License-Identifier: Apache-2.0
"""A run without checkpoints that loses a process goes on from the copies of its last step, bit for bit.

What it does not prove: that a copy which was cut short is left alone; tests/unit/engines has that.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.models.weight_files import open_weights
from tests.e2e.conftest import REPOSITORY, with_the_tests
from tests.limits import RUN_LOSES_A_NODE_S

NUM_STEPS = 4
COMMON = (
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.save_freq=100",
    "trainer.test_freq=2",
    "trainer.log_val_generations=2",
    "data.shuffle=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
)
# Kills a worker a moment after step 2, in the midst of the next one. It runs in the driver's process, which has started
# the cluster.
ROWS = """
import os, signal, threading
from pathlib import Path
from quadriga.data import RLHFDataset
from watching import own_workers

class Rows(RLHFDataset):
    def on_batch_end(self, batch):
        step = batch.meta_info["global_steps"]
        mark = Path(__file__).with_name("killed")
        if step == 2 and not mark.exists():
            mark.touch()
            threading.Timer(0.02, os.kill, (min(own_workers()), signal.SIGKILL)).start()
"""


def weights(directory: Path, part: str) -> dict[str, torch.Tensor]:
    """Those of a role at the end."""
    files = open_weights(directory / f"global_step_{NUM_STEPS}" / part)
    return {name: files.read(name) for name in files.shapes}


@pytest.fixture
def losing(tmp_path: Path) -> tuple[str, ...]:
    """Overrides of a run that loses a worker."""
    (tmp_path / "rows.py").write_text(ROWS)
    return f"data.custom_cls.path={tmp_path / 'rows.py'}", "data.custom_cls.name=Rows"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("algorithm.adv_estimator=gae", "trainer.placement=apart"), marks=pytest.mark.slow
        ),
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
    """On two ranks, from the newest copies; no memory of theirs is left.

    That copies which are not complete are left alone: tests/unit/engines/test_state_copy.py.
    """
    on_ray = (*COMMON, *overrides, "trainer.backend=ray", "trainer.n_gpus_per_node=2")
    alone = train(*on_ray, run="alone")
    capfd.readouterr()
    train(*on_ray, *losing, run="disturbed")
    lines = capfd.readouterr().out.splitlines()
    assert (tmp_path / "killed").exists()
    (resumed,) = (line for line in lines if line.startswith("resumed from "))
    # The copy of step 2 is made while step 3 goes on.
    assert resumed in [f"resumed from the copy of step {step} in memory" for step in (1, 2)]
    assert metric_lines(tmp_path / "disturbed") == metric_lines(alone)
    assert (tmp_path / "disturbed" / "samples.jsonl").read_bytes() == (
        alone / "samples.jsonl"
    ).read_bytes()
    for part in {"actor", "critic"} & {
        path.name for path in (alone / f"global_step_{NUM_STEPS}").iterdir()
    }:
        left, right = weights(tmp_path / "disturbed", part), weights(alone, part)
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []
    files = subprocess.run(
        ["ls", "-l", f"/proc/{os.getpid()}/fd"], capture_output=True, text=True
    ).stdout
    assert "quadriga-state-copy" not in files


# Two nodes on this machine; the second, where one of the two ranks is, goes when step 3 is over. The driver waits
# before that until what the nodes copied of earlier steps has reached the other one.
TWO_NODES = """
import os, sys, time
import ray
from ray.cluster_utils import Cluster
from quadriga.cli.main import main
from quadriga.data import RLHFDataset

node = dict(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
quick = dict(health_check_initial_delay_ms=0, health_check_period_ms=1000, prestart_worker_first_driver=False)
cluster = Cluster(initialize_head=True, head_node_args=dict(node, temp_dir={folder!r}, _system_config=quick))
second = cluster.add_node(**node, node_ip_address="127.0.0.2")
ray.init(address=cluster.address, log_to_driver=False)
lost = []


def on_batch_end(self, batch):
    time.sleep(3.0)
    if batch.meta_info["global_steps"] == 3 and not lost:
        lost.append(second)
        cluster.remove_node(second, allow_graceful=False)


RLHFDataset.on_batch_end = on_batch_end
sys.exit(main(["train", *{arguments!r}]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_neighbour_of_a_lost_node_has_its_copies(
    train: Callable[..., Path],
    arguments: Callable[..., list[str]],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    ray_folder: Path,
    tmp_path: Path,
) -> None:
    """Both ranks go on on the node that is left, from the copy of a step before the loss."""
    on_ray = (*COMMON, "trainer.backend=ray", "trainer.n_gpus_per_node=1", "trainer.nnodes=2")
    alone = train(*COMMON, "trainer.backend=ray", "trainer.n_gpus_per_node=2", run="alone")
    program = TWO_NODES.format(
        folder=str(ray_folder / "two"), arguments=arguments(*on_ray, run="disturbed")
    )
    done = subprocess.run(
        with_the_tests(sys.executable, "-c", program),
        capture_output=True,
        text=True,
        timeout=RUN_LOSES_A_NODE_S,
        check=False,
        env=os.environ
        | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^resumed from the copy of step [12] in memory$", done.stdout, re.MULTILINE
    ), done.stdout
    assert "of its ranks and of those of the node before" in done.stdout
    assert metric_lines(tmp_path / "disturbed") == metric_lines(alone)
