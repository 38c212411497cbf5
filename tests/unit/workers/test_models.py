# SPDX-License-Identifier: Apache-2.0
"""Models that do not fit a run's processes or sequences are refused by their configurations alone; weights that ranks
share are read when they are cut, and never whole."""

import json
from contextlib import nullcontext
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
    LlamaForTokenClassification,
)
from transformers.models.qwen3_moe import Qwen3MoeConfig

from quadriga.config import Config, OptimConfig
from quadriga.config.layout import Layout
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import CheckpointError, ConfigError, EngineError
from quadriga.models.architecture import is_packed
from quadriga.models.load import load_config
from quadriga.models.scorers import PolicyScorer, ValueScorer
from quadriga.workers.models import (
    check_checkpoint,
    check_models,
    layout_tables,
    load_model,
    load_reward_scorer,
    sizes_of_models,
)
from tests.architectures import config_of
from tests.moe import CONFIGS
from tests.tiny_vision import vision_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path / "llama")
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    vision_config().save_pretrained(tmp_path / "sees")
    return tmp_path


def config(
    folder: Path, model: str = "llama", processes: int = 4, length: int = 32, **sizes: Any
) -> Config:
    return Config(
        data={"max_prompt_length": length, "max_response_length": 32},
        actor_rollout_ref={"model": {"path": str(folder / model)}, "actor": sizes},
        trainer={"backend": "ray", "n_gpus_per_node": processes},
    )


def test_models_that_fit(folder: Path) -> None:
    check_models(
        config(folder, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
        has_critic=True,
    )
    check_models(config(folder, "gpt2", processes=2), has_critic=True)


def test_models_that_megatron_has_no_table_for(folder: Path) -> None:
    """A family, layers that virtual stages do not divide, and a kind of layer; all before a process starts."""
    check_models(
        config(folder, strategy="megatron", tensor_model_parallel_size=2), has_critic=False
    )
    with pytest.raises(
        ConfigError, match="model_type 'gpt2', expected one of llama, qwen2, qwen3, qwen3_moe"
    ):
        check_models(config(folder, "gpt2", strategy="megatron"), has_critic=False)
    stages = {
        "pipeline_model_parallel_size": 2,
        "megatron": {"virtual_pipeline_model_parallel_size": 2},
    }
    with pytest.raises(ConfigError, match="2 layers, for 4 pipeline stages"):
        check_models(config(folder, strategy="megatron", **stages), has_critic=False)
    for first, fits in ((1, True), (2, False)):
        own = {"override_transformer_config": {"num_layers_in_first_pipeline_stage": first}}
        uneven = config(folder, strategy="megatron", pipeline_model_parallel_size=2, megatron=own)
        with (
            nullcontext()
            if fits
            else pytest.raises(ConfigError, match="2 layers, for 2 pipeline stages")
        ):
            check_models(uneven, has_critic=False)
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
    }
    sizes["num_experts_per_tok"] = 2
    Qwen3MoeConfig(**sizes, num_experts=6).save_pretrained(folder / "mixture")
    Qwen3MoeConfig(**sizes, num_experts=6, mlp_only_layers=[0]).save_pretrained(folder / "some")

    def experts(model: str, ep: int, **own: Any) -> Config:
        sizes = {"expert_parallel_size": ep, "tensor_model_parallel_size": 2}
        return config(folder, model, strategy="megatron", megatron=own, **sizes)

    check_models(experts("mixture", 2), has_critic=False)
    for given, problem in (
        (experts("mixture", 4), "6 experts, for expert_parallel_size=4"),
        (experts("llama", 2), "no experts, for expert_parallel_size=2"),
        (experts("mixture", 1, sequence_parallel=False), "sequence_parallel=false"),
        (experts("some", 1), "mlp_only_layers"),
        (experts("mixture", 3), "got 3, for stages of 4 processes"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_models(given, has_critic=False)
    LlamaConfig(num_hidden_layers=2, attention_bias=True).save_pretrained(folder / "biased")
    with pytest.raises(ConfigError, match="biases"):
        check_models(config(folder, "biased", strategy="megatron"), has_critic=False)
    with pytest.raises(
        ConfigError, match="4 heads and 2 key-value heads for tensor parallelism over 4"
    ):
        check_models(
            config(folder, strategy="megatron", tensor_model_parallel_size=4), has_critic=False
        )


def test_a_checkpoint_of_another_number_of_experts(folder: Path) -> None:
    """By its config.json; one that cannot be read is left to those who say what is damaged."""
    saved = folder / "global_step_1" / "actor"
    CONFIGS["qwen3_moe"].save_pretrained(folder / "mixture")
    for number in (4, 6):
        Qwen3MoeConfig(num_experts=number).save_pretrained(saved)
        with (
            nullcontext()
            if number == 4
            else pytest.raises(CheckpointError, match=r"of 6 experts.*expected 4, as")
        ):
            check_checkpoint(config(folder, "mixture"), saved.parent)
    with pytest.raises(CheckpointError, match=r"of 6 experts.*expected 0"):
        check_checkpoint(config(folder), saved.parent)
    for text in ("{", "[]", '{"text_config": 3}'):
        (saved / "config.json").write_text(text)
        check_checkpoint(config(folder, "mixture"), saved.parent)


def test_a_model_that_does_not_generate(tmp_path: Path) -> None:
    """An encoder, though transformers has a causal class for it; a classifier may become a reward model."""
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bert")
    LlamaConfig(architectures=["LlamaForSequenceClassification"]).save_pretrained(
        tmp_path / "scores"
    )
    with pytest.raises(
        ConfigError, match="names BertForMaskedLM, expected a causal language model"
    ):
        check_models(config(tmp_path, "bert"), has_critic=False)
    scores = Config(
        task="reward_model", actor_rollout_ref={"model": {"path": str(tmp_path / "scores")}}
    )
    check_models(scores, has_critic=False)


@pytest.mark.parametrize(
    "settings", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "gptq"}]
)
def test_quantized_models(tmp_path: Path, settings: dict[str, Any]) -> None:
    LlamaConfig(quantization_config=settings).save_pretrained(tmp_path / "llama")
    with pytest.raises(
        EngineError,
        match=rf"llama: got quantized weights \({settings['quant_method']} .*be trained",
    ):
        check_models(config(tmp_path), has_critic=False)


