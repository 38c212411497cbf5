# SPDX-License-Identifier: Apache-2.0
"""Which parameter of Megatron's, and which part of it, each parameter of a Hugging Face model is.

    Hugging Face                Megatron                         of a rank
    q_proj, k_proj, v_proj      self_attention.linear_qkv        [groups, queries of a group + 1 + 1, head size]
    gate_proj, up_proj          mlp.linear_fc1                   one below the other
    experts                     mlp.experts                      its own: [experts of the rank, ...]
    embed_tokens, lm_head       word_embeddings, output_layer    rows added at the end, so that tp divides them

A family is a row of `FAMILIES`: what its layers have beside `_LAYER`.

Legend: [..., D] a weight, or without D its bias; V vocabulary.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from quadriga.config import Layout
from quadriga.config.actor import MegatronConfig
from quadriga.errors import ConfigError

View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Heads of attention on one rank."""

    groups: int
    queries: int  # of a group
    head: int


@dataclass(frozen=True)
class Place:
    """Where a parameter is in Megatron's model."""

    name: str  # of Megatron's parameter, in its layer or in the model
    cut: int | None  # the dimension that tensor parallelism cuts
    view: str = "whole"
    is_partial: bool = False  # whether each tensor-parallel rank sees some of its heads only
    is_expert: bool = False  # whether expert parallelism cuts its first dimension


_QKV, _FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
_LAYER = {
    "input_layernorm.weight": Place("input_layernorm.weight", None),
    "self_attn.q_proj.weight": Place(f"{_QKV}.weight", 0, "query"),
    "self_attn.k_proj.weight": Place(f"{_QKV}.weight", 0, "key"),
    "self_attn.v_proj.weight": Place(f"{_QKV}.weight", 0, "value"),
    "self_attn.o_proj.weight": Place("self_attention.linear_proj.weight", 1),
    "post_attention_layernorm.weight": Place("pre_mlp_layernorm.weight", None),
    "mlp.gate_proj.weight": Place(f"{_FC1}.weight", 0, "first half"),
    "mlp.up_proj.weight": Place(f"{_FC1}.weight", 0, "second half"),
    "mlp.down_proj.weight": Place("mlp.linear_fc2.weight", 1),
}
_QKV_BIAS = {
    f"self_attn.{name}_proj.bias": Place(f"{_QKV}.bias", 0, view)
    for name, view in (("q", "query"), ("k", "key"), ("v", "value"))
}
_QK_NORM = {
    f"self_attn.{name}_norm.weight": Place(
        f"self_attention.{name}_layernorm.weight", None, is_partial=True
    )
    for name in ("q", "k")
}
_EXPERTS = {
    "mlp.gate.weight": Place("mlp.router.weight", None),
    **{
        f"mlp.experts.{name}": Place(f"mlp.experts.{name}", None, is_expert=True)
        for name in ("gate_up_proj", "down_proj")
    },
}
_MODEL = {
    "model.embed_tokens.weight": Place("embedding.word_embeddings.weight", 0, "vocabulary"),
    "model.norm.weight": Place("decoder.final_layernorm.weight", None),
    "lm_head.weight": Place("output_layer.weight", 0, "vocabulary"),
}
FAMILIES: Mapping[str, Mapping[str, Place]] = {
    "llama": _LAYER,
    "qwen2": _LAYER | _QKV_BIAS,
    "qwen3": _LAYER | _QK_NORM,
    "qwen3_moe": _LAYER | _QK_NORM | _EXPERTS,
}
"""By `model_type`."""
_HEADS = ("value_head.", "score.")  # modules that stay Hugging Face's: one number for each token
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def place_of(name: str, config: PretrainedConfig) -> tuple[int | None, Place]:
    """The layer of a Hugging Face parameter (None: it is in none), and its place in it.
    Raises ConfigError: the table of the family has no such entry."""
    if name.startswith(_HEADS):
        return None, Place(name, None)
    found = _IN_LAYER.fullmatch(name)
    table: Mapping[str, Place] = FAMILIES.get(config.model_type, {}) if found else _MODEL
    key = found[2] if found else name
    if key not in table:
        got, expected = (
            f"the parameter {name} of a {config.model_type} model",
            f"one of {', '.join(table)}",
        )
        fix = f"Set strategy=fsdp, or add {key!r} to the table of {config.model_type!r} in engines/megatron/names.py."
        raise ConfigError(
            "actor_rollout_ref.actor.strategy=megatron", got=got, expected=expected, fix=fix
        )
    return int(found[1]) if found else None, table[key]


