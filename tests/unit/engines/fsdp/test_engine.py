# SPDX-License-Identifier: Apache-2.0
"""The engine's optimizer step, its masters, and its state."""

import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quadriga.config import OptimConfig
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.fsdp.replicated import ReplicatedWeights
from quadriga.engines.process_group import ALONE
from quadriga.errors import EngineError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.scorers import PolicyScorer, ValueScorer
from tests.moe import CONFIGS

ALL = frozenset({"model", "optimizer"})


def give_gradient(engine: FSDPEngine, value: float) -> None:
    total = sum((parameter * value).sum() for parameter in engine.scorer.model.parameters())
    total.backward()


def test_a_step_clips_to_the_norm(make_engine) -> None:
    """AdamW's first step moves each weight by the learning rate, whatever the clipped gradient's size."""
    engine = make_engine()
    before = {name: weight.clone() for name, weight in engine.weights()}
    num_weights = sum(weight.numel() for weight in before.values())
    give_gradient(engine, 3.0)
    result = engine.optimizer_step(lr=0.01)
    assert result.grad_norm == pytest.approx(3.0 * num_weights**0.5, rel=1e-5)
    for name, weight in engine.weights():
        torch.testing.assert_close(weight, before[name] - 0.01, atol=1e-5, rtol=0)


def test_small_steps_survive_in_the_masters(make_engine) -> None:
    """A thousandth of bfloat16's precision per step: the compute weights move once the masters have come far enough."""
    engine = make_engine(torch.bfloat16)
    name = "model.norm.weight"
    for _ in range(20):
        give_gradient(engine, 1.0)
        engine.optimizer_step(lr=1e-3)
    master = engine.parameters.masters[name]
    torch.testing.assert_close(master, torch.full_like(master, 0.98), atol=1e-4, rtol=0)
    compute = dict(engine.weights())[name]
    assert compute.dtype == torch.bfloat16
    assert torch.equal(compute, master.bfloat16())


def test_masters_in_bfloat16_lose_small_steps(make_engine) -> None:
    """As a model whose parameters are bfloat16: 1 - 0.001 is 1, 1 - 0.01 the number next to it; moments too."""
    engine = make_engine(
        torch.bfloat16, optim=OptimConfig(weight_decay=0.0, master_dtype="bfloat16")
    )
    own, theirs = (
        engine.parameters.masters["model.norm.weight"],
        nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    )
    adam = torch.optim.AdamW([theirs], weight_decay=0.0)
    for lr in (1e-3, 1e-2, 1e-2):
        give_gradient(engine, 1e-4)
        engine.optimizer_step(lr)
        theirs.grad, adam.param_groups[0]["lr"] = torch.full_like(theirs, 1e-4), lr
        adam.step()
        assert own[0].item() == theirs[0].item()
    assert own[0].item() < 1
    moments = engine.optimizer.adam.state[own]
    assert moments["exp_avg_sq"][0].item() == adam.state[theirs]["exp_avg_sq"][0].item()


def test_gradients_add_up_in_float32() -> None:
    """256 + 1 is 256 in bfloat16; the sums of micro-batches are not kept there."""
    layer = nn.Linear(1, 1, bias=False)
    master = ReplicatedWeights(layer, layer, torch.bfloat16, ALONE)
    for gradient in (256.0, 1.0):
        (layer.weight * gradient).sum().backward()
    master.attach_gradients()
    assert master.masters["weight"].grad.item() == 257.0
    assert layer.weight.grad is None


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(make_engine) -> None:
    engine = make_engine()
    before = {name: weight.clone() for name, weight in engine.weights()}
    give_gradient(engine, float("nan"))
    assert not engine.optimizer_step(lr=0.1).is_applied
    assert all(torch.equal(weight, before[name]) for name, weight in engine.weights())
    give_gradient(engine, 1.0)
    assert engine.optimizer_step(lr=0.1).is_applied
    give_gradient(engine, float("inf"))
    engine.optimizer_step(lr=0.1)
    give_gradient(engine, float("inf"))
    with pytest.raises(EngineError, match="2 gradients in a row that are not finite"):
        engine.optimizer_step(lr=0.1)