def test_a_padding_token_beyond_the_embedding(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=8, pad_token_id=8).save_pretrained(tmp_path)
    assert load_config(tmp_path).pad_token_id is None


def test_sequences_longer_than_the_positions(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 65 tokens, expected at most 64"):
        check_models(config(folder, length=33), has_critic=True)


def test_heads_that_cannot_be_shared(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="LlamaConfig: got 4 heads and 2 key-value heads for tensor"
    ):
        check_models(config(folder, tensor_model_parallel_size=4), has_critic=True)


def test_an_architecture_without_a_plan_for_tensor_parallelism(folder: Path) -> None:
    with pytest.raises(ConfigError, match="GPT2Config: got an architecture without a plan"):
        check_models(config(folder, "gpt2", tensor_model_parallel_size=2), has_critic=True)


def test_rows_that_are_computed_alone(folder: Path) -> None:
    """What needs packed rows is refused: `native`, and ranks that share the layers. With `hf` they may have shards."""
    config_of("LFM2").save_pretrained(folder / "lfm2")
    needed = {"max_prompt_length": 32, "max_response_length": 32}
    for rollout, sizes, where in (
        (
            "native",
            {},
            r"rollout.name: got native, for an architecture whose rows are computed one at a time",
        ),
        (
            "hf",
            {"ulysses_sequence_parallel_size": 2},
            r"actor: got .*sp=2.*, expected no other sizes than fsdp_size",
        ),
    ):
        model = {"path": str(folder / "lfm2")}
        role = {"model": model, "actor": sizes, "rollout": {"name": rollout}}
        run = Config(
            data=needed, actor_rollout_ref=role, trainer={"backend": "ray", "n_gpus_per_node": 2}
        )
        with pytest.raises(ConfigError, match=where):
            check_models(run, has_critic=False)
    role = {"model": model, "rollout": {"name": "hf"}}
    check_models(Config(data=needed, actor_rollout_ref=role), has_critic=False)


def test_positions_that_depend_on_the_length(folder: Path) -> None:
    """They do beyond the length that the model was first trained on; `native` would mix them."""
    model = config_of("Phi-3")
    model.original_max_position_embeddings = 48
    model.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0,
        "original_max_position_embeddings": 48, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    model.save_pretrained(folder / "phi")
    with pytest.raises(
        ConfigError, match="got native, for sequences of up to 64 tokens of a model with rope_type"
    ):
        check_models(config(folder, "phi", processes=1), has_critic=False)


def test_tables_are_told_of_sections_with_several_processes(folder: Path) -> None:
    (actor, *_) = layout_tables(config(folder, tensor_model_parallel_size=2), has_critic=True)
    assert "actor_rollout_ref.actor: fsdp=2 tp=2 sp=1 pp=1" in actor
    assert list(layout_tables(config(folder, processes=1), has_critic=True)) == []


def test_a_model_that_sees_fits(folder: Path) -> None:
    check_models(config(folder, "sees", freeze_vision_tower=True), has_critic=True)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"router_replay": "rollout", "model": "llama"},
            "got rollout, with a model without experts",
        ),
        (
            {"router_aux_loss_coef": 0.1, "model": "llama"},
            "router_aux_loss_coef: got 0.1, with a model without experts",
        ),
    ],
)
def test_routers_that_cannot_be_replayed(folder: Path, changes: dict[str, Any], told: str) -> None:
    CONFIGS["qwen3_moe"].save_pretrained(folder / "experts")
    check_models(
        config(folder, "experts", router_replay="rollout", router_aux_loss_coef=0.1),
        has_critic=False,
    )
    with pytest.raises(ConfigError, match=told):
        check_models(
            config(folder, **{"model": "experts", "processes": 2, **changes}), has_critic=False
        )


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ({"expert_parallel_size": 4}, 16 * 28_849_152 / 8),
        # Experts over 4 ranks, of which 2 have the same ones; the rest over tp=2, and 4 ranks shard its masters.
        (
            {"expert_parallel_size": 4, "strategy": "megatron", "tensor_model_parallel_size": 2},
            6 * (25_165_824 / 4 + 3_683_328 / 2) + 12 * (25_165_824 / 8 + 3_683_328 / 8),
        ),
    ],
)
def test_sizes_know_experts(folder: Path, sizes: dict[str, Any], kept: float) -> None:
    """Counted by hand: four layers of attention (655,360), a router (8,192), 16 experts (393,216 each), two of which a
    token takes, and norms (1,152); embedding and head (512,000 each), and the last norm (512)."""
    Qwen3MoeConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        vocab_size=1000, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=2, tie_word_embeddings=False,
    ).save_pretrained(folder / "mixture")  # fmt: skip
    run = config(folder, "mixture", 8, fsdp_config={"model_dtype": "bfloat16"}, **sizes)
    of_model, of_process, of_update, of_rollout = sizes_of_models(run, has_critic=False)
    told = "28.8 M parameters, 25.2 M of them experts, 2 of 16 in each of 4 layers for a token; 6.3 M multiply it: "
    assert told + "0.0126 GFLOP forward, 0.0379 in an update" in of_model
    assert f"keeps about {kept / 1e9:.3g} GB" in of_process
    assert "the memory of an update is not predicted for " in of_update
    assert "copy of the weights takes 0.0577 GB while it generates, and none while" in of_rollout


