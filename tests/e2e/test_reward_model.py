# SPDX-License-Identifier: Apache-2.0
"""PPO with a critic and a reward model, as whole runs of the command line in this process.

What it does not prove: several processes (ray/test_data_parallel.py has those), and that a policy learns from it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from quadriga.observe.progress import step_fields

Lines = Callable[[Path], list[dict[str, Any]]]
Train = Callable[..., Path]


@pytest.fixture
def with_judge(judges: Path) -> Callable[..., list[str]]:
    """`with_judge(name)`: the overrides of PPO with a critic and that reward model alone."""
    return lambda name: [
        "algorithm.adv_estimator=gae",
        "reward_model.enable=True",
        f"reward_model.model.path={judges / name}",
        "reward_model.model.fsdp_config.model_dtype=float32",
        "reward_model.micro_batch_size_per_gpu=3",
        "custom_reward_function.path=null",
        "trainer.total_training_steps=3",
    ]


@pytest.fixture
def judged(alone: Train, with_judge: Callable[..., list[str]]) -> Path:
    """A run of the reward model with the policy's template alone."""
    return alone(*with_judge("same"), "trainer.test_freq=3")


def test_the_model_alone_grades(
    judged: Path,
    train: Train,
    with_judge: Callable,
    metric_lines: Lines,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Training and validation are by its score, and the same run again gives the same numbers."""
    first = metric_lines(judged)
    capsys.readouterr()
    again = metric_lines(train(*with_judge("same"), "trainer.test_freq=3"))
    assert again == first
    said = capsys.readouterr().out
    assert (
        "one tokenizer for both, up to 96 tokens" in said
        and "M parameters, float32, frozen" in said
    )
    assert len(first) == 3
    for line in first:
        assert line["critic/score/mean"] == pytest.approx(line["reward/rm_score/mean"], abs=1e-6)
        assert (
            line["reward/rm_score/min"] < line["reward/rm_score/mean"] < line["reward/rm_score/max"]
        )
        assert line["reward/rule_score/mean"] == line["reward/rm_cut"] == line["reward/errors"] == 0
        assert "critic/values/mean" in line
        assert {"critic", "explained"} <= step_fields(line).keys()
    rows = [json.loads(line) for line in (judged / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert sum(row["rm_score"] for row in rows) / len(rows) == pytest.approx(
        first[0]["critic/score/mean"], abs=1e-6
    )
    assert all(row["rm_score"] == row["score"] for row in rows)
    assert (
        first[-1]["val-core/letters/reward/mean@1"]
        == first[-1]["val-aux/letters/rm_score/mean@1"]
        != 0
    )


def test_another_template_is_rendered_and_long_inputs_are_cut(
    judged: Path,
    train: Train,
    with_judge: Callable,
    metric_lines: Lines,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same weights say something else of the same answers in their own template; ReMax asks for the greedy ones."""
    plain = metric_lines(judged)
    other = metric_lines(train(*with_judge("other"), run="other"))
    said = capsys.readouterr().out
    assert "chats rendered by its own template: its chat template is not the policy's" in said
    assert other[0]["response_length/mean"] == plain[0]["response_length/mean"]
    assert other[0]["reward/rm_score/mean"] != plain[0]["reward/rm_score/mean"]
    cut = ["reward_model.max_length=12", "algorithm.adv_estimator=remax"]
    (line, *_) = metric_lines(train(*with_judge("other"), *cut, run="cut"))
    assert line["reward/rm_cut"] == 8
    assert line["reward/rm_score/mean"] != other[0]["reward/rm_score/mean"]


def test_a_function_is_added_to_the_model(
    judged: Path, train: Train, with_judge: Callable, metric_lines: Lines, tmp_path: Path
) -> None:
    file = tmp_path / "length.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 2.0\n"
    )
    (alone, *_) = metric_lines(judged)
    (both, *_) = metric_lines(
        train(*with_judge("same"), f"custom_reward_function.path={file}", run="both")
    )
    assert both["reward/rm_score/mean"] == alone["reward/rm_score/mean"]
    assert both["reward/rule_score/mean"] == both["reward/rule_score/min"] == 2.0
    assert both["critic/score/mean"] == pytest.approx(alone["critic/score/mean"] + 2.0, abs=1e-6)


def test_evaluation_grades_with_the_model_too(
    arguments: Callable[..., list[str]],
    with_judge: Callable,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", str(home / "model"), *arguments(*with_judge("same"))]) == 0
    numbers = dict(
        line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("val-")
    )
    assert (
        float(numbers["val-core/letters/reward/mean@1"])
        == float(numbers["val-aux/letters/rm_score/mean@1"])
        != 0
    )


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["reward_model.model.path=HOME/model"],
         ["reward_model.model.path", "LlamaForCausalLM: it has no classification head"]),
        (["reward_model.model.path=null"], ["reward_model.model.path: got null", "expected a reward model"]),
        (["reward_model.model.path=/no/such/judge"], ["reward_model.model.path", "expected a model's folder"]),
        (["reward_model.max_length=1000"], ["reward_model.max_length: got 1000, expected at most 96"]),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_loaded(
    arguments: Callable[..., list[str]],
    with_judge: Callable,
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    parts: list[str],
) -> None:
    words = [word.replace("HOME", str(home)) for word in overrides]
    assert main(["train", *arguments(*with_judge("same"), *words)]) == 2
    error = capsys.readouterr().err
    assert [part for part in parts if part not in error] == [], error
    assert not (tmp_path / "run").exists()
