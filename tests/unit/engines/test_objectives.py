# SPDX-License-Identifier: Apache-2.0
"""The policy's loss from a configuration to a number: that every key acts, and what is refused at the start.

The model's outputs are given; that an engine computes them, and adds up micro-batches, tests/numerics shows.
"""

import math
from dataclasses import replace

import pytest
import torch

from quadriga.algorithms.aggregate import LossCounts
from quadriga.algorithms.registry import POLICY_LOSSES
from quadriga.algorithms.rollout_correction import correct_rollout
from quadriga.config import ActorConfig
from quadriga.config.actor import PolicyLossConfig
from quadriga.config.algorithm import RolloutCorrectionConfig
from quadriga.engines.objectives import PolicyObjective, add_rollout_tokens
from quadriga.errors import ConfigError, EngineError
from quadriga.protocol import DataProto

MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]])


def rows(seed: int = 0) -> DataProto:
    """Three answers, the last without an advantage."""
    generator = torch.Generator().manual_seed(seed)
    old, rollout, gains = torch.randn(3, 3, 4, generator=generator)
    gains = gains.abs() * torch.tensor([[1.0], [-1.0], [0.0]])
    tensors = {
        "old_log_probs": -old.abs(),
        "rollout_log_probs": -rollout.abs(),
        "advantages": gains,
    }
    return DataProto.from_dict(tensors={**tensors, "response_mask": MASK})


def outputs() -> dict[str, torch.Tensor]:
    """What a model said of the tokens."""
    log_probs = -torch.rand(3, 4, generator=torch.Generator().manual_seed(9))
    return {"log_probs": log_probs.requires_grad_(), "entropy": torch.ones(3, 4)}


def loss_of(
    data: DataProto, correction: RolloutCorrectionConfig | None = None, **settings
) -> float:
    """The whole batch as one micro-batch, with only the columns that the objective asks for."""
    objective = PolicyObjective(ActorConfig(**settings), correction)
    objective.add_batch_columns(data)
    named = data.select(objective.fields(data))
    loss, metrics = objective(named, outputs(), LossCounts.of(data.batch["response_mask"]))
    assert all(math.isfinite(metric.value) for metric in metrics.values())
    return loss.item()


def test_the_mode_acts() -> None:
    """Every loss can be chosen by name, and each gives another number; only the bypass form equals the clipped loss
    where the rollout computed as the trainer does."""
    same = rows()
    same.batch["old_log_probs"] = same.batch["rollout_log_probs"]
    options = {"clip_cov": {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0}}
    values = {
        name: loss_of(
            rows(), policy_loss={"loss_mode": name, **options.get(name, {})}, clip_ratio=0.02
        )
        for name in POLICY_LOSSES
    }
    assert len({round(value, 6) for value in values.values()}) == len(list(POLICY_LOSSES))
    assert loss_of(same, policy_loss={"loss_mode": "bypass_mode"}) == loss_of(same)


def test_by_hand() -> None:
    """GPG over the mean of 8 tokens: -sum of A log p, of the rows that have an advantage."""
    data = rows()
    expected = -(data.batch["advantages"] * outputs()["log_probs"] * MASK).sum() / 8
    assert loss_of(data, policy_loss={"loss_mode": "gpg"}) == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_each_rollout_counts_once() -> None:
    """GPG, where rows 0 and 1 are a rollout of 4 tokens and row 2, without an advantage, is one of 4."""
    data = rows()
    data.batch["rollout_index"] = torch.tensor([0, 0, 1])
    add_rollout_tokens(data)
    objective = PolicyObjective(
        ActorConfig(policy_loss={"loss_mode": "gpg"}, loss_agg_mode="rollout-mean-token-mean")
    )
    named = data.select(objective.fields(data))
    counts = LossCounts.of(MASK, data.batch["rollout_num_tokens"])
    loss, _ = objective(named, outputs(), counts)
    expected = -(data.batch["advantages"] * outputs()["log_probs"] * MASK)[:2].sum() / 4 / 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_cross_entropy_of_other_roles() -> None:
    """Twice the sum of -log p over two tokens, by the three of the mini-batch, beside an unchanged policy loss. A
    response without trained tokens has none."""
    data = rows()
    mask = MASK * torch.tensor([[1], [1], [0]])
    data.batch["response_mask"] = mask
    plain = loss_of(data)
    data.batch["echo_mask"] = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 1]])
    objective = PolicyObjective(ActorConfig(echo_coeff=2.0))
    named = data.select(objective.fields(data))
    scores = outputs()
    counts = replace(LossCounts.of(mask), num_echo_tokens=3)
    loss, metrics = objective(named, scores, counts)
    cross_entropy = -(scores["log_probs"][0, 2] + scores["log_probs"][1, 1]) / 3
    assert loss.item() == pytest.approx(plain + 2 * cross_entropy.item(), abs=1e-6)
    assert float(metrics["actor/echo_loss"].value) == pytest.approx(cross_entropy.item(), abs=1e-6)
    loss.backward()
    assert scores["log_probs"].grad[0, 2].item() == pytest.approx(-2 / 3, abs=1e-6)
    assert not scores["log_probs"].grad[2].any()
    assert objective.rows_with_gradient(data).tolist() == [True, True, False]
    with pytest.raises(EngineError, match="got a batch without echo_mask"):
        objective.fields(rows())