def test_what_a_process_keeps_is_what_an_engine_has() -> None:
    """In one process, but for the sums of gradients, which come with the first of these."""
    small = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
    )
    how = {
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "training": Training(OptimConfig(), 1.0, 1),
    }
    engine = FSDPEngine(PolicyScorer(LlamaForCausalLM(small)), **how)
    tensors = (*engine.parameters.parameters.values(), *engine.parameters.masters.values())
    count = engine.num_parameters
    kept = Layout().state_bytes(0, count, 2, is_trained=True)
    assert sum(one.nbytes for one in tensors) + engine.moment_bytes == kept - 4 * count


def test_a_rollout_without_experts_to_divide(folder: Path) -> None:
    rollout = {"name": "vllm", "tensor_model_parallel_size": 2, "expert_parallel_size": 2}
    lengths = {"max_prompt_length": 32, "max_response_length": 32}
    run = Config(
        data=lengths,
        actor_rollout_ref={"model": {"path": str(folder / "llama")}, "rollout": rollout},
    )
    with pytest.raises(
        ConfigError, match=r"expert_parallel_size: got 2, with a model without experts \(llama\)"
    ):
        check_models(run, has_critic=False)


def test_layouts_of_a_model_that_sees(folder: Path) -> None:
    two = {"processes": 2}
    check_models(config(folder, "sees", **two, pipeline_model_parallel_size=2), has_critic=True)
    deep = vision_config("qwen3_vl")
    deep.vision_config.deepstack_visual_indexes = [0, 1]
    deep.save_pretrained(folder / "deep")
    with pytest.raises(
        ConfigError,
        match=r"with 1 layers in the first stage \(qwen3_vl\), expected at least 2 there",
    ):
        check_models(config(folder, "deep", **two, pipeline_model_parallel_size=2), has_critic=True)
    check_models(config(folder, "sees", **two, ulysses_sequence_parallel_size=2), has_critic=True)


