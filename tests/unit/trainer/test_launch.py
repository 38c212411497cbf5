# SPDX-License-Identifier: Apache-2.0
"""Where a run runs, and what is said where Ray is not installed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.config import load_config
from quadriga.errors import ConfigError
from quadriga.openmp import WAIT_POLICY
from quadriga.trainer import launch
from quadriga.trainer.launch import run_ppo
from quadriga.trainer.task_runner import how_to_go_on, what_next, what_next_in_python


def test_without_ray_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("ray.", "quadriga.single_controller.ray"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"'ray', which is not installed here.*pip install -e '\.\[ray\]'"
    ):
        run_ppo(load_config(["trainer.backend=ray"]).config)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (load_config(["trainer.backend=ray", "trainer.resource_pools.all=[2,1]"]).config, (3, 2)),
        (load_config(["trainer.backend=ray", "trainer.nnodes=2"], task="sft").config, (2, 2)),
    ],
)
def test_a_cluster_is_told_what_to_run_and_how_many_processes(
    config: Any, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list stands in for the cluster and the run: that one runs there is tested where there is Ray."""
    events: list[Any] = []

    @contextmanager
    def connected(
        arguments: Any, count: int, timeline_file: str | None, num_nodes: int
    ) -> Iterator[None]:
        events.append((count, num_nodes))
        yield
        events.append("left")

    def steps(*arguments: Any) -> Iterator[SimpleNamespace]:
        events.append(arguments)
        yield SimpleNamespace(number=1)

    runner = SimpleNamespace(steps=steps)
    known = {launch.CLUSTER: connected, "torch": None, launch.RUNNER: lambda: runner}
    policies: list[str | None] = []
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    monkeypatch.setattr(
        launch,
        "_load",
        lambda name: (policies.append(os.environ.get(WAIT_POLICY)), known[name])[1],
    )
    run_ppo(config)
    found, (configuration, start_up, _), left = events
    assert (found, configuration, left) == (size, config, "left")
    assert policies[:2] == ["PASSIVE"] * 2, "as Ray and torch are loaded"
    assert set(policies[2:]) == {None}, "not for what starts then"
    rows = [line.split()[0] for line in start_up.render().splitlines()]
    assert rows == ["start-up", "imports", "cluster", "modules"]


def test_the_end_of_a_run_says_what_can_be_done_with_it() -> None:
    made = ["trainer.default_local_dir=runs/a"]
    config = load_config([*made, "data.val_files=v.jsonl", "trainer.total_training_steps=3"]).config
    said = what_next(config, 3)
    for words in (
        "step 3",
        "eval runs/a --config runs/a/config.yaml\n",
        "export runs/a",
        "trainer.total_training_steps",
    ):
        assert words in said
    said = what_next(load_config(made).config, 3)
    assert "config.yaml data.val_files=FILE" in said
    assert "trainer.total_epochs goes on" in said
    assert "without a checkpoint; trainer.save_freq=N" in what_next(config, None)
    supervised = load_config(made, task="sft").config
    assert what_next(supervised, None).endswith(
        "quadriga train --config FILE actor_rollout_ref.model.path=runs/a/model"
    )
    scores = load_config([*made, "task=reward_model"]).config
    assert what_next(scores, None).endswith(
        "reward_model.enable=True reward_model.model.path=runs/a/model"
    )


def test_after_a_run_from_python_the_calls_are_named(tmp_path: Path) -> None:
    options = [f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=3"]
    config = load_config(options).config
    opened = f"quadriga.Run('{tmp_path}')"
    text = what_next_in_python(config, 3)
    assert opened in text
    assert "run.resume(steps=6) takes 3 more steps" in text
    assert 'options={"trainer.save_freq": N}' in how_to_go_on(config, in_python=True)
    (tmp_path / "global_step_2").mkdir()
    assert how_to_go_on(config, in_python=True).startswith(f"{opened}.resume(steps=3) goes on")
    assert how_to_go_on(config).startswith("The same command goes on")


def test_a_checkpoint_that_is_not_due_yet_is_not_advised(tmp_path: Path) -> None:
    options = [f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=5"]
    assert how_to_go_on(load_config(options).config).endswith("the first is due after step 5.")


def test_until_it_is_known_where_neither_torch_nor_ray_is_loaded() -> None:
    """The command line that starts a cluster does not wait for torch before it does."""
    program = (
        "import sys, quadriga.cli.train, quadriga.trainer.launch\n"
        "sys.exit(' '.join(name for name in ('torch', 'ray', 'omegaconf') if name in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
