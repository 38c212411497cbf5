# SPDX-License-Identifier: Apache-2.0
"""The batch arithmetic and its words; numbers computed by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.config import (
    BatchPlan,
    explain,
    keys_text,
    load_config,
    needs_old_log_prob_pass,
    needs_reference,
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def config(*overrides: str):
    return load_config(overrides).config


def test_the_plan_of_a_step() -> None:
    # 10 prompts x 3 answers; mini-batches of 4, 4 and 2 prompts, twice over; 12 sequences in micro-batches of 5.
    plan = BatchPlan(
        config("data.train_batch_size=10", f"{ROLLOUT}.n=3", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=2",
               f"{ACTOR}.ppo_micro_batch_size_per_gpu=5")
    )  # fmt: skip
    assert (plan.num_prompts, plan.num_sequences) == (10, 30)
    assert (plan.num_mini_batches, plan.num_optimizer_steps) == (3, 6)
    assert (plan.mini_batch_sequences, plan.micro_batch_sequences, plan.num_micro_batches) == (
        12,
        5,
        3,
    )
    assert plan.max_sequence_tokens == 1024
    assert not plan.is_on_policy


@given(
    prompts=st.integers(1, 40),
    answers=st.integers(1, 5),
    mini=st.integers(1, 50),
    micro=st.integers(1, 30),
)
@settings(deadline=None, max_examples=30)
def test_the_plan_counts_what_cutting_gives(
    prompts: int, answers: int, mini: int, micro: int
) -> None:
    plan = BatchPlan(
        config(f"data.train_batch_size={prompts}", f"{ROLLOUT}.n={answers}", f"{ACTOR}.ppo_mini_batch_size={mini}",
               f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro}")
    )  # fmt: skip
    minis = [range(prompts)[start : start + mini] for start in range(0, prompts, mini)]
    assert plan.num_mini_batches == len(minis)
    assert plan.mini_batch_sequences == len(minis[0]) * answers
    assert plan.num_micro_batches == len(range(0, len(minis[0]) * answers, micro))
    assert plan.is_on_policy == (len(minis) == 1)


@pytest.mark.parametrize(
    ("overrides", "needs_pass", "needs_model"),
    [
        ([], False, False),
        ([f"{ACTOR}.use_kl_loss=True"], False, True),
        (["algorithm.use_kl_in_reward=True"], True, True),
        ([f"{ACTOR}.ppo_epochs=2"], True, False),
        ([f"{ACTOR}.ppo_mini_batch_size=8"], True, False),
        ([f"{ACTOR}.ppo_mini_batch_size=64"], False, False),
    ],
)
def test_which_passes_a_step_needs(
    overrides: list[str], needs_pass: bool, needs_model: bool
) -> None:
    found = config("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16", *overrides)
    assert needs_old_log_prob_pass(found) == needs_pass
    assert needs_reference(found) == needs_model
    text = explain(found)
    assert ("no separate pass" in text) == (not needs_pass)
    assert ("reference model: not needed" in text) == (not needs_model)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.rollout_correction.preset=decoupled_token_is"], "off-policy correction"),
        ([f"{ACTOR}.router_replay=old_log_prob"], "repeats the routes"),
        (
            ["algorithm.rollout_correction.preset=bypass_ppo_clip", f"{ACTOR}.ppo_epochs=2"],
            "no separate pass (bypass mode",
        ),
    ],
)
def test_the_pass_for_old_log_probs_has_its_own_reason(overrides: list[str], reason: str) -> None:
    found = config("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16", *overrides)
    (line,) = [line for line in explain(found).splitlines() if "old log-probs:" in line]
    assert reason in line


def test_the_reference_of_an_adapter() -> None:
    """It is the actor, unless it has a pool of its own."""
    words = (f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.model.lora_rank=4")
    assert "one pass per step, for the loss, by the actor with its adapter off" in explain(
        config(*words)
    )
    assert "adapter" not in explain(config(*words[:1]))
    assert "adapter" not in explain(
        config(*words, "trainer.placement=apart", "trainer.backend=ray")
    )


def test_the_words() -> None:
    text = explain(
        config("data.train_batch_size=16", f"{ROLLOUT}.n=8", f"{ACTOR}.ppo_mini_batch_size=6",
               "trainer.experiment_name=e", f"{ACTOR}.ppo_micro_batch_size_per_gpu=10",
               "trainer.test_freq=1", "trainer.rollout_data_dir=dumps")
    )  # fmt: skip
    assert "16 prompts x 8 responses = 128 sequences" in text
    assert "up to 512 + 512 = 1024 tokens per sequence" in text
    assert (
        "3 optimizer steps per batch: 3 mini-batches of 6 prompts (48 sequences) x 1 epoch" in text
    )
    assert "the last mini-batch has 4 prompts" in text
    assert "5 micro-batches of 10 in a mini-batch" in text
    assert "validation: before training and every 1 step" in text
    assert "run: outputs/quadriga/e" in text
    assert "responses: dumps" in text


def test_the_number_of_steps() -> None:
    found = config("data.train_batch_size=16", "trainer.total_epochs=3")
    assert "the number of steps depends on the data" in explain(found)
    # 100 prompts are 6 full batches of 16.
    assert "18 steps: 6 batches per epoch, 3 epochs" in explain(found, num_train_prompts=100)
    bounded = config("data.train_batch_size=16", "trainer.total_training_steps=5")
    assert "5 steps: 6 batches per epoch, 1 epoch" in explain(bounded, num_train_prompts=100)
    assert "5 steps, over as many epochs as they take" in explain(bounded)
    assert "5 steps: 2 batches per epoch, 3 epochs" in explain(bounded, num_train_prompts=40)
    # Of both limits the first that is reached ends the run.
    both = config(
        "data.train_batch_size=16", "trainer.total_training_steps=50", "trainer.total_epochs=3"
    )
    assert "18 steps: 6 batches per epoch, 3 epochs" in explain(both, num_train_prompts=100)
    assert "at most 50 steps, over at most 3 epochs" in explain(both)


def test_passes_bound_dynamic_sampling() -> None:
    """How many steps they make, nobody knows before."""
    words = (
        "algorithm.filter_groups.enable=true",
        "data.train_batch_size=16",
        "data.gen_batch_size=32",
    )
    taken = "until 3 passes over the data are taken"
    found = explain(config(*words, "trainer.total_epochs=3"), num_train_prompts=100)
    assert f"\n  steps {taken} (3 batches each, at least one per step)" in found
    both = config(*words, "trainer.total_epochs=3", "trainer.total_training_steps=5")
    assert f"at most 5 steps {taken}\n" in explain(both)
    assert "steps until 1 pass over the data are taken" not in explain(
        config(*words, "trainer.total_training_steps=5")
    )


def test_a_critic_is_named_where_one_is_built() -> None:
    ppo = config("algorithm.adv_estimator=gae")
    assert "critic: one pass per step, for values" in explain(
        ppo, None, ("token_level_rewards", "values")
    )
    assert "\n  critic:" not in explain(ppo, None, ("token_level_rewards",)) + explain(ppo)


def test_keys_can_be_searched() -> None:
    text = keys_text(["actor.optim", "betas"])
    assert text.startswith("actor_rollout_ref.actor.optim.betas = [0.9, 0.999]\n    a list of 2")
    assert text.count(" = ") == 1
    assert keys_text(["zebra"]) == ""
    assert keys_text(["optim.lr"], "sft").startswith("optim.lr = 1")
