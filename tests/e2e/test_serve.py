# SPDX-License-Identifier: Apache-2.0
"""The policy served inside training: an agent behind HTTP gives the trainer what it samples."""

from collections.abc import Callable
from pathlib import Path

from tests.e2e.served import options, recorded


def test_an_agent_behind_the_server_is_trained_on(
    train: Callable[..., Path], metric_lines: Callable[..., list], tmp_path: Path
) -> None:
    """Its log-probs are the trainer's, its tokens those of the newest weights."""
    lines = metric_lines(train(*options(tmp_path, tmp_path / "run")))
    assert len(lines) == 2
    for line in lines:
        assert line["rollout/log_prob_diff_max"] < 1e-5
        assert line["response_length/mean"] > 1
    calls = recorded(tmp_path)
    assert {version for call in calls for version in call["versions"]} == {0, 1}
    assert all(call["sampled_log_probs"] == call["log_probs"] for call in calls)
    assert not (tmp_path / "run" / "server.json").exists()


def test_asynchronous_training_knows_the_versions_of_served_tokens(
    train: Callable[..., Path], metric_lines: Callable[..., list], tmp_path: Path
) -> None:
    """The engine answers while the models train, and its tokens have their staleness."""
    overrides = (
        *options(tmp_path, tmp_path / "run"),
        "async_training.enable=True",
        "async_training.preset=one_step_off",
    )
    lines = metric_lines(train(*overrides, "trainer.total_training_steps=3"))
    # How stale they are depends on which of the two is faster.
    assert all(0 <= line["async/staleness_max"] <= 1 for line in lines)
    assert all(line["rollout/log_prob_diff_max"] < 1e-5 for line in lines[:1])