def test_no_gradient_at_all_is_a_step_with_a_zero_gradient(make_engine) -> None:
    """Momentum goes on, as it does when every advantage happens to be zero and the sequences are computed."""
    engines = [make_engine(), make_engine()]
    for engine in engines:
        give_gradient(engine, 1.0)
        engine.optimizer_step(lr=0.1)
    give_gradient(engines[0], 0.0)
    assert [engine.optimizer_step(lr=0.1).grad_norm for engine in engines] == [0.0, 0.0]
    for (_, one), (_, other) in zip(engines[0].weights(), engines[1].weights(), strict=True):
        assert torch.equal(one, other)


def test_float16_halves_the_loss_scale_before_a_step_counts_as_broken(make_engine, caplog) -> None:
    """Skipped and said; then doubled after 400 good gradients; at a scale of 1 the patience of every dtype."""
    engine = make_engine(torch.float16)
    assert engine.loss_scale.tolist() == [65536.0, 0.0]
    before = {name: weight.clone() for name, weight in engine.weights()}
    with caplog.at_level(logging.WARNING):
        give_gradient(engine, 65504.0 * 4)
        assert not engine.optimizer_step(lr=0.1).is_applied
    assert (
        "actor: got a float16 gradient that is not finite, with losses scaled by 65536"
        in caplog.text
    )
    assert "now scaled by 32768" in caplog.text
    assert all(torch.equal(weight, before[name]) for name, weight in engine.weights())
    assert (
        engine.loss_scale.tolist() == [32768.0, 0.0] and engine.optimizer.num_nonfinite_steps == 0
    )
    engine.loss_scale[1] = 398
    for scale in (32768.0, 65536.0):
        give_gradient(engine, float(engine.loss_scale[0]))
        result = engine.optimizer_step(lr=0.1)
        assert result.grad_norm == pytest.approx(
            sum(map(torch.numel, before.values())) ** 0.5, rel=1e-3
        )
        assert engine.loss_scale[0] == scale
    engine.loss_scale.copy_(torch.tensor([2.0, 5.0]))
    for _ in range(2):
        give_gradient(engine, float("nan"))
        engine.optimizer_step(lr=0.1)
    assert engine.loss_scale.tolist() == [1.0, 0.0] and engine.optimizer.num_nonfinite_steps == 1
    give_gradient(engine, float("nan"))
    with pytest.raises(EngineError, match="2 gradients in a row that are not finite"):
        engine.optimizer_step(lr=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scorer", [PolicyScorer, ValueScorer])
def test_saved_and_loaded_goes_on_bit_for_bit(make_engine, dtype, scorer) -> None:
    """Two steps, their state written into an engine with other weights, a third step: equal to three steps."""
    engine, other = make_engine(dtype, scorer), make_engine(dtype, scorer, seed=1)
    for value in (1.0, -0.5):
        give_gradient(engine, value)
        engine.optimizer_step(lr=0.01)
    engine.loss_scale.div_(2)
    saved = {name: tensor.clone() for name, tensor in engine.state(ALL).items()}
    for name, tensor in other.state(ALL).items():
        tensor.copy_(saved.pop(name))
    assert not saved
    other.apply_loaded_state(ALL)
    for each in (engine, other):
        give_gradient(each, 0.25)
        each.optimizer_step(lr=0.01)
    for name, master in engine.parameters.masters.items():
        assert torch.equal(master, other.parameters.masters[name]), name


@pytest.mark.parametrize("family", CONFIGS)
def test_it_says_what_computes_experts(family: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation=ATTENTION_NAME)
    engine = FSDPEngine(PolicyScorer(model), dtype=torch.float32, device=torch.device("cpu"))
    assert "frozen, experts by transformers' grouped_mm" in engine.describe()["weights"]
