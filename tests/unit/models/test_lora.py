# SPDX-License-Identifier: Apache-2.0
"""Adapters in a model, in PEFT's files, and merged into the weights of a folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config import ModelConfig
from quadriga.config.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_shape, is_adapter
from quadriga.errors import CheckpointError, ConfigError, EngineError
from quadriga.models.adapter_files import (
    AdapterFiles,
    is_factor,
    merge_adapter,
    open_model,
    write_factors,
)
from quadriga.models.flops import model_cost
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.lora import adapter_of, add_adapter, describe_adapter, write_adapter_config

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with an untied head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=23,
    )
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(base: Path) -> LlamaForCausalLM:
    return load_causal_lm(base, dtype=torch.float32)


def section(base: Path, **changes) -> ModelConfig:
    return ModelConfig(**({"path": str(base), "lora_rank": 2} | changes))


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A folder with an adapter that changes the model."""
    model = load(base)
    add_adapter(model, section(base, target_modules=["q_proj", "up_proj"], lora_alpha=6), 1)
    write_adapter_config(model, tmp_path)
    torch.manual_seed(5)

    parameters = model.named_parameters()
    write_factors(
        tmp_path,
        {name: torch.randn(value.shape) * 0.1 for name, value in parameters if is_factor(name)},
    )
    return tmp_path


def test_a_new_adapter(base: Path) -> None:
    """All linear modules below the head; the model computes what it did; values come from seed and name alone."""
    model, plain = load(base), load(base)
    add_adapter(model, section(base), seed=1)
    factors = {name: value for name, value in model.named_parameters() if is_factor(name)}
    assert {name.split(".")[4] for name in factors} == set(PROJECTIONS) and len(
        factors
    ) == 2 * 7 * 2
    assert all(value.requires_grad == (name in factors) for name, value in model.named_parameters())
    assert all(value.dtype == torch.float32 for value in factors.values())
    assert (
        describe_adapter(model)
        == "LoRA of rank 2, alpha 16, in 14 modules: 0.00 M parameters learn"
    )
    torch.manual_seed(99)
    fewer, other = load(base), load(base)
    add_adapter(fewer, section(base, target_modules=["o_proj"]), seed=1)
    add_adapter(other, section(base), seed=2)
    name = "model.layers.1.self_attn.o_proj.lora_A.default.weight"
    assert torch.equal(fewer.get_parameter(name), factors[name])
    assert not torch.equal(other.get_parameter(name), factors[name])
    assert 0.2 < float(factors[name].detach().abs().max()) <= 0.25  # 1 / sqrt(16)
    without_plan = {"input_ids": torch.arange(2, 9)[None]}
    for one in (model, plain):
        one.set_attn_implementation("eager")
    assert torch.equal(model(**without_plan).logits, plain(**without_plan).logits)


def test_a_skeleton_gets_an_empty_adapter(base: Path) -> None:
    """On "meta"; what is returned reads the values that a whole model has."""
    skeleton, model = skeleton_causal_lm(base), load(base)
    read = add_adapter(skeleton, section(base), 4)
    add_adapter(model, section(base), 4)
    for name, parameter in skeleton.named_parameters():
        assert parameter.is_meta
        if is_factor(name):
            assert parameter.requires_grad and torch.equal(read(name), model.get_parameter(name))


def test_frozen_matrices_cost_half_a_backward_pass(base: Path) -> None:
    """What an update spares is their own gradient: 2 operations a parameter and token."""
    plain, model = load(base), load(base)
    add_adapter(model, section(base), 1)
    size = (10, 4, 60)  # tokens, predicted ones, squared lengths
    num_block = 2 * (4 * 16 * 16 + 3 * 16 * 24)
    assert model_cost(plain).update_flops(*size) == 3 * model_cost(plain).forward_flops(*size)
    cost = model_cost(model)
    assert 3 * cost.forward_flops(*size) - cost.update_flops(*size) == 2 * (
        num_block * 10 + 23 * 16 * 4
    )


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            ["query"],
            r"got \['query'\]: no module named query, expected linear modules of this model: q_proj, k_proj",
        ),
        (["q_proj", "w1", "w3"], "no module named w1, w3"),
        ("q_proj", "'q_proj': a regular expression that matches no module"),
        ("(", "not a regular expression"),
        (
            ["lm_head"],
            r"\['lm_head'\], which includes the head, expected linear modules",
        ),
        (["embed_tokens"], r"a module Embedding\(23, 16\)"),
        (["input_layernorm"], "Target module LlamaRMSNorm"),
    ],
)
def test_an_adapter_that_reaches_no_module(base: Path, targets: str | list[str], said: str) -> None:
    """The modules that there are, and what their names look like, are told."""
    with pytest.raises(EngineError, match=said) as caught:
        add_adapter(load(base), section(base, target_modules=targets), 0)
    assert caught.value.where == "actor_rollout_ref.model.target_modules"
    with pytest.raises(EngineError, match=said):
        add_adapter(skeleton_causal_lm(base), section(base, target_modules=targets), 0)