def test_what_vllm_does_not_take_of_glm_4v(folder: Path) -> None:
    glm = vision_config("glm4v")
    glm.save_pretrained(folder / "glm")
    run = config(folder, "glm").model_dump(exclude_unset=True)
    run["actor_rollout_ref"] |= {"rollout": {"name": "vllm"}}
    check_models(Config(**run), has_critic=False)
    for sizes, has_bias, told in [
        (
            {"max_pixels": 512},
            True,
            r"mm_processor_kwargs: got \{'max_pixels': 512\}, with vllm and glm4v",
        ),
        ({}, False, r"model\.path: got attention_bias=false, with vllm and glm4v"),
    ]:
        glm.text_config.attention_bias = has_bias
        glm.save_pretrained(folder / "glm")
        run["data"] = {"mm_processor_kwargs": sizes}
        with pytest.raises(ConfigError, match=told):
            check_models(Config(**run), has_critic=False)


def test_a_frozen_encoder_where_there_is_none(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"freeze_vision_tower: got True, with a model without a vision encoder"
    ):
        check_models(config(folder, freeze_vision_tower=True), has_critic=True)


def with_changes(folder: Path, **changes: Any) -> Config:
    """A run of the vision-language model with some sections changed."""
    whole = config(folder, "sees").model_dump(exclude_unset=True)
    for name, section in changes.items():
        whole[name] = whole.get(name, {}) | section
    return Config(**whole)


def test_adapters_and_models_of_text_beside_one_that_sees(folder: Path) -> None:
    model = {"path": str(folder / "sees"), "lora_rank": 4}
    for changes, told in [
        (
            {"actor": {"freeze_vision_tower": True}},
            r"freeze_vision_tower: got True, with an adapter, which learns in",
        ),
        (
            {"rollout": {"name": "vllm"}},
            r"lora_merge: got None, with vllm and a vision-language model \(qwen2_5_vl\)",
        ),
    ]:
        with pytest.raises(ConfigError, match=told):
            check_models(
                with_changes(folder, actor_rollout_ref={"model": model} | changes), has_critic=True
            )
    check_models(with_changes(folder, actor_rollout_ref={"model": model}), has_critic=True)
    reward = {"enable": True, "model": {"path": str(folder / "llama")}}
    with pytest.raises(
        ConfigError, match=r"reward_model\.model\.path: got a model of type llama, with a vision-"
    ):
        check_models(with_changes(folder, reward_model=reward), has_critic=True)
    reward["model"]["path"] = str(folder / "sees")
    check_models(with_changes(folder, reward_model=reward), has_critic=True)
    with pytest.raises(ConfigError, match=r"critic\.model\.path: got a text model"):
        check_models(
            with_changes(folder, critic={"model": {"path": str(folder / "llama")}}), has_critic=True
        )


WHOLE = Processes(Layout(), Layout().place(0), ProcessGroup(0, 1), ProcessGroup(0, 1))
SHARDED = Processes(
    Layout(dp_shard=2), Layout(dp_shard=2).place(0), ProcessGroup(0, 2), ProcessGroup(0, 2)
)
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
    monkeypatch.setattr(
        kind, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded whole")
    )


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
    with pytest.raises(
        EngineError, match=r"model someone/other: got .* expected a folder or hub name"
    ):
        load_model(Config(), "someone/other", PolicyScorer, torch.float32, SHARDED)


def test_a_folder_that_is_not_there_is_no_hub_name(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError,
        match=r"model .*/models/mine: got no such folder, expected a folder or hub name",
    ):
        load_model(
            Config(), str(tmp_path / "models" / "mine"), PolicyScorer, torch.float32, SHARDED
        )


def heads_of(path: Path) -> list[dict[str, torch.Tensor]]:
    """The value head of a critic at `path`, that of one loaded whole and that of one whose shards are read."""
    whole = load_model(
        Config(), str(path), ValueScorer, torch.float32, WHOLE
    ).scorer.model.value_head["linear"]
    read = load_model(Config(), str(path), ValueScorer, torch.float32, SHARDED).read
    assert read is not None
    shards = {name: read(f"value_head.linear.{name}") for name in ("weight", "bias")}
    return [{"weight": whole.weight.data, "bias": whole.bias.data}, shards]


