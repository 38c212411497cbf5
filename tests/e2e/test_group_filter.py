# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: a step takes as many batches of prompts as it needs, and a resumed run takes the same ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quadriga.cli.main import main
from quadriga.models.weight_files import open_weights

# Right or wrong: about half of all pairs of answers are equal.
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Whether an early letter of the alphabet is there."""
    is_there = any(letter in solution_str for letter in "abcd")
    return {"score": float(is_there), "num_letters": len(solution_str), "text": solution_str}
'''
NUM_STEPS = 5
SWITCH = "algorithm.filter_groups.enable=True"


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "early.py").write_text(REWARD)
    return (
        f"custom_reward_function.path={tmp_path / 'early.py'}",
        SWITCH,
        "data.shuffle=True",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.rollout_data_dir={tmp_path / 'rows'}",
        "trainer.save_freq=1",
    )


def weights(run: Path) -> dict[str, torch.Tensor]:
    files = open_weights(run / f"global_step_{NUM_STEPS}" / "actor")
    return {name: files.read(name) for name in files.shapes}


def test_batch_is_full_of_groups_that_differ(
    options: tuple[str, ...],
    train: Callable[..., Path],
    metric_lines: Callable[..., list],
    tmp_path: Path,
) -> None:
    lines = metric_lines(train(*options))
    assert len(lines) == NUM_STEPS
    for line in lines:
        rows = [
            json.loads(row)
            for row in (tmp_path / "rows" / f"{line['step']}.jsonl").read_text().splitlines()
        ]
        groups: dict[str, list[float]] = {}
        for row in rows:
            groups.setdefault(row["uid"], []).append(row["score"])
        # Four prompts of two answers each, in the order of their prompts, one right and one wrong.
        assert list(map(sorted, groups.values())) == [[0.0, 1.0]] * 4
        numbers = [int(uid.rpartition("-")[2]) for uid in groups]
        assert numbers == sorted(numbers) and max(numbers) < line["filter_groups/num_groups"]
        assert line["critic/score/mean"] == 0.5
        assert line["filter_groups/num_groups"] == 4 * line["filter_groups/num_batches"]
        kept = line["filter_groups/num_groups"] - line["filter_groups/num_equal"]
        assert kept == 4 + line["filter_groups/num_surplus"]
    assert max(line["filter_groups/num_batches"] for line in lines) > 1
    # 10 rows in batches of 4 are two batches an epoch: epochs are counted by batches, not by steps.
    num_batches = sum(line["filter_groups/num_batches"] for line in lines)
    assert lines[-1]["training/epoch"] == (num_batches - 1) // 2


def test_passes_end_the_run_and_its_schedule(
    options: tuple[str, ...], train: Callable[..., Path], metric_lines: Callable[..., list]
) -> None:
    """It ends with the step that takes the last batch of the last pass: there are a checkpoint and a rate of 0."""
    passes = ("trainer.total_training_steps=null", "trainer.total_epochs=3", "trainer.save_freq=99")
    falls = "actor_rollout_ref.actor.optim.lr_scheduler_type=linear"
    run = train(*options, *passes, falls)
    lines = metric_lines(run)
    counts = [line["filter_groups/num_batches"] for line in lines]
    assert sum(counts[:-1]) < 3 * 2 <= sum(counts) and max(counts) > 1
    rates = [line["actor/lr"] for line in lines]
    assert rates == sorted(rates, reverse=True) and rates[-1] == 0.0 and rates[-2] > 0.0
    assert (run / f"global_step_{len(lines)}").is_dir()


def test_resumed_run_takes_the_same_prompts(
    options: tuple[str, ...], train: Callable[..., Path], metric_lines: Callable[..., list]
) -> None:
    """From every checkpoint, the end of the run is that of the run left alone."""
    alone = train(*options, run="alone")
    for first in range(1, NUM_STEPS):
        source = (
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={alone / f'global_step_{first}'}",
        )
        resumed = train(*options, *source, run=f"from {first}")
        assert metric_lines(resumed) == [
            line for line in metric_lines(alone) if line["step"] > first
        ]
        one, other = weights(resumed), weights(alone)
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_batch_that_does_not_fill(
    options: tuple[str, ...],
    arguments: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """It says what was compared, what was found, and what to do; nothing goes on with less."""
    (tmp_path / "early.py").write_text("def compute_score(**sample):\n    return 1.0\n")
    assert (
        main(["train", *arguments(*options, "algorithm.filter_groups.max_num_gen_batches=3")]) == 1
    )
    said = capsys.readouterr().err
    assert (
        "algorithm.filter_groups: got 0 groups of responses that differ in score after 3 batches of prompts"
        in said
    )
    assert "(12 groups, 12 of them equal: 12 with 1), expected 4, data.train_batch_size" in said
    assert "raise algorithm.filter_groups.max_num_gen_batches" in said


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            "accuracy",
            "metric=accuracy: got graders that return num_letters, text, expected score, or a number",
        ),
        ("text", "metric=text: got str "),
    ],
)
def test_metric_that_no_grader_gives(
    metric: str,
    said: str,
    options: tuple[str, ...],
    arguments: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", *arguments(*options, f"algorithm.filter_groups.metric={metric}")]) == 1
    assert f"algorithm.filter_groups.{said}" in capsys.readouterr().err
