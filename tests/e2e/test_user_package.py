# SPDX-License-Identifier: Apache-2.0
"""A user's package in the working directory: losses, estimators and managers it registers, and its coroutine reward."""

from collections.abc import Callable
from pathlib import Path

import pytest

LIBRARY = """
from quadriga.algorithms import get_adv_estimator_fn, get_policy_loss_fn, register_adv_est, register_policy_loss
from quadriga.rewards import NaiveRewardManager, register


@register_adv_est("PACKAGE_group")
def of_the_group(token_level_rewards, response_mask, index):
    return get_adv_estimator_fn("grpo")(token_level_rewards, response_mask, index)


@register_policy_loss("PACKAGE_loss")
def halved_twice(old_log_prob, log_prob, advantages, response_mask, *, clip_ratio_low, clip_ratio_high, clip_ratio_c):
    bounds = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high, "clip_ratio_c": clip_ratio_c}
    losses, told = get_policy_loss_fn("vanilla")(old_log_prob, log_prob, advantages, response_mask, **bounds)
    return losses * 0.5 * 2.0, told


@register("PACKAGE_manager")
class Patient(NaiveRewardManager):
    pass
"""

REWARD = """
import asyncio

from {package}.words import score


async def compute_score(solution_str, ground_truth, scale, **sample):
    await asyncio.sleep(0.01)
    return score(solution_str) * scale
"""

PLAIN = "def compute_score(solution_str, scale, **sample):\n    return (len(solution_str) % 7) * scale\n"
WORDS = "def score(text):\n    return len(text) % 7\n"


@pytest.mark.parametrize(("mode", "package"), [("sync", "own_sync"), ("async", "own_async")])
def test_a_package_of_the_working_directory(
    mode: str,
    package: str,
    train: Callable[..., Path],
    metric_lines: Callable[..., list],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it registers is chosen by name, in each process; the numbers are those of the built-in parts."""
    (tmp_path / package).mkdir()
    for name, text in (
        ("library", LIBRARY.replace("PACKAGE", package)),
        ("reward", REWARD.format(package=package)),
        ("words", WORDS),
    ):
        (tmp_path / package / f"{name}.py").write_text(text)
    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    common = (
        f"actor_rollout_ref.rollout.mode={mode}",
        "data.return_raw_chat=True",
        "trainer.total_training_steps=2",
        "custom_reward_function.reward_kwargs.scale=0.5",
        "actor_rollout_ref.rollout.n=4",
    )
    plain = metric_lines(
        train(
            *common,
            "custom_reward_function.path=plain.py",
            "algorithm.adv_estimator=grpo",
            run="plain",
        )
    )
    own = metric_lines(
        train(
            *common,
            f"actor_rollout_ref.model.external_lib={package}.library",
            f"custom_reward_function.path=pkg://{package}.reward",
            f"algorithm.adv_estimator={package}_group",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={package}_loss",
            f"reward_model.reward_manager={package}_manager",
            run="own",
        )
    )
    # How conversations overlapped in time is measured too.
    own, plain = [
        [
            {name: value for name, value in step.items() if not name.startswith("rollout/")}
            for step in run
        ]
        for run in (own, plain)
    ]
    assert own == plain
    assert plain[0]["critic/score/max"] > 0
