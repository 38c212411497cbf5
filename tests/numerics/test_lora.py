# SPDX-License-Identifier: Apache-2.0
"""Adapters against PEFT by the book, in one process and in two that share the weights.

What none of this proves: the same on NCCL, nor how well a model learns with an adapter.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from quadriga.config import ActorConfig, ModelConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer, update
from quadriga.models.adapter_files import base_name, is_factor
from quadriga.models.lora import add_adapter, disable_adapter
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol import DataProto
from tests.numerics.launching import run_ranks
from tests.numerics.recording import Recording

PROGRAM = Path(__file__).with_name("lora_shards.py")
CPU, MICRO = torch.device("cpu"), MicroBatching(None, 30)
SECTION = ModelConfig(
    path="tiny", lora_rank=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]
)


def stirred(model: PreTrainedModel) -> PreTrainedModel:
    """With the adapter of `SECTION`, whose B is not zero, so that A learns too."""
    add_adapter(model, SECTION, seed=3)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def by_the_book(plain: PreTrainedModel, ours: PreTrainedModel) -> Any:
    """PEFT's own model with the same adapter."""
    # Not imported where tests are collected, which every process does.
    peft = import_module("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=SECTION.target_modules, task_type="CAUSAL_LM"
    )
    book = peft.get_peft_model(plain, config)
    factors = {name: value for name, value in ours.named_parameters() if is_factor(name)}
    unused = book.base_model.model.load_state_dict(factors, strict=False)
    assert factors and unused.unexpected_keys == []
    return book


def make_engine(
    model: PreTrainedModel, dtype: torch.dtype = torch.float32, kind: type[FSDPEngine] = FSDPEngine
):
    return kind(
        PolicyScorer(model), dtype=dtype, device=CPU, training=Training(OptimConfig(), 1.0, 3)
    )


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Over all tensors, relative to each one's norm."""
    assert ours.keys() == theirs.keys() and ours
    differences = {name: (ours[name] - theirs[name]).detach().norm() for name in theirs}
    return max(
        float(differences[name] / theirs[name].detach().norm().clamp(min=1e-12)) for name in theirs
    )


def padded_log_probs(model: Any, batch: DataProto) -> Tensor:
    columns = batch.batch
    width = columns["responses"].shape[1]
    names = ("input_ids", "attention_mask", "position_ids")
    logits = model(**{name: columns[name] for name in names}).logits[:, -width - 1 : -1]
    return (logits / 0.7).log_softmax(-1).gather(-1, columns["responses"][..., None])[..., 0]


def test_gradients_are_those_of_peft(make_model: Callable, batch: DataProto) -> None:
    """A policy gradient through the adapters, packed and in micro-batches, within 1e-5; only they have one."""
    batch.batch["rollout_log_probs"] = batch.batch.pop("old_log_probs")  # so that the ratio is 1
    ours = make_engine(stirred(make_model()), kind=Recording)
    update(
        ours,
        batch,
        PolicyObjective(ActorConfig()),
        Passes(len(batch), 1, MICRO),
        lr=1e-3,
        temperature=0.7,
    )
    book = by_the_book(make_model("eager"), stirred(make_model()))
    mask = batch.batch["response_mask"]
    loss = -(padded_log_probs(book, batch) * batch.batch["advantages"] * mask).sum() / mask.sum()
    loss.backward()
    expected = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in book.named_parameters()
        if parameter.grad is not None
    }
    assert len(expected) == 2 * 3 * 2
    assert largest_difference(ours.recorded, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_below_stays_as_it_was(
    make_model: Callable, batch: DataProto, dtype: torch.dtype
) -> None:
    """After steps every frozen weight is what it was, bit for bit, and so are the log-probs with the adapter off; only
    the adapter has masters and moments."""
    plain = {name: value.to(dtype) for name, value in make_model().named_parameters()}
    reference = FSDPEngine(PolicyScorer(make_model()), dtype=dtype, device=CPU)
    expected = infer(reference, batch, MICRO, temperature=0.7)["log_probs"]
    engine = make_engine(stirred(make_model()), dtype)
    model = engine.scorer.model
    begun = {
        name: value.clone() for name, value in engine.parameters.masters.items() if is_factor(name)
    }
    update(
        engine, batch, PolicyObjective(ActorConfig()), Passes(4, 2, MICRO), lr=1e-2, temperature=0.7
    )
    frozen = {
        base_name(name): value for name, value in model.named_parameters() if not is_factor(name)
    }
    assert frozen.keys() == plain.keys()
    assert all(torch.equal(frozen[name], plain[name]) for name in plain)
    masters = {name: value for name, value in engine.parameters.masters.items() if is_factor(name)}
    assert all(
        value.dtype == torch.float32 and not torch.equal(value, begun[name])
        for name, value in masters.items()
    )
    assert len(engine.optimizer.adam.state) == len(masters) == 12
    with disable_adapter(model):
        assert torch.equal(infer(engine, batch, MICRO, temperature=0.7)["log_probs"], expected)
    changed = infer(engine, batch, MICRO, temperature=0.7)["log_probs"]
    assert float((changed - expected).abs().max()) > 0.1


def test_merged_weights_are_those_of_peft(make_model: Callable) -> None:
    """Within 1e-6, under the names of the model without an adapter."""
    model = stirred(make_model())
    merged = by_the_book(make_model("eager"), model).merge_and_unload()
    ours = {name: value.clone() for name, value in make_engine(model).weights()}
    assert largest_difference(ours, dict(merged.named_parameters())) < 1e-6
    assert largest_difference(ours, dict(make_model().named_parameters())) > 0.1


# ---- two processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def results(
    folder: Path, make_model: Callable, make_batch: Callable[[], DataProto]
) -> dict[int, dict[str, Any]]:
    """What one process and what two came to."""
    make_model().save_pretrained(folder / "model")
    make_batch().save_to_disk(folder / "batch")
    run_ranks(PROGRAM, 2, folder, num_ports=2)
    return torch.load(folder / "results.pt")