def test_options_act_flat_and_below_options() -> None:
    """Beside `loss_mode`, as verl writes them, or in `options`: the same."""
    flat = loss_of(rows(), policy_loss={"loss_mode": "dro", "dro_beta": 5.0})
    assert flat == loss_of(rows(), policy_loss={"loss_mode": "dro", "options": {"dro_beta": 5.0}})
    assert flat != loss_of(rows(), policy_loss={"loss_mode": "dro"})
    assert PolicyLossConfig(loss_mode="dro", dro_beta=5.0).options == {"dro_beta": 5.0}


def test_weights_of_the_rollout_scale_every_loss() -> None:
    """Twice the weights, twice the loss."""
    data = rows()
    data.batch["rollout_is_weights"] = torch.full((3, 4), 2.0)
    assert loss_of(data) == pytest.approx(2 * loss_of(rows()), rel=1e-6)


def test_decoupled_correction() -> None:
    """With a ratio of 1 in the update (old = current), a weighted loss is the mean of -w A."""
    data, correction = rows(), RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.5)
    data.batch["old_log_probs"] = outputs()["log_probs"].detach()
    changed, _ = correct_rollout(dict(data.batch.items()), correction)
    for name, column in changed.items():
        data.batch[name] = column
    weights = (data.batch["old_log_probs"] - data.batch["rollout_log_probs"]).exp().clamp(max=1.5)
    expected = -(weights * data.batch["advantages"] * MASK).sum() / 8
    assert loss_of(data, correction) == pytest.approx(expected.item(), rel=1e-5)


def test_bypass_correction_acts_without_old_log_probs() -> None:
    """REINFORCE with weights of the current policy over the rollout's; that pass is not there and not missed."""
    data = rows()
    del data.batch["old_log_probs"]
    correction = RolloutCorrectionConfig(preset="bypass_pg_is", rollout_is="token")
    ratio = (outputs()["log_probs"].detach() - data.batch["rollout_log_probs"]).exp().clamp(max=2.0)
    expected = (
        -(ratio * data.batch["advantages"] * outputs()["log_probs"].detach() * MASK).sum() / 8
    )
    assert loss_of(data, correction) == pytest.approx(expected.item(), rel=1e-5)


def test_rows_that_need_no_computation() -> None:
    """A row without an advantage is left out, unless the loss has a penalty beside it or all are to be measured."""
    assert PolicyObjective(ActorConfig()).rows_with_gradient(rows()).tolist() == [True, True, False]
    beside = (("vanilla", {"entropy_coeff": 0.1}), ("vanilla", {"calculate_entropy": True}))
    for name, settings in (("dro", {}), ("kl_cov", {}), *beside):
        objective = PolicyObjective(ActorConfig(policy_loss={"loss_mode": name}, **settings))
        assert objective.rows_with_gradient(rows()).tolist() == [True] * 3


def test_entropy_is_that_of_the_pass_where_there_was_one() -> None:
    """It is of all rows, and of the policy that the update starts from."""
    data = rows()
    assert (
        "actor/entropy"
        not in PolicyObjective(ActorConfig())(data, outputs(), LossCounts.of(MASK))[1]
    )
    del data.batch["old_log_probs"]
    assert (
        "actor/entropy" in PolicyObjective(ActorConfig())(data, outputs(), LossCounts.of(MASK))[1]
    )


def test_columns_of_the_whole_batch() -> None:
    """Taken from old log-probs, or from the rollout's where there are none; without them the loss refuses."""
    objective = PolicyObjective(
        ActorConfig(policy_loss={"loss_mode": "kl_cov", "kl_cov_ratio": 0.3})
    )
    with pytest.raises(EngineError, match="policy loss kl_cov: got a batch without covariance_top"):
        objective(rows(), outputs(), LossCounts.of(MASK))
    data = rows()
    objective.add_batch_columns(data)
    assert data.batch["covariance_top"].sum() == 2 and "covariance_top" in objective.fields(data)
    del data.batch["old_log_probs"], data.batch["covariance_top"]
    objective.add_batch_columns(data)
    assert data.batch["covariance_top"].sum() == 2


@pytest.mark.parametrize(
    ("settings", "correction", "message"),
    [
        ({"loss_mode": "gsqo"}, {}, "loss_mode: got 'gsqo'.* Did you mean 'gspo'"),
        ({"loss_mode": "sapo", "tau": 1.0}, {}, r"policy_loss \(sapo\): got the option 'tau'"),
        ({"tau_pos": 1.0}, {}, r"policy_loss \(vanilla\): got the option 'tau_pos'"),
        (
            {"loss_mode": "gspo"},
            {"bypass_mode": True},
            "loss_mode: got 'gspo', with .*bypass_mode=True",
        ),
    ],
)
def test_refused_at_the_start(settings: dict, correction: dict, message: str) -> None:
    """When the objective is made, before a model is."""
    with pytest.raises(ConfigError, match=message):
        PolicyObjective(ActorConfig(policy_loss=settings), RolloutCorrectionConfig(**correction))