@pytest.mark.parametrize("kind", ["trl", "tokens", "sequences"])
def test_a_critic_has_the_value_head_of_its_files(kind: str, tmp_path: Path) -> None:
    """Whole and sharded; the projection to the vocabulary, which it does not use, need not be there."""
    torch.manual_seed(0)
    classes = {
        "trl": LlamaForCausalLM,
        "tokens": LlamaForTokenClassification,
        "sequences": LlamaForSequenceClassification,
    }
    model, bias = classes[kind](TINY), torch.zeros(1)
    if kind == "trl":
        weight, bias = torch.randn(1, 16), torch.randn(1)
        state = {**model.state_dict(), "v_head.summary.weight": weight, "v_head.summary.bias": bias}
        model.save_pretrained(tmp_path, state_dict=state)
    else:
        weight = model.score.weight.data.normal_()
        bias = bias if model.score.bias is None else model.score.bias.data.normal_()
        model.save_pretrained(tmp_path)
    for head in heads_of(tmp_path):
        assert torch.equal(head["weight"], weight) and torch.equal(head["bias"], bias)


def test_a_critic_of_a_policy_begins_at_zero_and_one_of_two_labels_is_refused(
    tmp_path: Path,
) -> None:
    LlamaForCausalLM(TINY).save_pretrained(tmp_path / "policy")
    assert not any(one.any() for head in heads_of(tmp_path / "policy") for one in head.values())
    two = LlamaConfig(**{**TINY.to_dict(), "num_labels": 2})
    LlamaForTokenClassification(two).save_pretrained(tmp_path / "two")
    for processes in (WHOLE, SHARDED):
        with pytest.raises(EngineError, match="got a head with 2 labels, expected one, the value"):
            load_model(Config(), str(tmp_path / "two"), ValueScorer, torch.float32, processes)


def test_a_sharded_reward_model_is_read_when_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a model without a head is refused, as one that is loaded whole."""
    model = LlamaForSequenceClassification(TINY)
    model.save_pretrained(tmp_path / "judge")
    LlamaForCausalLM(TINY).save_pretrained(tmp_path / "policy")
    forbid(monkeypatch, AutoModelForSequenceClassification)
    loaded = load_reward_scorer(
        str(tmp_path / "judge"), torch.float32, SHARDED, trust_remote_code=False
    )
    assert loaded.read is not None
    for name, parameter in model.named_parameters():
        assert loaded.scorer.model.get_parameter(name).is_meta
        assert torch.equal(loaded.read(name), parameter)
    with pytest.raises(
        EngineError, match=r"no classification head: score\.weight is not in model\.safetensors"
    ):
        load_reward_scorer(
            str(tmp_path / "policy"), torch.float32, SHARDED, trust_remote_code=False
        )


JUDGE_CODE = """
from transformers import (
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)


class JudgeConfig(LlamaConfig):
    model_type = "judge"


class JudgeModel(LlamaModel):
    config_class = JudgeConfig


AutoModel.register(JudgeConfig, JudgeModel, exist_ok=True)  # the classifier builds it


class JudgeForCausalLM(LlamaForCausalLM):
    config_class = JudgeConfig


class JudgeForSequenceClassification(LlamaForSequenceClassification):
    config_class = JudgeConfig
"""


def test_a_reward_model_with_its_own_code_is_tried_with_this_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and sharded."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    judge = tmp_path / "judge"
    LlamaForSequenceClassification(TINY).save_pretrained(judge)
    (judge / "judge.py").write_text(JUDGE_CODE)
    entries = json.loads((judge / "config.json").read_text())
    entries["model_type"] = "judge"
    entries["auto_map"] = {
        "AutoConfig": "judge.JudgeConfig",
        "AutoModelForCausalLM": "judge.JudgeForCausalLM",
        "AutoModelForSequenceClassification": "judge.JudgeForSequenceClassification",
    }
    (judge / "config.json").write_text(json.dumps(entries))
    for processes in (WHOLE, SHARDED):
        loaded = load_reward_scorer(str(judge), torch.float32, processes, trust_remote_code=True)
        assert is_packed(loaded.scorer.model)
