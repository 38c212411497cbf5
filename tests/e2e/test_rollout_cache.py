# SPDX-License-Identifier: Apache-2.0
"""`rollout.skip`: a second run takes the responses of the first, and equals it; what does not fit is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quadriga.cli.main import main

SKIP = "actor_rollout_ref.rollout.skip"
ALGORITHMS = {
    "grpo": (),
    "remax": ("algorithm.adv_estimator=remax",),
    "several updates": (
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ),
}
OF_ANSWERS = ("timing", "perf", "rollout/replayed")


def facts(lines: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in line.items() if not name.startswith(OF_ANSWERS)}
        for line in lines
    ]


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    return (
        f"{SKIP}.enable=True",
        f"{SKIP}.dump_dir={tmp_path / 'kept'}",
        "trainer.total_training_steps=3",
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_second_run_equals_the_first_without_generating(
    algorithm: str,
    options: tuple[str, ...],
    train: Callable[..., Path],
    metric_lines: Callable[..., list],
) -> None:
    """To the last bit of every metric but times, and to that of a run that keeps nothing."""
    changes = ALGORITHMS[algorithm]
    first = metric_lines(train(*options, *changes, run="first"))
    second = metric_lines(train(*options, *changes, run="second"))
    plain = metric_lines(train(*changes, options[-1], run="plain"))
    assert facts(first) == facts(second) == facts(plain)
    assert [line.get("rollout/replayed") for line in first + second] == [None] * 3 + [1.0] * 3


def test_repeated_responses(
    options: tuple[str, ...], train: Callable[..., Path], metric_lines: Callable[..., list]
) -> None:
    """Every step learns from the answers of the first."""
    lines = metric_lines(train(*options, f"{SKIP}.action=repeat"))
    assert [line.get("rollout/replayed") for line in lines] == [None, 1.0, 1.0]
    assert len({line["critic/score/mean"] for line in lines}) == 1
    # What is learned from them makes them likelier: the policy moves away from the one that sampled.
    assert lines[2]["rollout/log_prob_diff_mean"] > lines[0]["rollout/log_prob_diff_mean"]


def test_responses_to_something_else(
    options: tuple[str, ...],
    train: Callable[..., Path],
    arguments: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(*options, "trainer.total_training_steps=1", run="first")
    for change, said in (
        (
            "actor_rollout_ref.rollout.n=3",
            "got responses with actor_rollout_ref.rollout.n=2, expected ",
        ),
        (
            "data.shuffle=False",
            "got responses to other prompts, expected responses to those of step 1",
        ),
    ):
        assert main(["train", *arguments(*options, change, run="second")]) == 1
        error = capsys.readouterr().err
        assert said in error and "skip.dump_dir to another folder" in error
