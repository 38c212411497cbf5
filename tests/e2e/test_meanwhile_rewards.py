# SPDX-License-Identifier: Apache-2.0
"""`reward_model.launch_reward_fn_async`: graders work while a step goes on to the values; the numbers stay.

What it does not prove: a run on Ray, where the same driver does the same.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from quadriga.trainer.ray_trainer import RayPPOTrainer

MEANWHILE = "reward_model.launch_reward_fn_async=True"
PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.total_training_steps=3",
    "trainer.test_freq=3",
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
Train = Callable[..., Path]


@pytest.mark.parametrize("manager", ["naive", "dapo", "batch"])
def test_the_numbers_are_those_of_a_step_that_waits(
    manager: str, train: Train, metric_lines: Callable[..., list], tmp_path: Path
) -> None:
    """Every metric but the clock's, bit for bit, over PPO with critic, reference and several updates a step."""
    options = [*PPO, f"reward_model.reward_manager={manager}"]
    if manager == "batch":
        (tmp_path / "lists.py").write_text(IN_ONE_CALL)
        options.append(f"custom_reward_function.path={tmp_path / 'lists.py'}")
    waits = metric_lines(train(*options, run="waits"))
    goes_on = metric_lines(train(*options, MEANWHILE, run="goes_on"))
    assert len(waits) == 3 and goes_on == waits
    assert {"critic/values/mean", "critic/score/mean", "reward/errors"} <= waits[0].keys()


def test_a_reward_model_scores_while_graders_work(
    train: Train, metric_lines: Callable[..., list], judges: Path
) -> None:
    """Their sum, and each of them, bit for bit."""
    options = [*PPO, "reward_model.enable=True", f"reward_model.model.path={judges / 'same'}"]
    waits = metric_lines(train(*options, run="waits"))
    assert metric_lines(train(*options, MEANWHILE, run="goes_on")) == waits
    assert {"reward/rm_score/mean", "reward/rule_score/mean"} <= waits[0].keys()


def test_the_step_goes_on_and_tells_how_long_it_waited(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graders answer only after the step has come to its old log-probabilities, which take long."""
    (tmp_path / "waits.py").write_text(WAITS)
    compute = RayPPOTrainer.compute_old_log_probs

    def slowly(trainer: RayPPOTrainer, batch: Any) -> None:
        (tmp_path / "goes_on").touch()
        assert "token_level_scores" not in batch.batch.keys()
        deadline = time.monotonic() + 60
        while trainer.reward._pool._idle == [] and time.monotonic() < deadline:
            time.sleep(0.01)  # until the graders are done
        with trainer.timer.phase("slow"):
            compute(trainer, batch)

    monkeypatch.setattr(RayPPOTrainer, "compute_old_log_probs", slowly)
    run = train(
        MEANWHILE,
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"custom_reward_function.path={tmp_path / 'waits.py'}",
        "trainer.total_training_steps=1",
    )
    (line,) = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["critic/score/mean"] == 1.0
    assert 0 < line["timing_s/reward"] < 0.5


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["train", *arguments]) == 1
    return capsys.readouterr().err


def test_an_error_has_the_same_words_at_the_join(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More answers than may fail could not be graded."""
    (tmp_path / "fails.py").write_text("def compute_score(**kwargs):\n    raise LookupError('no such answer')\n")
    wrong = f"custom_reward_function.path={tmp_path / 'fails.py'}"
    waits = refusal(arguments(wrong, run="waits"), capsys)
    goes_on = refusal(arguments(wrong, MEANWHILE, run="goes_on"), capsys)
    assert "8 samples could not be graded" in waits and "LookupError: no such answer" in waits

    def words(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("notice: ")]

    assert words(goes_on) == words(waits)


def test_a_step_that_fails_leaves_no_grader(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graders would work for ever; the step's own error is what is told, and when it has ended they have too."""
    (tmp_path / "waits.py").write_text(WAITS)
    left: list[int] = []

    def fail(trainer: RayPPOTrainer, batch: Any) -> None:
        assert "token_level_scores" not in batch.batch.keys()
        deadline = time.monotonic() + 60
        while not (tmp_path / "grades").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        left.extend(process.process.pid for process in trainer.reward._pool._processes)
        raise OSError("the disk has gone")

    step = RayPPOTrainer.step

    def look(trainer: RayPPOTrainer) -> Any:
        try:
            return step(trainer)
        finally:
            # At the end of the step, before the run closes what it has.
            assert left and trainer.reward._pool._processes == set()
            assert [pid for pid in left if os.path.exists(f"/proc/{pid}")] == []

    monkeypatch.setattr(RayPPOTrainer, "compute_old_log_probs", fail)
    monkeypatch.setattr(RayPPOTrainer, "step", look)
    path = f"custom_reward_function.path={tmp_path / 'waits.py'}"
    with pytest.raises(OSError, match="the disk has gone"):
        main(
            [
                "train",
                *arguments(
                    path, MEANWHILE, "actor_rollout_ref.actor.ppo_mini_batch_size=2", "reward_model.timeout_s=600"
                ),
            ]
        )
    assert "could not be graded" not in capsys.readouterr().err


def test_answers_of_conversations_are_graded_where_they_are_generated(
    train: Train, metric_lines: Callable[..., list], capsys: pytest.CaptureFixture[str]
) -> None:
    """The key then changes nothing, and the run says so; nor where dynamic sampling asks for the rewards."""
    tasks = ("actor_rollout_ref.rollout.mode=async", "data.return_raw_chat=True", "trainer.total_training_steps=1")
    (early,) = metric_lines(train(*tasks, run="early"))
    capsys.readouterr()
    (both,) = metric_lines(train(*tasks, MEANWHILE, run="both"))
    # The rollout's own numbers depend, in their last bits, on which conversations were computed together.
    of_step = {name for name in early if not name.startswith("rollout/")}
    assert {name: both[name] for name in of_step} == {name: early[name] for name in of_step}
    assert "grade each response while more are being generated" in capsys.readouterr().err
    groups = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score")
    train(*groups, MEANWHILE, "trainer.total_training_steps=1", run="filtered")
    assert "algorithm.filter_groups needs rewards before the batch of a step is full" in capsys.readouterr().err