def test_modules_that_are_left_out(base: Path) -> None:
    model = load(base)
    add_adapter(
        model, section(base, target_modules=r".*\.(q|o)_proj", exclude_modules=r".*\.0\..*"), 0
    )
    places = {name.rsplit(".", 3)[0] for name, _ in model.named_parameters() if is_factor(name)}
    assert places == {"model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj"}
    with pytest.raises(EngineError, match="target_modules"):
        add_adapter(load(base), section(base, exclude_modules=PROJECTIONS), 0)


def test_starting_from_an_adapter(base: Path, adapter: Path) -> None:
    """Its values, rank, alpha and modules; written again, it is the same."""
    model = load(base)
    start = ModelConfig(path=str(base), lora_adapter_path=str(adapter))
    add_adapter(model, start, 0)
    expected = load_file(adapter / ADAPTER_WEIGHTS)
    found = {name: value for name, value in model.named_parameters() if is_factor(name)}
    assert len(found) == len(expected) == 2 * 2 * 2
    for name, value in found.items():
        assert torch.equal(value, expected["base_model.model." + name.replace(".default", "")])
    shape = adapter_of(model)
    assert (shape.rank, shape.scale) == (2, 3.0) and shape == adapter_shape(start)
    assert is_adapter(adapter) and not is_adapter(base)


def test_an_adapter_of_another_model(base: Path, adapter: Path) -> None:
    """Another rank, and a module more: named with its shape."""
    facts = json.loads((adapter / ADAPTER_CONFIG).read_text())
    start = ModelConfig(path=str(base), lora_adapter_path=str(adapter))
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(facts | {"r": 3}))
    with pytest.raises(
        EngineError,
        match=r"8 tensors .*lora_A.default.weight: shape \(2, 16\), expected shape",
    ):
        add_adapter(load(base), start, 0)
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(facts | {"target_modules": ["q_proj"]}))
    with pytest.raises(EngineError, match=r"4 tensors .*mlp.up_proj.lora_A.* expected none"):
        add_adapter(load(base), start, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"rank_pattern": {"q_proj": 4}, "bias": "all"}, "bias=all, rank_pattern="),
        ({"r": None}, "no r"),
    ],
)
def test_an_adapter_of_another_kind(base: Path, adapter: Path, change: dict, said: str) -> None:
    """What would be lost where weights are merged is refused."""
    facts = json.loads((adapter / ADAPTER_CONFIG).read_text())
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(facts | change))
    with pytest.raises(ConfigError, match=said):
        open_model(adapter)


def test_a_folder_with_an_adapter_is_the_merged_model(base: Path, adapter: Path) -> None:
    """Read tensor by tensor, or loaded; the same as merging the stream of the model's parameters."""
    files, plain = open_model(adapter), load(base)
    model = load(base)
    add_adapter(model, ModelConfig(path=str(base), lora_adapter_path=str(adapter)), 0)
    expected = dict(
        merge_adapter(((name, value.detach()) for name, value in model.named_parameters()), 3.0)
    )
    assert set(files.shapes) == set(expected) == {name for name, _ in plain.named_parameters()}
    changed = set()
    for name, value in plain.named_parameters():
        assert files.shapes[name] == value.shape and torch.equal(files.read(name), expected[name])
        changed |= set() if torch.equal(expected[name], value) else {name.split(".")[-2]}
    assert changed == {"q_proj", "up_proj"}
    (adapter / "config.json").write_bytes((base / "config.json").read_bytes())
    loaded = load(adapter)
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())


def test_an_adapter_without_its_model(base: Path, adapter: Path) -> None:
    facts = json.loads((adapter / ADAPTER_CONFIG).read_text())
    (adapter / ADAPTER_CONFIG).write_text(
        json.dumps(facts | {"base_model_name_or_path": "/gone/model"})
    )
    with pytest.raises(CheckpointError, match="the base model '/gone/model'") as caught:
        open_model(adapter)
    assert "Set base_model_name_or_path in this file" in caught.value.fix
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(facts))
    files = AdapterFiles(adapter)
    names = {
        name: name.replace("layers.1", "layers.7").replace(".default", "") for name in files.shapes
    }
    other = {f"base_model.model.{new}": files.read(name) for name, new in names.items()}
    save_file(other, adapter / ADAPTER_WEIGHTS)
    with pytest.raises(CheckpointError, match=r"4 tensors for modules .* first model\.layers\.7"):
        open_model(adapter)
