# SPDX-License-Identifier: Apache-2.0
"""What a step computes follows from the estimator and the configuration."""

from dataclasses import replace
from pathlib import Path

import pytest

from quadriga.config import Config
from quadriga.config.placement import enabled_roles
from quadriga.trainer.roles import Needs

ONE_UPDATE = {
    "data": {"train_batch_size": 8},
    "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}},
}
NOTHING = Needs(
    critic=False,
    greedy_baseline=False,
    reference=False,
    old_log_probs=False,
    sum_pi_squared=False,
    larger_groups=False,
)


def needs(*, actor: dict | None = None, n: int = 2, **algorithm: object) -> Needs:
    """Of a run with one update a batch, unless `actor` says otherwise."""
    tree = {
        **ONE_UPDATE,
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": 8} | (actor or {}),
            "rollout": {"n": n},
        },
        "algorithm": algorithm,
    }
    return Needs.of(Config(**tree))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", NOTHING),
        ("gae", replace(NOTHING, critic=True)),
        ("remax", replace(NOTHING, greedy_baseline=True)),
        ("optimal_token_baseline", replace(NOTHING, old_log_probs=True, sum_pi_squared=True)),
        ("tir_optimal_token_baseline", replace(NOTHING, old_log_probs=True, sum_pi_squared=True)),
    ],
)
def test_estimators_ask_for_what_they_read(estimator: str, expected: Needs) -> None:
    assert needs(adv_estimator=estimator) == expected


@pytest.mark.parametrize(("estimator", "is_said"), [("grpo", True), ("rloo", True), ("gae", False)])
def test_a_group_of_one_is_said(estimator: str, is_said: bool) -> None:
    """An estimator that reads `uid` compares the responses to one prompt; from one alone nothing is learned."""
    alone = needs(adv_estimator=estimator, n=1).describe()
    assert ("set actor_rollout_ref.rollout.n above 1" in alone.get("groups", "")) == is_said
    assert "groups" not in needs(adv_estimator=estimator).describe()


def test_estimator_of_a_users_file(tmp_path: Path) -> None:
    """Its parameters are read like those of our own."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(token_level_rewards, response_mask, values, ref_log_prob, old_log_probs):\n    pass\n"
    )
    expected = replace(NOTHING, critic=True, reference=True, old_log_probs=True)
    assert needs(adv_estimator=f"{file}:mine") == expected


def test_squares_alone_bring_the_pass_that_computes_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(token_level_rewards, response_mask, sum_pi_squared):\n    pass\n")
    asked = needs(adv_estimator=f"{file}:mine")
    assert asked == replace(NOTHING, old_log_probs=True, sum_pi_squared=True)
    assert asked.describe()["old log-probs"].startswith("recomputed")


def test_divergence_brings_the_reference() -> None:
    assert needs(actor={"use_kl_loss": True}).reference
    assert "reference" not in needs(actor={"use_kl_loss": True}).describe()
    assert "not needed" in needs().describe()["reference"]
    in_reward = needs(use_kl_in_reward=True)
    assert in_reward.reference and in_reward.old_log_probs


@pytest.mark.parametrize(
    "actor", [{"ppo_mini_batch_size": 4}, {"ppo_epochs": 2}, {"ppo_mini_batch_size": 7}]
)
def test_several_updates_need_old_log_probs(actor: dict) -> None:
    assert needs(actor=actor).old_log_probs
    assert "several updates" in needs(actor=actor).describe()["old log-probs"]


def test_a_reward_model_is_enabled() -> None:
    assert enabled_roles(Config(**ONE_UPDATE, reward_model={"enable": True})) == ["reward_model"]


def test_one_update_says_why_it_needs_none() -> None:
    """A mini-batch larger than the batch is one update too."""
    assert not needs(actor={"ppo_mini_batch_size": 64}).old_log_probs
    assert "not recomputed" in needs().describe()["old log-probs"]
