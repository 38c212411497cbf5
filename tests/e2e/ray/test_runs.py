# SPDX-License-Identifier: Apache-2.0
"""`quadriga train --ray`: the numbers and the output of a local run, on every placement; and how such a run ends early.

What it does not prove: several nodes, GPUs, several processes to a pool (test_data_parallel.py has those).
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from quadriga.config import load_config
from quadriga.errors import WorkerError
from quadriga.trainer.checkpoint import verify
from quadriga.trainer.task_runner import run

WAIT_S = 300.0
CRITIC_AND_REFERENCE = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.val_before_train=True",
    "trainer.logger=[console,jsonl]",
)
ENDLESS = ("trainer.save_freq=1", "trainer.total_training_steps=5000")
OURS = ("ray::Host", "ray::WorkerProcess")
# After a SIGKILL these try for a minute, a number fixed in Ray, to report it to a head that is gone; then they end.
LATE = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")

Start = Callable[..., subprocess.Popen[str]]
Lines = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def start_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start_on(address, *overrides, run="run")`: a run with `--ray`; address "": on a cluster of its own."""

    def run_apart(address: str, *overrides: str, run: str = "run") -> subprocess.Popen[str]:
        monkeypatch.setenv("RAY_ADDRESS", address)
        return start("trainer.backend=ray", *overrides, run=run)

    return run_apart


def wait_for(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Until it holds; fails with `what()` after a long time."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def wait_for_steps(process: subprocess.Popen[str], run: Path, count: int) -> None:
    """Until so many steps are logged; fails with the output of a run that has ended."""
    metrics = run / "metrics.jsonl"

    def has_them() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= count

    wait_for(has_them, lambda: f"no line {count} in {metrics}")


def titles(pids: list[int]) -> dict[int, str]:
    """Of processes that may end meanwhile: pid -> title."""
    found = {}
    for pid in pids:
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def processes_of_ours(members: Callable[[int], list[int]]) -> dict[int, str]:
    """The processes that a run has on the shared cluster, which is in the session of the tests: pid -> title."""
    return {pid: title for pid, title in titles(members(os.getsid(0))).items() if title.startswith(OURS)}


def assert_nothing_left(members: Callable[[int], list[int]]) -> None:
    """The shared cluster is as if there had been no run."""
    groups = placement_group_table
    wait_for(
        lambda: not processes_of_ours(members) and all(one["state"] == "REMOVED" for one in groups().values()),
        lambda: f"left: {processes_of_ours(members)}, {groups()}",
    )
    wait_for(
        lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"],
        lambda: str(ray.available_resources()),
    )


def without_numbers(text: str) -> list[str]:
    """Lines of output without what depends on the clock, the machine's load and where the run is."""
    lines = [line for line in text.splitlines() if not line.startswith("notice: ")]
    lines = [re.sub(r"\s+mfu .*", "", line).replace("together", "local") for line in lines]
    return [line for line in lines if " ━" not in line and not re.match(r"start-up +[\d.]+ s|  pool ", line)]


def test_placements_give_the_numbers_of_one_process(
    ray_cluster: str,
    arguments: Callable[..., list[str]],
    start_on: Start,
    train: Callable[..., Path],
    metric_lines: Lines,
    session_members: Callable[[int], list[int]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Bit for bit, validation too, with reference and critic beside the actor, in a pool of their own, and in two.

    The command line prints what it prints of a local run, line by line, but for times and the line about each pool.
    """
    together = start_on(ray_cluster, *CRITIC_AND_REFERENCE, run="together")
    capfd.readouterr()
    alone = train(*CRITIC_AND_REFERENCE, run="local")
    local_output = capfd.readouterr().out
    for name in ("grouped", "apart"):
        ray_keys = ("trainer.backend=ray", f"trainer.placement={name}")
        run(load_config(arguments(*CRITIC_AND_REFERENCE, *ray_keys, run=name)).config)
        assert metric_lines(tmp_path / name) == metric_lines(alone)
    pools = [line for line in capfd.readouterr().out.splitlines() if line.startswith("  pool ")]
    assert [line.split()[1] for line in pools] == ["policy", "scoring", "actor_rollout", "ref", "critic"]
    output = together.communicate(timeout=WAIT_S)[0]
    assert together.returncode == 0, output
    assert metric_lines(tmp_path / "together") == metric_lines(alone)
    assert without_numbers(output) == without_numbers(local_output)
    assert_nothing_left(session_members)


def test_pool_that_the_cluster_has_not(
    ray_cluster: str, arguments: Callable[..., list[str]], session_members: Callable[[int], list[int]]
) -> None:
    """It is said at once, what is there and what is missing, and nothing was started."""
    config = load_config(arguments("trainer.backend=ray", "trainer.n_gpus_per_node=9")).config
    with pytest.raises(WorkerError, match=r"resource pool all \[9\]: got .* has 8 of 8 CPU free.*: 1 CPU missing"):
        run(config)
    assert_nothing_left(session_members)


def test_interrupt(
    ray_cluster: str,
    start_on: Start,
    interrupt: Callable[[subprocess.Popen[str]], str],
    session_members: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """Ctrl-C, to the whole process group as a terminal sends it: one line says how to go on, nothing stays."""
    process = start_on(ray_cluster, *ENDLESS)
    wait_for_steps(process, tmp_path / "run", 2)
    output = interrupt(process)
    assert output.rstrip().endswith("quadriga train: interrupted")
    assert_nothing_left(session_members)
    for checkpoint in (tmp_path / "run").glob("global_step_*"):
        verify(checkpoint)


def test_killed_driver_and_killed_command(
    ray_cluster: str, start_on: Start, session_members: Callable[[int], list[int]], ray_folder: Path, tmp_path: Path
) -> None:
    """SIGKILL to the driver's process is one error; to the command, it takes the cluster with it that it started."""
    own = f"ray_kwargs.ray_init={{_temp_dir: {ray_folder / 'own'}, object_store_memory: 100000000}}"
    without_driver = start_on(ray_cluster, *ENDLESS, run="driver")
    without_command = start_on("", *ENDLESS, own, run="command")
    wait_for_steps(without_driver, tmp_path / "driver", 2)
    (host,) = [pid for pid, title in processes_of_ours(session_members).items() if title.startswith("ray::Host")]
    os.kill(host, signal.SIGKILL)
    output, _ = without_driver.communicate(timeout=WAIT_S)
    assert without_driver.returncode == 1, output
    (error,) = [line for line in output.splitlines() if line.startswith("quadriga train: ")]
    assert "the driver's process on the cluster: got it ended without a word, as after SIGKILL" in error
    assert "(raylet)" not in output and "Traceback" not in output
    assert_nothing_left(session_members)

    wait_for_steps(without_command, tmp_path / "command", 2)
    assert len(session_members(without_command.pid)) > 3
    without_command.kill()
    without_command.communicate(timeout=WAIT_S)

    def left() -> dict[int, str]:
        found = titles(session_members(without_command.pid))
        return {pid: title for pid, title in found.items() if not title.startswith(LATE)}

    wait_for(lambda: not left(), lambda: str(left()))
