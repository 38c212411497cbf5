# SPDX-License-Identifier: Apache-2.0
"""Estimators and policy losses of verl's contracts: as ours, and ours under verl's names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.algorithms.aggregate import LOSS_AGG_MODES, LossCounts, agg_loss
from quadriga.algorithms.registry import (
    ADVANTAGES,
    POLICY_LOSSES,
    choose_estimator,
    choose_policy_loss,
)
from quadriga.config import ActorConfig
from quadriga.config.algorithm import AlgorithmConfig
from quadriga.errors import ConfigError
from quadriga_verl.shim import VARIABLE
from quadriga_verl.shim import algorithms as ours

pytestmark = pytest.mark.usefixtures("verl_names")

ESTIMATOR = """
import torch
from verl.trainer.ppo.core_algos import register_adv_est


@register_adv_est("group_mean_of_a_test")
def group_mean(token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs):
    scores = token_level_rewards.sum(-1)
    assert config.get("gamma") == config["gamma"] == config.gamma and "gamma" in config
    assert set(kwargs) == set()
    for uid in set(index):
        rows = torch.tensor([one == uid for one in index])
        scores[rows] -= scores[rows].mean()
    advantages = scores[:, None] * response_mask
    return advantages, advantages
"""
LOSS = """
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils import torch_functional as F
from verl.workers.config import ActorConfig


@register_policy_loss("mine_of_a_test")
def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    assert isinstance(config, ActorConfig) and not isinstance(config, AlgoConfig)
    ratio = (log_prob - old_log_prob).exp()
    high = 1 + config.clip_ratio_high
    losses = -advantages * ratio.clamp(max=high)
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    kl = F.masked_mean(old_log_prob - log_prob, response_mask)
    return loss, {"actor/pg_clipfrac": (ratio > high).float().mean().item(), "actor/ppo_kl": kl.detach().item()}
"""


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers goes with it."""
    for registry in (ADVANTAGES, POLICY_LOSSES):
        before = dict(registry)
        monkeypatch.setattr(registry, "needing_advantage", set(registry.needing_advantage))
        for name in list(registry):
            monkeypatch.setitem(registry, name, before[name])
        for name in ("group_mean_of_a_test", "mine_of_a_test", "written_of_a_test"):
            monkeypatch.delitem(registry, name, raising=False)
            monkeypatch.setitem(registry, name, len)
            del registry[name]


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 5, 1, 4])
    mask = (torch.arange(5) < lengths[:, None]).float()
    values = [torch.randn(4, 5, generator=generator) for _ in range(3)]
    old, log_prob = -values[0].abs(), -values[0].abs() + 0.2 * values[1]
    return {
        "old_log_prob": old,
        "log_prob": log_prob,
        "advantages": values[2],
        "response_mask": mask,
    }


@pytest.mark.parametrize("by_name", [False, True])
def test_an_estimator(tmp_path: Path, by_name: bool) -> None:
    """By its name, and as file.py:function; `index` has the uids, `config` is the section."""
    (tmp_path / "mine.py").write_text(ESTIMATOR)
    file, config = f"{tmp_path / 'mine.py'}:group_mean", AlgorithmConfig()
    chosen = choose_estimator(file, {}, {**dict(config), "config": config})
    if by_name:
        chosen = choose_estimator("group_mean_of_a_test", {}, {**dict(config), "config": config})
    assert chosen.fields == ("token_level_rewards", "response_mask", "uid")
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    rewards = torch.tensor([[0.0, 1.0], [3.0, 0.0], [0.0, 5.0]])
    advantages, returns = chosen.function(rewards, mask, np.array(["a", "a", "b"], dtype=object))
    assert torch.equal(advantages, torch.tensor([[-1.0, -1.0], [1.0, 0.0], [0.0, 0.0]]))
    assert torch.equal(returns, advantages)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES[:-1])
@pytest.mark.parametrize("scale", [None, 7.0])
def test_micro_batches_of_a_scalar_loss_add_up(
    tmp_path: Path, mode: str, scale: float | None
) -> None:
    """Value and gradient of the whole mini-batch, however it is cut: those of the loss per token."""
    (tmp_path / "mine.py").write_text(LOSS)
    given = {"loss_agg_mode": mode} | ({"loss_scale_factor": scale} if scale else {})
    config = ActorConfig(**given)
    chosen = choose_policy_loss(
        f"{tmp_path / 'mine.py'}:mine", {}, {**dict(config), "config": config}
    )
    fields = batch()
    counts = LossCounts.of(fields["response_mask"])
    results = []
    for cuts in ([slice(0, 4)], [slice(0, 1), slice(1, 3), slice(3, 4)]):
        log_prob, total = fields["log_prob"].clone().requires_grad_(), torch.zeros(())
        for cut in cuts:
            part = {name: value[cut] for name, value in {**fields, "log_prob": log_prob}.items()}
            losses, found = chosen.function(**part)
            assert set(found) == {"pg_clipfrac", "ppo_kl"}
            assert all(value.shape == losses.shape for value in found.values())
            total = total + agg_loss(
                losses,
                part["response_mask"],
                mode,
                loss_scale_factor=scale,
                batch_num_tokens=counts.batch_num_tokens,
                global_batch_size=counts.global_batch_size,
            )
        total.backward()
        results.append((total.detach(), log_prob.grad))
    ratio = (fields["log_prob"] - fields["old_log_prob"]).exp()
    per_token = -fields["advantages"] * ratio.clamp(max=1.2)
    expected = agg_loss(per_token, fields["response_mask"], mode, loss_scale_factor=scale)
    for value, gradient in results:
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient, results[0][1])


