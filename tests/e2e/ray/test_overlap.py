# SPDX-License-Identifier: Apache-2.0
"""Models on pools of their own compute at the same time, with the numbers of one process; what becomes of it if one
fails.

What it does not prove: how much time that saves (benchmarks/overlap.py measures it).
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quadriga.config import load_config
from quadriga.errors import WorkerError
from quadriga.trainer.task_runner import TaskRunner
from quadriga.workers import ActorRolloutRefWorker, CriticWorker
from watching import assert_nothing_left

APART = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True", "trainer.backend=ray")
# In the workers: each pass of the first step returns once all have begun; with FAILS the reference raises then, and the
# others have no end.
TOGETHER = """
import os, pathlib, time
from functools import wraps
from quadriga.workers import ActorRolloutRefWorker, CriticWorker

HERE, FAILS = pathlib.Path(__file__).parent, {fails}

def meets(compute, others):
    @wraps(compute)
    def begun(*args):
        (HERE / compute.__name__).touch()
        deadline = time.monotonic() + 100
        while not all((HERE / name).exists() for name in others):
            assert time.monotonic() < deadline, "the others have not begun"
            time.sleep(0.01)
        if FAILS and compute.__name__ == "compute_ref_log_prob":
            raise ValueError("the reference has no opinion")
        while FAILS:
            time.sleep(0.1)
        return compute(*args)
    return begun

PASSES = {{ActorRolloutRefWorker: ("compute_log_prob", "compute_ref_log_prob"), CriticWorker: ("compute_values",)}}
NAMES = [name for names in PASSES.values() for name in names]
for worker, names in PASSES.items():
    for name in names:
        setattr(worker, name, meets(getattr(worker, name), NAMES))
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver, which is this process, loads the file too: what it changes here ends with the test."""
    for name in ("compute_log_prob", "compute_ref_log_prob"):
        monkeypatch.setattr(ActorRolloutRefWorker, name, getattr(ActorRolloutRefWorker, name))
    monkeypatch.setattr(CriticWorker, "compute_values", CriticWorker.compute_values)


def patched(folder: Path, *, fails: bool) -> str:
    """The override with which the workers meet."""
    (folder / "together.py").write_text(TOGETHER.format(fails=fails))
    return f"actor_rollout_ref.model.external_lib={folder / 'together.py'}"


def test_three_pools_compute_at_the_same_time(
    ray_cluster: str, train: Callable[..., Path], metric_lines: Callable[..., list], tmp_path: Path
) -> None:
    """Each pass waits until the two others have begun: one after the other, the first would wait in vain."""
    passes = (*APART, "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=2")
    alone = train(*passes, "trainer.backend=local", run="alone")
    run = train(*passes, "trainer.placement=apart", patched(tmp_path, fails=False))
    assert metric_lines(run) == metric_lines(alone)
    first, *_ = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    passes_s = [first[f"timing_s/{name}"] for name in ("old_log_prob", "ref", "values")]
    assert 0 < max(passes_s) <= first["timing_s/prepare"]


def test_the_first_role_that_fails_is_named_and_nothing_goes_on(
    ray_cluster: str,
    arguments: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    """The two others would compute for ever, and the actor is waited for first."""
    passes = (*APART, "trainer.placement=apart", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    config = load_config(arguments(*passes, patched(tmp_path, fails=True))).config
    with pytest.raises(WorkerError, match=r"^ref\[rank 0/1 .*compute_ref_log_prob.*the reference has no opinion"):
        TaskRunner().run(config)
    assert_nothing_left()
