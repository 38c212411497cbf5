# SPDX-License-Identifier: Apache-2.0
"""A command whose workers are on a cluster is interrupted, asked to stop, or killed: nothing of it stays."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quadriga
from quadriga.trainer.checkpoint import Checkpoints, verify
from quadriga.trainer.loop import TrainingStep
from tests.e2e.conftest import REPOSITORY, with_the_tests
from tests.limits import COMMAND_S
from watching import assert_nothing_left, titles, wait_for, wait_for_steps

Start = Callable[..., subprocess.Popen[str]]
Lines = Callable[[Path], list[dict[str, Any]]]
ENDLESS = ("trainer.save_freq=1", "trainer.total_training_steps=5000")


def test_sigterm_in_a_program_saves_the_step_in_work(
    ray_cluster: str,
    home: Path,
    make_rows: Callable[..., list[dict[str, Any]]],
    alone: Callable[..., Path],
    metric_lines: Lines,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Of rows and a lambda, with the numbers of the command. It ends with a checkpoint of its last step, from which the
    run goes on to the bit, in one process; no worker process stays."""
    rows = make_rows(24)
    options = {
        "data.cache_dir": tmp_path / "cache",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 8,
        "actor_rollout_ref.actor.fsdp_config.model_dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.n": 2,
        "reward_model.num_workers": 1,
        "trainer.val_before_train": True,
        "trainer.logger": ["jsonl"],
        "trainer.save_freq": 90000,
        "trainer.default_local_dir": tmp_path / "run",
    }

    def train(backend: str, *callbacks: Callable[[TrainingStep], None]) -> None:
        quadriga.train(
            home / "model",
            data=rows[:10],
            reward=lambda text: text.count("a") / max(1, len(text)),
            eval_data=rows[20:],
            steps=4,
            callbacks=callbacks,
            options=options | {"trainer.backend": backend},
        )

    def ask_to_stop(step: TrainingStep) -> None:
        if step.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train("ray", ask_to_stop)
    printed = capfd.readouterr()
    assert "SIGTERM: the run ends after this step" in printed.err
    assert_nothing_left()
    checkpoints = Checkpoints(tmp_path / "run")
    (last,) = checkpoints.steps()
    assert last == checkpoints.newest() == metric_lines(tmp_path / "run")[-1]["step"] < 4
    assert f"resume(steps=4) goes on from the checkpoint of step {last}." in printed.out
    verify(checkpoints.path(last))
    train("local")
    expected = alone("trainer.val_before_train=True", "trainer.total_training_steps=4")
    assert metric_lines(tmp_path / "run") == metric_lines(expected)


def test_interrupt(
    start_on: Start,
    interrupt: Callable[[subprocess.Popen[str]], str],
    ray_folder: Path,
    tmp_path: Path,
) -> None:
    """Ctrl-C, to the whole process group as a terminal sends it: one line says how to go on, and nothing stays of the
    cluster that the command has started."""
    own = f"ray_kwargs.ray_init={{_temp_dir: {ray_folder / 'interrupted'}, object_store_memory: 100000000}}"
    shared = set(os.listdir("/dev/shm"))
    process = start_on("", *ENDLESS, own)
    wait_for_steps(process, tmp_path / "run", 2)
    # It is written while the next steps go on.
    wait_for(lambda: Checkpoints(tmp_path / "run").newest() is not None, lambda: "no checkpoint")
    output = interrupt(process)
    assert output.rstrip().endswith("quadriga train: interrupted")
    assert "pid=" not in output, "Ray puts that before what a worker prints"
    assert list((ray_folder / "interrupted").glob("session_*")) == []
    assert set(os.listdir("/dev/shm")) <= shared
    for checkpoint in (tmp_path / "run").glob("global_step_*"):
        verify(checkpoint)