def test_a_scalar_has_no_mean_per_rollout() -> None:
    """It does not know how many tokens the other rows of a rollout have."""
    with pytest.raises(ConfigError, match="does not see rollouts"):
        returning(lambda x: x.mean())(
            config=ActorConfig(loss_agg_mode=LOSS_AGG_MODES[-1]), **batch()
        )


def returning(what: Any) -> Any:
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
        return what(log_prob)

    return ours.to_quadriga_loss(mine)


def test_the_form_of_four_scalars() -> None:
    found = returning(lambda x: (x.mean(), torch.tensor(0.5), 0.25, 0.0))(
        config=ActorConfig(), **batch()
    )[1]
    assert {name: value.unique().item() for name, value in found.items()} == {
        "pg_clipfrac": 0.5,
        "ppo_kl": 0.25,
        "pg_clipfrac_lower": 0.0,
    }


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda x: (x, {}), r"got a loss of shape \[4, 5\], expected a scalar.*agg_loss"),
        (lambda x: (1.0, {}), "got float, expected a scalar"),
        (
            lambda x: (x.mean(), {"actor/name": "high"}),
            "metric 'actor/name': got 'high', expected a number",
        ),
    ],
)
def test_what_is_no_loss_of_verls(what: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        returning(what)(config=ActorConfig(), **batch())


def test_importance_weights_go_to_the_loss_or_are_refused() -> None:
    def takes(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights=None,
    ):
        return (log_prob * rollout_is_weights).mean(), {}

    weights = torch.full((4, 5), 2.0)
    fields = batch()
    doubled, _ = ours.to_quadriga_loss(takes)(
        config=ActorConfig(), rollout_is_weights=weights, **fields
    )
    mask = fields["response_mask"]
    torch.testing.assert_close(agg_loss(doubled, mask, "token-mean"), 2 * fields["log_prob"].mean())
    with pytest.raises(
        ConfigError, match="importance weights of the rollout, which it does not take"
    ):
        returning(lambda x: (x.mean(), {}))(
            config=ActorConfig(), rollout_is_weights=weights, **fields
        )


def test_ours_under_verls_names() -> None:
    """Arguments by verl's names; `config` gives the options that are not given."""
    rewards, mask = torch.tensor([[0.0, 1.0], [3.0, 0.0]]), torch.ones(2, 2)
    index = np.array(["a", "a"], dtype=object)
    arguments = {"token_level_rewards": rewards, "response_mask": mask, "index": index}
    plain, _ = ours.compute_grpo_outcome_advantage(**arguments, norm_adv_by_std_in_grpo=False)
    assert plain[:, 0].tolist() == [-1.0, 1.0]
    config = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    for name in ("grpo", ours.core_algos.AdvantageEstimator.GRPO_VECTORIZED):
        found, _ = ours.get_adv_estimator_fn(name)(
            **arguments, config=config, reward_baselines=None
        )
        assert torch.equal(found, plain)
    assert "grpo" in ours.ADV_ESTIMATOR_REGISTRY and "none" not in ours.ADV_ESTIMATOR_REGISTRY
    with pytest.raises(ValueError, match=r"got 'none', expected one of .*grpo"):
        ours.get_adv_estimator_fn("none")


@pytest.mark.parametrize("version", ["1", "0.6.1"])
def test_ours_as_verls_losses(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Every loss gives a scalar and metrics, before 0.7 four scalars; the vanilla one is that of core_algos."""
    monkeypatch.setenv(VARIABLE, version)
    fields = batch()
    expected = ours.core_algos.compute_policy_loss(*fields.values(), cliprange=0.2)
    for name in ours.POLICY_LOSSES:
        extra = {"rollout_log_probs": fields["old_log_prob"]} if name == "bypass_mode" else {}
        loss, *rest = ours.get_policy_loss_fn(name)(**fields, config=ActorConfig(), **extra)
        assert loss.dim() == 0 and len(rest) == (3 if version == "0.6.1" else 1)
        if name == "vanilla":
            torch.testing.assert_close(loss, expected[0])
            clipped = rest[0] if version == "0.6.1" else torch.tensor(rest[0]["actor/pg_clipfrac"])
            torch.testing.assert_close(clipped, expected[1])


def test_what_is_written_into_the_registry_is_registered() -> None:
    def mine(token_level_rewards, response_mask, reward_baselines, config=None):
        return token_level_rewards, token_level_rewards

    ours.ADV_ESTIMATOR_REGISTRY["written_of_a_test"] = mine
    assert ours.ADV_ESTIMATOR_REGISTRY["written_of_a_test"] is mine
    chosen = choose_estimator("written_of_a_test", {}, {"config": None})
    assert chosen.fields == ("token_level_rewards", "response_mask", "reward_baselines")


def test_tensors() -> None:
    """Small functions against their formulas."""
    logits, labels = torch.randn(2, 3, 7), torch.tensor([[0, 1, 2], [3, 4, 6]])
    logs = logits.log_softmax(-1)
    torch.testing.assert_close(ours.entropy_from_logits(logits), -(logs.exp() * logs).sum(-1))
    torch.testing.assert_close(ours.logprobs_from_logits(logits, labels)[1, 2], logs[1, 2, 6])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    values = torch.tensor([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0]])
    assert ours.masked_mean(values, mask).item() == 3.0
    assert ours.masked_mean(values, mask, axis=-1).tolist() == [2.0, 5.0]
    assert ours.masked_var(values, mask).item() == 4.0
    assert ours.compute_rewards(values, values, values - 1, 0.5).tolist() == (values - 0.5).tolist()
    assert ours.agg_loss(values, mask, "token-mean", dp_size=2).item() == 6.0
    controller = ours.core_algos.get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.1))
    assert controller.value == 0.1
