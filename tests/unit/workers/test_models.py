# SPDX-License-Identifier: Apache-2.0
"""Models that do not fit a run's processes or sequences are refused by their configurations alone; weights that ranks
share are read when they are cut, and never whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from quadriga.config import Config
from quadriga.config.layout import Layout
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import ConfigError, EngineError
from quadriga.models.scorers import PolicyScorer
from quadriga.workers.models import check_models, layout_tables, load_judge, load_model, require_text
from tests.tiny_vision import vision_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64
    ).save_pretrained(tmp_path / "llama")
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    vision_config().save_pretrained(tmp_path / "sees")
    return tmp_path


def config(folder: Path, model: str = "llama", processes: int = 4, length: int = 32, **sizes: int) -> Config:
    return Config(
        data={"max_prompt_length": length, "max_response_length": 32},
        actor_rollout_ref={"model": {"path": str(folder / model)}, "actor": sizes},
        trainer={"backend": "ray", "n_gpus_per_node": processes},
    )


def test_models_that_fit(folder: Path) -> None:
    check_models(config(folder, tensor_model_parallel_size=2, pipeline_model_parallel_size=2), has_critic=True)
    check_models(config(folder, "gpt2", processes=2), has_critic=True)


def test_a_model_that_does_not_generate(tmp_path: Path) -> None:
    """An encoder, though transformers has a causal class for it; a classifier may become a reward model."""
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bert")
    LlamaConfig(architectures=["LlamaForSequenceClassification"]).save_pretrained(tmp_path / "scores")
    with pytest.raises(ConfigError, match="names BertForMaskedLM, expected a causal language model"):
        check_models(config(tmp_path, "bert"), has_critic=False)
    scores = Config(task="reward_model", actor_rollout_ref={"model": {"path": str(tmp_path / "scores")}})
    check_models(scores, has_critic=False)


def test_sequences_longer_than_the_positions(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 65 tokens, expected at most 64"):
        check_models(config(folder, length=33), has_critic=True)


def test_heads_that_cannot_be_shared(folder: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaConfig: got 4 heads and 2 key-value heads for tensor"):
        check_models(config(folder, tensor_model_parallel_size=4), has_critic=True)


def test_an_architecture_without_a_plan_for_tensor_parallelism(folder: Path) -> None:
    with pytest.raises(ConfigError, match="GPT2Config: got an architecture without a plan"):
        check_models(config(folder, "gpt2", tensor_model_parallel_size=2), has_critic=True)


def test_tables_are_told_of_sections_with_several_processes(folder: Path) -> None:
    (actor, *_) = layout_tables(config(folder, tensor_model_parallel_size=2), has_critic=True)
    assert "actor_rollout_ref.actor: fsdp=2 tp=2 sp=1 pp=1" in actor
    assert list(layout_tables(config(folder, processes=1), has_critic=True)) == []


def test_a_model_that_sees_fits(folder: Path) -> None:
    check_models(config(folder, "sees", freeze_vision_tower=True), has_critic=True)


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "ulysses_sequence_parallel_size"])
def test_layouts_that_are_not_for_images(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"for a vision-language model \(qwen2_5_vl\), expected .* of 1"):
        check_models(config(folder, "sees", processes=2, **{name: 2}), has_critic=True)


def test_a_frozen_encoder_where_there_is_none(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"freeze_vision_tower: got True, with a model without a vision encoder"):
        check_models(config(folder, freeze_vision_tower=True), has_critic=True)


def with_changes(folder: Path, **changes: Any) -> Config:
    """A run of the vision-language model with some sections changed."""
    whole = config(folder, "sees").model_dump(exclude_unset=True)
    for name, section in changes.items():
        whole[name] = whole.get(name, {}) | section
    return Config(**whole)


def test_adapters_and_models_of_text_beside_one_that_sees(folder: Path) -> None:
    model = {"path": str(folder / "sees"), "lora_rank": 4}
    with pytest.raises(ConfigError, match=r"lora_rank: got an adapter, with a vision-language model"):
        check_models(with_changes(folder, actor_rollout_ref={"model": model}), has_critic=True)
    with pytest.raises(ConfigError, match=r"reward_model\.enable: got True, with a vision-language policy"):
        check_models(with_changes(folder, reward_model={"enable": True}), has_critic=True)
    with pytest.raises(ConfigError, match=r"critic\.model\.path: got a text model"):
        check_models(with_changes(folder, critic={"model": {"path": str(folder / "llama")}}), has_critic=True)


def test_supervised_learning_is_for_text(folder: Path) -> None:
    require_text(config(folder), "quadriga sft")
    with pytest.raises(
        ConfigError, match=r"model\.path: got a vision-language model \(qwen2_5_vl\), expected a text model"
    ):
        require_text(config(folder, "sees"), "quadriga sft")


SHARDED = Processes(Layout(dp_shard=2), Layout(dp_shard=2).place(0), ProcessGroup(0, 2), ProcessGroup(0, 2))
TINY = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=31,
    num_labels=1,
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hub's cache holds of `someone/model`: the folder of its only revision."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "hub" / "models--someone--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("1" * 40)
    return place / "snapshots" / ("1" * 40)


def forbid(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """No model is loaded whole."""
    monkeypatch.setattr(kind, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded whole"))


def test_a_sharded_model_of_a_hub_is_fetched_and_read_when_it_is_cut(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a folder. Does not show the download itself: there is no network here."""
    model = LlamaForCausalLM(TINY)
    model.generation_config.eos_token_id = 7
    model.save_pretrained(hub)
    forbid(monkeypatch, AutoModelForCausalLM)
    loaded = load_model(Config(), "someone/model", PolicyScorer, torch.float32, SHARDED)
    assert loaded.read is not None and loaded.scorer.model.generation_config.eos_token_id == 7
    for name, parameter in model.named_parameters():
        assert loaded.scorer.model.get_parameter(name).is_meta
        assert torch.equal(loaded.read(name), parameter)


def test_a_model_that_the_hub_does_not_have(hub: Path) -> None:
    with pytest.raises(EngineError, match=r"model someone/other: got .* expected a folder or hub name"):
        load_model(Config(), "someone/other", PolicyScorer, torch.float32, SHARDED)


def test_a_sharded_reward_model_is_read_when_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model without a head is refused, as one that is loaded whole."""
    model = LlamaForSequenceClassification(TINY)
    model.save_pretrained(tmp_path / "judge")
    LlamaForCausalLM(TINY).save_pretrained(tmp_path / "policy")
    forbid(monkeypatch, AutoModelForSequenceClassification)
    loaded = load_judge(str(tmp_path / "judge"), torch.float32, SHARDED, trust_remote_code=False)
    assert loaded.read is not None
    for name, parameter in model.named_parameters():
        assert loaded.scorer.model.get_parameter(name).is_meta
        assert torch.equal(loaded.read(name), parameter)
    with pytest.raises(EngineError, match=r"no classification head: score\.weight is not in model\.safetensors"):
        load_judge(str(tmp_path / "policy"), torch.float32, SHARDED, trust_remote_code=False)