# A driver with a worker that has a child, on a cluster of its own.
DRIVER = """
import sys
sys.path.insert(0, {tests!r})
import ray
import clumsy
from quadriga.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from quadriga.single_controller.ray.cluster import cluster

ray.cloudpickle.register_pickle_by_value(clumsy)
with cluster(dict(_temp_dir={folder!r}, object_store_memory=100_000_000), num_processes=1):
    group = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(clumsy.Clumsy), name="actor")
    print("child", *group.execute_all("start_child"), flush=True)
    sys.stdin.read()
"""


def test_killed_driver(session_members: Callable[[int], list[int]], ray_folder: Path) -> None:
    """SIGKILL takes the workers with it, and the cluster that the driver started: agents, folder, shared memory.

    A whole run, on a cluster that stays up: test_async_training.py; there a worker with a child: test_failures.py.
    """
    shared = set(os.listdir("/dev/shm"))
    program = DRIVER.format(tests=str(Path(__file__).parent), folder=str(ray_folder / "own"))
    process = subprocess.Popen(
        with_the_tests(sys.executable, "-c", program),
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert any(line.startswith("child ") for line in process.stdout)
    assert len(session_members(process.pid)) > 4
    process.kill()
    process.communicate(timeout=COMMAND_S)

    def left() -> list[str]:
        folders = [str(path) for path in (ray_folder / "own").glob("session_*")]
        return [
            *titles(session_members(process.pid)).values(),
            *folders,
            *(set(os.listdir("/dev/shm")) - shared),
        ]

    wait_for(lambda: not left(), lambda: str(left()))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["raylet/raylet", "gcs/gcs_server"])
def test_a_run_starts_its_own_cluster_again(
    part: str,
    start_on: Start,
    session_members: Callable[[int], list[int]],
    ray_folder: Path,
    tmp_path: Path,
) -> None:
    """It ends by itself, with every step once."""
    own = (
        f"ray_kwargs.ray_init={{_temp_dir: {ray_folder / 'again'}, object_store_memory: 100000000}}"
    )
    process = start_on("", "trainer.save_freq=1", "trainer.total_training_steps=40", own)
    wait_for_steps(process, tmp_path / "run", 3)
    for pid, title in titles(session_members(process.pid)).items():
        if title.endswith(part):
            os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 0, output
    assert output.count("Recovery: the workers are started again") == 1
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 41))
    assert list((ray_folder / "again").glob("session_*")) == []


TWO_NODES = """
import sys, ray
from ray.cluster_utils import Cluster
node = dict(num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)
quick = dict(health_check_initial_delay_ms=0, health_check_period_ms=1000, prestart_worker_first_driver=False)
cluster = Cluster(initialize_head=True, head_node_args=dict(node, temp_dir={folder!r}, _system_config=quick))
second = cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.remove_node(second, allow_graceful=False)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_run_goes_on_with_what_a_lost_node_leaves(
    start_on: Start,
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    ray_folder: Path,
    tmp_path: Path,
) -> None:
    """One process in place of two: said loudly, and the numbers are those of two up to rounding."""
    program = TWO_NODES.format(folder=str(ray_folder / "two"))
    keeper = subprocess.Popen(
        with_the_tests(sys.executable, "-c", program),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdin and keeper.stdout
    try:
        address = keeper.stdout.readline().strip()
        more = ("trainer.nnodes=2", "trainer.save_freq=1", "trainer.total_training_steps=30")
        process = start_on(address, *more)
        wait_for_steps(process, tmp_path / "run", 3)
        keeper.stdin.write("lose the second\n")
        keeper.stdin.flush()
        output, _ = process.communicate(timeout=COMMAND_S)
    finally:
        keeper.kill()
        keeper.communicate()
    assert process.returncode == 0, output
    assert "The run goes on with fewer processes: all [1]." in output
    process = start_on("", *more[1:], run="alone")
    output, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 0, output
    lost, alone = metric_lines(tmp_path / "run"), metric_lines(tmp_path / "alone")
    assert [line["step"] for line in lost] == list(range(1, 31))
    for one, two in zip(lost, alone, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean"):
            assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-5), (one["step"], name)