def test_two_processes_are_one(results: dict[int, dict[str, Any]]) -> None:
    """The same adapter at the beginning, bit for bit; metrics, weights and answers of learning within 1e-5."""
    one, two = results[1], results[2]
    assert two["choices"]["actor"].endswith("fsdp=2 tp=1 sp=1 pp=1")
    assert one["begin"].keys() == two["begin"].keys()
    assert all(torch.equal(one["begin"][name], two["begin"][name]) for name in one["begin"])
    for ours, theirs in zip(
        two["metrics"] + two["third step"], one["metrics"] + one["third step"], strict=True
    ):
        names = [
            name
            for name in theirs
            if not name.startswith("perf/") and name != "actor/packed_tokens"
        ]
        assert {name: ours[name] for name in names} == pytest.approx(
            {n: theirs[n] for n in names}, rel=1e-5, abs=1e-6
        )
    for kind in ("held", "merged", "end"):
        assert largest_difference(two[kind], one[kind]) < 1e-5
    torch.testing.assert_close(two["log_probs"], one["log_probs"], atol=1e-5, rtol=1e-5)


def test_bfloat16(results: dict[int, dict[str, Any]], make_model: Callable) -> None:
    """Frozen weights are bfloat16 where they lie, and stay what they were; the adapter's masters are float32. One
    process and two move the adapter alike, as far as bfloat16 says."""
    plain = {name: value.detach().bfloat16() for name, value in make_model().named_parameters()}
    for size in (1, 2):
        found = results[size]["bfloat16"]
        for name, dtype in found["masters"].items():
            assert dtype == (torch.float32 if is_factor(name) else torch.bfloat16), name
        frozen = {
            base_name(name): value for name, value in found["held"].items() if not is_factor(name)
        }
        assert frozen.keys() == plain.keys() and all(
            torch.equal(frozen[name], plain[name]) for name in plain
        )
    moved = [
        {n: v.float() for n, v in results[size]["bfloat16"]["held"].items() if ".lora_B." in n}
        for size in (1, 2)
    ]
    assert all(float(value.abs().max()) > 0 for value in moved[0].values())
    assert largest_difference(moved[1], moved[0]) < 0.05


@pytest.mark.parametrize("size", [1, 2])
def test_the_reference_is_the_actor_with_its_adapter_off(
    results: dict[int, dict[str, Any]], size: int, make_model: Callable, make_batch: Callable
) -> None:
    """No second model; before and after learning it says what the model that training started from says."""
    found, batch = results[size], make_batch()
    assert found["choices"]["reference"] == "the actor with its adapter off"
    engine = FSDPEngine(PolicyScorer(make_model()), dtype=torch.float32, device=CPU)
    expected = infer(engine, batch, MICRO)["log_probs"]
    torch.testing.assert_close(found["reference again"], expected, atol=1e-6, rtol=1e-6)
    assert float((found["log_probs"] - expected).abs().max()) > 0.01


@pytest.mark.parametrize("size", [1, 2])
def test_generation_has_the_adapter(results: dict[int, dict[str, Any]], size: int) -> None:
    """On the actor's own modules, and on a copy with merged weights: the trainer's log-probs, within 1e-5."""
    found = results[size]
    mask = found["mask"].bool()
    torch.testing.assert_close(found["rollout"][mask], found["trainer"][mask], atol=1e-5, rtol=0)


def test_resume(results: dict[int, dict[str, Any]]) -> None:
    """On the same processes bit for bit; one process goes on from what two have written, within 1e-5."""
    for size in (1, 2):
        again, end = results[size][f"end, from {size}"], results[size]["end"]
        assert all(torch.equal(again[name], end[name]) for name in end)
        names = [name for name in results[size]["third step"][0] if not name.startswith("perf/")]
        for name in names:
            assert (
                results[size][f"third step, from {size}"][0][name]
                == results[size]["third step"][0][name]
            ), name
    assert largest_difference(results[1]["end, from 2"], results[1]["end"]) < 1e-5


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_is_an_adapter_that_peft_loads(
    results: dict[int, dict[str, Any]], folder: Path, size: int, batch: DataProto
) -> None:
    """PEFT puts it on the base model, transformers loads `huggingface`: both are the trained model."""
    saved, expected = folder / f"saved by {size}" / "actor", results[size]["log_probs"]
    assert not (saved / "frozen").exists()
    mask = batch.batch["response_mask"]
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    models = {
        "adapter": import_module("peft").PeftModel.from_pretrained(base, saved),
        "merged": AutoModelForCausalLM.from_pretrained(saved / "huggingface", dtype=torch.float32),
    }
    for name, model in models.items():
        with torch.no_grad():
            columns = batch.batch
            logits = model(
                **{key: columns[key] for key in ("input_ids", "attention_mask", "position_ids")}
            ).logits
        found = logits[:, -8:-1].log_softmax(-1).gather(-1, columns["responses"][..., None])[..., 0]
        torch.testing.assert_close(found * mask, expected, atol=1e-5, rtol=1e-5, msg=name)
    merged = dict(models["merged"].named_parameters())
    assert largest_difference(merged, results[size]["merged"]) < 1e-6