def view_of(place: Place, local: torch.Tensor, sizes: Sizes, rows: int) -> torch.Tensor:
    """The part of a Megatron parameter [..., D] of this rank that is one of Hugging Face's; shares its memory.
    `rows`: of the vocabulary that this rank has, without those that were added.

    Returns the elements of the Hugging Face part in their order, in more dimensions."""
    match place.view:
        case "query" | "key" | "value":
            heads = local.unflatten(0, (sizes.groups, sizes.queries + 2, sizes.head))
            start = {"query": 0, "key": sizes.queries, "value": sizes.queries + 1}[place.view]
            return heads.narrow(1, start, sizes.queries if place.view == "query" else 1)
        case "first half":
            return local[: len(local) // 2]
        case "second half":
            return local[len(local) // 2 :]
        case "vocabulary":
            return local[:rows]
    return local


def require_known(
    config: Any, layout: Layout, own: MegatronConfig, where: str = "actor_rollout_ref.actor"
) -> None:
    """Refuse a model that the tables do not know, or whose layers or experts the ranks of a layout do not divide.
    Raises ConfigError: at `where`, the section of the role; names what is missing."""
    kind, problem = config.model_type, ""
    if kind not in FAMILIES:
        fix = (
            f"Set strategy=fsdp, or add {kind!r} to FAMILIES in quadriga/engines/megatron/names.py."
        )
        raise ConfigError(
            f"{where}: strategy=megatron",
            f"model_type {kind!r}",
            f"one of {', '.join(FAMILIES)}",
            fix,
        )
    if kind == "llama" and (config.attention_bias or config.mlp_bias):
        problem = "biases (attention_bias, mlp_bias)"
    elif getattr(config, "use_sliding_window", False):
        problem = "a sliding window"
    elif config.hidden_act != "silu":
        problem = f"the activation {config.hidden_act!r}"
    elif (experts := getattr(config, "num_experts", 0)) % layout.ep or (
        layout.ep > 1 and not experts
    ):
        problem = f"{experts or 'no'} experts, for expert_parallel_size={layout.ep}"
    elif experts and layout.tp > 1 and not own.sequence_parallel:
        problem = "experts and tensor parallelism, but sequence_parallel=false"
    elif experts and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        problem = (
            "layers without experts among those with them (mlp_only_layers, decoder_sparse_step)"
        )
    elif not _is_even(config.num_hidden_layers, layout.pp, own):
        stages = layout.pp * (own.virtual_pipeline_model_parallel_size or 1)
        problem = (
            f"{config.num_hidden_layers} layers, for {stages} pipeline stages, virtual ones counted"
        )
    if problem:
        expected, fix = (
            "what Megatron's layers compute here, in even stages",
            "Change the sizes, or set strategy=fsdp.",
        )
        raise ConfigError(
            f"{where}: strategy=megatron", f"a {kind} model with {problem}", expected, fix
        )


def _is_even(num_layers: int, pp: int, own: MegatronConfig) -> bool:
    """Whether layers, and embedding and loss where they count as one, are as many in all stages that have no number."""
    settings, virtual = (
        own.override_transformer_config,
        own.virtual_pipeline_model_parallel_size or 1,
    )
    counted = [
        settings.get(f"account_for_{one}_in_pipeline_split") for one in ("embedding", "loss")
    ]
    given = [settings.get(f"num_layers_in_{one}_pipeline_stage") for one in ("first", "last")]
    numbers = [number for number in given if number]
    rest, stages = num_layers + sum(map(bool, counted)) - sum(numbers), pp - len(numbers)
    if any(number % virtual for number in numbers):
        return False
    return rest > 0 and rest % (stages * virtual) == 0 if stages > 0 else rest == stages == 0
