# SPDX-License-Identifier: Apache-2.0
"""Where a run runs, and what is said where Ray is not installed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.config import Config, load_config
from quadriga.errors import ConfigError, DataError, EngineError, PeerLostError, QuadrigaError, WorkerError
from quadriga.trainer import launch
from quadriga.trainer.launch import run_ppo
from quadriga.trainer.task_runner import TaskRunner


def test_without_ray_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("ray.", "quadriga.single_controller.ray"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"'ray', which is not installed here.*pip install -e '\.\[ray\]'"):
        run_ppo(load_config(["trainer.backend=ray"]).config)


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [
        (load_config(["trainer.backend=ray", "trainer.resource_pools.all=[2,1]"]).config, 3),
        (load_config(["trainer.backend=ray", "trainer.nnodes=2"], task="sft").config, 2),
    ],
)
def test_a_cluster_is_told_what_to_run_and_how_many_processes(
    config: Any, num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list stands in for the cluster and the run: that one runs there is tested where there is Ray."""
    events: list[Any] = []

    @contextmanager
    def connected(arguments: Any, count: int, timeline_file: str | None) -> Iterator[None]:
        events.append(count)
        yield
        events.append("left")

    runner = SimpleNamespace(run=lambda *arguments: events.append(arguments))
    known = {launch.CLUSTER: connected, launch.RUNNER: lambda: runner}
    monkeypatch.setattr(launch, "_load", known.__getitem__)
    run_ppo(config)
    count, (configuration, start_up), left = events
    assert (count, configuration, left) == (num_processes, config, "left")
    assert [name for name, _ in start_up] == ["cluster", "modules"]


def test_until_it_is_known_where_neither_torch_nor_ray_is_loaded() -> None:
    """The command line that starts a cluster does not wait for torch before it does."""
    program = (
        "import sys, quadriga.cli.train, quadriga.trainer.launch\n"
        "sys.exit(' '.join(name for name in ('torch', 'ray') if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "worker", "is_lost"),
    [
        (WorkerError("actor"), "actor[rank 0/1 on 10.0.0.2]", True),
        (PeerLostError("collective"), "actor[rank 1/2 on 10.0.0.2]", True),
        (WorkerError("resource pool all"), "", False),
        (EngineError("prompts"), "actor[rank 0/1 on 10.0.0.2]", False),
        (DataError("data.train_files"), "", False),
    ],
)
def test_which_errors_a_restart_may_get_over(
    error: QuadrigaError,
    worker: str,
    is_lost: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run begins anew, from its own last checkpoint; as often as `trainer.max_worker_restarts` says."""
    error.worker = worker
    places: list[str | None] = []

    def fails(runner: TaskRunner, config: Any, timeline: Any) -> None:
        places.append(config.trainer.resume_from_path)
        runner._saved = 3
        raise error

    monkeypatch.setattr(TaskRunner, "_train", fails)
    trainer = {"backend": "ray", "default_local_dir": str(tmp_path), "max_worker_restarts": 2}
    with pytest.raises(type(error)):
        TaskRunner().run(Config(trainer=trainer))
    resumed = str(tmp_path / "global_step_3")
    assert places == ([None, resumed, resumed] if is_lost else [None])
    assert ("1 restart left after this" in capsys.readouterr().out) == is_lost
