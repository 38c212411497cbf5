# SPDX-License-Identifier: Apache-2.0
"""verl's names: the arguments are called as its users call them, and the numbers are those of the implementations."""

import inspect

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga_verl import core_algos

MASK = torch.tensor([[1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("compute_gae_advantage_return", "token_level_rewards values response_mask gamma lam"),
        (
            "compute_grpo_outcome_advantage",
            "token_level_rewards response_mask index epsilon norm_adv_by_std_in_grpo",
        ),
        (
            "compute_grpo_passk_outcome_advantage",
            "token_level_rewards response_mask index epsilon norm_adv_by_std_in_grpo",
        ),
        ("compute_rloo_outcome_advantage", "token_level_rewards response_mask index"),
        ("compute_opo_outcome_advantage", "token_level_rewards response_mask index"),
        ("compute_gpg_outcome_advantage", "token_level_rewards response_mask index f_norm"),
        (
            "compute_reinforce_plus_plus_outcome_advantage",
            "token_level_rewards response_mask gamma",
        ),
        (
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            "token_level_rewards response_mask index",
        ),
        ("compute_remax_outcome_advantage", "token_level_rewards reward_baselines response_mask"),
        (
            "compute_policy_loss",
            "old_log_prob log_prob advantages response_mask cliprange cliprange_low cliprange_high clip_ratio_c "
            "loss_agg_mode",
        ),
        ("compute_value_loss", "vpreds returns values response_mask cliprange_value loss_agg_mode"),
        ("kl_penalty", "logprob ref_logprob kl_penalty"),
    ],
)
def test_argument_names(name: str, parameters: str) -> None:
    """Callers name them."""
    assert " ".join(inspect.signature(getattr(core_algos, name)).parameters) == parameters


def test_grpo() -> None:
    """`index` names the groups."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=MASK,
        index=["a", "a"],
        norm_adv_by_std_in_grpo=False,
    )
    assert advantages.tolist() == [[0.5, 0.5], [-0.5, 0.0]]


@pytest.mark.parametrize(
    ("name", "further", "first"),
    [
        ("grpo_passk", ([7, 7], 0.0, False), 1.0),
        ("rloo", ([7, 7],), 1.0),
        ("opo", ([7, 7],), 1 / 3),
        ("gpg", ([7, 7], 2.0), 0.25),
        ("reinforce_plus_plus_baseline", ([7, 7],), 3**-0.5),
        ("reinforce_plus_plus", (1.0,), 3**-0.5),
    ],
)
def test_the_other_estimators(name: str, further: tuple, first: float) -> None:
    """Scores 1 and 0 of two and one tokens. OPO: 1 - 2/3. GPG: 0.5 / 2. Whitened 1, 1, 0: a third over 3 ** -0.5."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    advantages, returns = getattr(core_algos, f"compute_{name}_outcome_advantage")(
        rewards, MASK, *further
    )
    assert advantages[0].tolist() == pytest.approx([first, first]) and returns.shape == (2, 2)


def test_remax() -> None:
    """The baseline stands before the mask, and may be given by place."""
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    advantages, returns = core_algos.compute_remax_outcome_advantage(
        rewards, torch.tensor([0.5, 1.0]), MASK
    )
    assert advantages.tolist() == [[1.5, 0.5], [-1, 0]] and returns.tolist() == [[2, 1], [0, 0]]


def test_gae() -> None:
    """With gamma and lam 1 and no critic to speak of, the return is the reward to come."""
    rewards = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    advantages, returns = core_algos.compute_gae_advantage_return(
        rewards, torch.zeros(2, 2), MASK, 1.0, 1.0
    )
    assert returns.tolist() == [[1.0, 1.0], [3.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, -1.0], [2.0, 0.0]]) / 3**0.5)


def test_policy_loss() -> None:
    """Ratios 1, 2 and 0.5 for advantages 1, 1 and -1: -1, -1.2 and 0.8; two of three tokens are clipped."""
    log_prob = torch.tensor([[0.0, 2.0], [0.5, 1.0]]).log()
    advantages = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    log_prob[0, 0] = 0.0
    loss, clipfrac, kl, lower = core_algos.compute_policy_loss(
        torch.zeros(2, 2),
        log_prob,
        advantages,
        MASK,
        cliprange=0.2,
        loss_agg_mode="seq-mean-token-sum",
    )
    assert loss.item() == pytest.approx((-2.2 + 0.8) / 2)
    assert clipfrac.item() == pytest.approx(2 / 3) and lower.item() == 0
    assert kl.item() == pytest.approx(0.0, abs=1e-7)
    with pytest.raises(ConfigError, match=r"compute_policy_loss: got .*cliprange_low"):
        core_algos.compute_policy_loss(log_prob, log_prob, advantages, MASK, cliprange_low=0.2)


def test_value_loss() -> None:
    """Errors of 1 and 2 and 0 inside the mask: half of 5 over 3 tokens."""
    vpreds, returns = torch.tensor([[1.0, 2.0], [4.0, 7.0]]), torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    loss, clipfrac = core_algos.compute_value_loss(
        vpreds, returns, vpreds, MASK, cliprange_value=0.5
    )
    assert loss.item() == pytest.approx(2.5 / 3) and clipfrac.item() == 0
