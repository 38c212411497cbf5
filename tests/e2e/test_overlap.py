# SPDX-License-Identifier: Apache-2.0
"""Graders work while models compute log-probabilities and values; the numbers are those of one after the other.

What it does not prove: models that compute at the same time, which takes pools of their own (ray/test_runs.py).
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from quadriga.trainer.ray_trainer import RayPPOTrainer
from quadriga.trainer.responses import grade
from quadriga.workers import ActorRolloutRefWorker
from tests.limits import PASSES_BEGIN_S

PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
)
IN_ONE_CALL = """
def compute_score(solution_strs, ground_truths, **kwargs):
    return [{"score": s.count(t) / max(1, len(s)), "size": len(s)} for s, t in zip(solution_strs, ground_truths)]
"""
# Grades once the file beside it is there, which the step writes after grading has begun.
WAITS = """
import pathlib, time
def compute_score(**kwargs):
    (pathlib.Path(__file__).parent / "grades").touch()
    while not (pathlib.Path(__file__).parent / "goes_on").exists():
        time.sleep(0.01)
    return {"score": 1.0, "pid": __import__("os").getpid()}
"""
SLOW = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=1")
Train = Callable[..., Path]


@contextmanager
def one_after_the_other(trainer: RayPPOTrainer, batch: Any) -> Iterator[Callable[..., None]]:
    """In place of `rewards_and`: everything is waited for before the next begins."""
    trainer.record(batch)
    grade(trainer.reward, batch)
    trainer.record(batch)

    def begin(method: Callable[..., Any], *args: Any) -> None:
        result = method(*args).get()
        trainer.record(result)
        batch.union(result)

    yield begin


def before_log_probs(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Old log-probabilities are computed after `act`."""
    compute = ActorRolloutRefWorker.compute_log_prob

    @wraps(compute)
    def later(*args: Any) -> Any:
        act()
        return compute(*args)

    monkeypatch.setattr(ActorRolloutRefWorker, "compute_log_prob", later)


@pytest.mark.parametrize("manager", ["naive", "dapo", "batch", "in_process", "reward_model"])
def test_the_numbers_are_those_of_a_step_that_waits(
    manager: str,
    train: Train,
    metric_lines: Callable[..., list],
    judges: Path,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    """Every metric but the clock's, bit for bit, over PPO with critic, reference and several updates a step."""
    options = [*PPO, f"reward_model.reward_manager={manager}"]
    if manager == "reward_model":
        options = [*PPO, "reward_model.enable=True", f"reward_model.model.path={judges / 'same'}"]
    if manager == "batch":
        (tmp_path / "lists.py").write_text(IN_ONE_CALL)
        options.append(f"custom_reward_function.path={tmp_path / 'lists.py'}")
    goes_on = metric_lines(train(*options, run="goes_on"))
    monkeypatch.setattr(RayPPOTrainer, "rewards_and", one_after_the_other)
    waits = metric_lines(train(*options, run="waits"))
    assert len(waits) == 2 and goes_on == waits
    assert {"critic/values/mean", "critic/score/mean", "reward/errors"} <= waits[0].keys()
    assert ("reward/rm_score/mean" in waits[0]) == (manager == "reward_model")


def test_graders_go_on_while_models_compute(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They respond only after the models have begun; the phases have their own times, and one for all of them."""
    (tmp_path / "waits.py").write_text(WAITS)
    before_log_probs(monkeypatch, lambda: time.sleep(0.5) or (tmp_path / "goes_on").touch())
    run = train(*SLOW, f"custom_reward_function.path={tmp_path / 'waits.py'}")
    (line,) = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["critic/score/mean"] == 1.0
    assert line["timing_s/prepare"] >= 0.5 + max(
        line["timing_s/old_log_prob"], line["timing_s/reward"]
    )
    assert line["timing_s/step"] > line["timing_s/prepare"]


def test_a_step_that_fails_leaves_no_grader(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graders would work for ever; the step's own error is what is told, and when it has ended they have too."""
    (tmp_path / "waits.py").write_text(WAITS)
    left: list[int] = []
    begin, step = RayPPOTrainer.rewards_and, RayPPOTrainer.step

    @contextmanager
    def fail(trainer: RayPPOTrainer, batch: Any) -> Iterator[Any]:
        with begin(trainer, batch):
            deadline = time.monotonic() + PASSES_BEGIN_S
            while not (tmp_path / "grades").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            left.extend(process._program.process.pid for process in trainer.reward._pool._processes)
            raise OSError("the disk has gone")
            yield

    def look(trainer: RayPPOTrainer) -> Any:
        try:
            return step(trainer)
        finally:
            # At the end of the step, before the run closes what it has.
            assert left and trainer.reward._pool._processes == set()
            assert [pid for pid in left if os.path.exists(f"/proc/{pid}")] == []

    monkeypatch.setattr(RayPPOTrainer, "rewards_and", fail)
    monkeypatch.setattr(RayPPOTrainer, "step", look)
    path = f"custom_reward_function.path={tmp_path / 'waits.py'}"
    with pytest.raises(OSError, match="the disk has gone"):
        main(["train", *arguments(path, *SLOW, "reward_model.timeout_s=600")])
    assert "could not be graded" not in capsys.readouterr().err
