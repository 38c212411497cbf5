# SPDX-License-Identifier: Apache-2.0
"""What the tests of runs wait for: steps of a command, and the end of what it has started on a cluster."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import ray
from ray.util.placement_group import placement_group_table

from quadriga.descendants import descendants
from tests.limits import COMMAND_S


def wait_for(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Until it holds; fails with `what()` after a long time."""
    deadline = time.monotonic() + COMMAND_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def wait_for_steps(process: subprocess.Popen[str], run: Path, count: int) -> None:
    """Until so many steps are logged; fails with the output of a run that has ended."""
    metrics = run / "metrics.jsonl"

    def has_them() -> bool:
        assert process.poll() is None, process.communicate(timeout=COMMAND_S)[0]
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


def own_workers() -> list[int]:
    """The worker processes of this process's cluster: the tests may run beside others, with clusters of their own."""
    found = titles(descendants(os.getpid()))
    return [pid for pid, title in found.items() if title.startswith("ray::WorkerProcess")]


def assert_nothing_left() -> None:
    """The tests' cluster is as if there had been no run."""
    groups = placement_group_table
    wait_for(
        lambda: not own_workers() and all(one["state"] == "REMOVED" for one in groups().values()),
        lambda: f"left: {titles(own_workers())}, {groups()}",
    )
    wait_for(
        lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"],
        lambda: str(ray.available_resources()),
    )
