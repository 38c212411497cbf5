# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation, as whole runs of the command line in this process.

What it does not prove: several processes (ray/test_data_parallel.py has those), and that a student gets as good as its
teacher (benchmarks/playground.py measures it).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main

Lines = Callable[[Path], list[dict[str, Any]]]
Train = Callable[..., Path]


@pytest.fixture
def words(teacher: Path) -> list[str]:
    """The overrides of a run by the teacher alone, one response to a prompt."""
    keys = [
        "enable=True",
        f"path={teacher}",
        "use_task_rewards=False",
        "fsdp_config.model_dtype=float32",
    ]
    optimizer = [
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.total_training_steps=12",
        "actor_rollout_ref.rollout.n=1",
    ]
    return [*(f"distillation.{key}" for key in keys), *optimizer]


def test_the_student_comes_near_its_teacher(
    train: Train, words: list[str], metric_lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    """By forward KL over likeliest tokens quickly; a teacher that rests between steps gives the same run."""
    top = ["distillation.loss_mode=forward_kl_topk", "distillation.topk=8"]
    lines = metric_lines(train(*words, *top, run="top"))
    said = capsys.readouterr().out
    assert "M parameters, float32, frozen" in said and "teacher" in said
    first, last = lines[0], lines[-1]
    assert last["actor/distillation_loss"] < 0.85 * first["actor/distillation_loss"]
    assert last["actor/student_top_mass"] > first["actor/student_top_mass"]
    assert 0 < first["actor/teacher_top_mass"] < 1
    assert all(line["actor/pg_loss"] == line["critic/advantages/max"] == 0 for line in lines)
    assert {line["critic/score/max"] for line in lines} != {0.0}, "rewards are told all the same"
    few = ("trainer.total_training_steps=3", "distillation.fsdp_config.param_offload=True")
    assert metric_lines(train(*words, *top, *few, run="again")) == lines[:3]


def test_a_policy_gradient_beside_the_rewards(
    train: Train, words: list[str], metric_lines: Lines
) -> None:
    """The divergence comes off the advantages: with a weight of next to nothing the run is the one without a teacher,
    and with one of 1 it is not. The first step sees the same student."""
    steps = [
        "distillation.use_task_rewards=True",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=2",
    ]
    plain = metric_lines(train(*words, *steps, "distillation.enable=False", run="plain"))
    light = metric_lines(train(*words, *steps, "distillation.loss_coef=1e-30", run="light"))
    full = metric_lines(train(*words, *steps, run="full"))
    assert plain[0]["actor/pg_loss"] == pytest.approx(light[0]["actor/pg_loss"], abs=1e-6)
    assert plain[1]["critic/score/mean"] == light[1]["critic/score/mean"]
    assert full[0]["actor/pg_loss"] - plain[0]["actor/pg_loss"] == pytest.approx(
        full[0]["actor/teacher_kl"], abs=1e-5
    )
    assert full[1]["actor/teacher_kl"] != light[1]["actor/teacher_kl"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["path=null"], ["distillation.path: got null", "expected a teacher"]),
        (["path=/no/such/teacher"], ["distillation.path", "expected a model's folder"]),
        (["teachers={letters: /no/such/teacher}"], ["distillation.teachers.letters", "expected a model's folder"]),
        (["path=null", "teachers={numbers: TEACHER}"], ["no teacher for the data source 'letters'", "train.parquet"]),
        (["use_policy_gradient=False"], ["distillation.loss_mode: got k1", "does not depend on the teacher"]),
        (["loss_mode=forward_kl_topk", "use_policy_gradient=True"], ["distillation.use_policy_gradient: got true"]),
        (["loss_mode=forward_kl_topk", "topk=1000"], ["distillation.topk: got 1000", "expected at most 4"]),
    ],
)  # fmt: skip
def test_what_is_refused_before_the_first_step(
    arguments: Callable[..., list[str]],
    words: list[str],
    teacher: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    parts: list[str],
) -> None:
    changes = [f"distillation.{word.replace('TEACHER', str(teacher))}" for word in overrides]
    assert main(["train", *arguments(*words, *changes)]) == 2
    error = capsys.readouterr().err
    assert [part for part in parts if part not in error] == [], error


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"], ["'kl_cov', with distillation.use_policy_gradient"]),
        (["algorithm.use_kl_in_reward=True"], ["algorithm.use_kl_in_reward: got true", "use_kl_loss=True"]),
        (["distillation.path=http://127.0.0.1:9", "actor_rollout_ref.rollout.temperature=0.6"],
         ["rollout.temperature: got 0.6, with a teacher that is a server"]),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_teacher(
    arguments: Callable[..., list[str]],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    parts: list[str],
) -> None:
    assert main(["train", *arguments(*words, *overrides)]) == 2
    error = capsys.readouterr().err
    assert [part for part in parts if part not in error] == [], error
