# SPDX-License-Identifier: Apache-2.0
"""`rollout.mode=async`: every sample is a task of its own, graded while others are being written; the numbers stay."""

from collections.abc import Callable
from pathlib import Path

import pytest

ASYNC = ("actor_rollout_ref.rollout.mode=async", "data.return_raw_chat=True")
GRADED_LATER = ("reward/", "rollout/", "timing", "perf", "num_turns")


@pytest.mark.parametrize("manager", ["naive", "dapo"])
def test_conversations_of_one_turn_are_the_batch(
    manager: str, train: Callable[..., Path], metric_lines: Callable[..., list]
) -> None:
    """The same tokens from the same seeds, and the same rewards, so the same training and validation."""
    options = (
        f"reward_model.reward_manager={manager}",
        "trainer.test_freq=1",
        "trainer.total_training_steps=3",
    )
    batch = metric_lines(train(*options, run="batch"))
    tasks = metric_lines(train(*options, *ASYNC, run="tasks"))
    for one, other in zip(batch, tasks, strict=True):
        known = {name for name in one if not name.startswith(GRADED_LATER)}
        assert {name: other[name] for name in known} == {name: one[name] for name in known}
        assert other["reward/errors"] == one["reward/errors"] == 0.0
        assert other["num_turns/max"] == 1.0


def test_kept_conversations_are_graded_anew(
    train: Callable[..., Path], metric_lines: Callable[..., list], tmp_path: Path
) -> None:
    """Another reward function sees the answers of the first run."""
    skip = "actor_rollout_ref.rollout.skip"
    options = (
        *ASYNC,
        f"{skip}.enable=True",
        f"{skip}.dump_dir={tmp_path / 'kept'}",
        "trainer.total_training_steps=1",
    )
    (first,) = metric_lines(train(*options, run="first"))
    (tmp_path / "other.py").write_text(
        "def compute_score(extra_info, **sample):\n    return 5.0 * extra_info['num_turns']\n"
    )
    (again,) = metric_lines(
        train(*options, f"custom_reward_function.path={tmp_path / 'other.py'}", run="again")
    )
    assert again["critic/score/mean"] == 5.0 != first["critic/score/mean"]
    assert again["response_length/mean"] == first["response_length/mean"]
