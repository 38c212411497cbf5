# SPDX-License-Identifier: Apache-2.0
"""Tables from the parameters of a Hugging Face model to their places in Megatron's modules.

    Hugging Face              Megatron                        on one rank
    q_proj, k_proj, v_proj    self_attention.linear_qkv       [groups, queries per group + 2, head]
    gate_proj, up_proj        mlp.linear_fc1                  gate above up
    experts                   mlp.experts                     [experts of the rank, ...]
    embed_tokens, lm_head     word_embeddings, output_layer   rows padded to a multiple of tp

`FAMILIES` has a table for each family: `_LAYER`, and the parameters that its layers have besides.

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
class HeadSizes:
    """Attention heads of one rank."""

    num_groups: int  # key-value heads, each with a group of query heads
    num_queries: int  # query heads per group
    head_size: int


@dataclass(frozen=True)
class ParameterPlace:
    """Place of a Hugging Face parameter in Megatron's model."""

    name: str  # name of Megatron's parameter in its layer, or outside of layers in the model
    sharded_dimension: int | None  # by tensor parallelism; None: each rank has the full parameter
    view: str = "whole"  # which rows of Megatron's parameter it is; see `view_of`
    is_partial: bool = False  # whether each tensor-parallel rank uses it for some heads only
    is_expert: bool = False  # whether expert parallelism shards its first dimension


_QKV = "self_attention.linear_qkv"
_FC1 = "mlp.linear_fc1"
_LAYER = {
    "input_layernorm.weight": ParameterPlace("input_layernorm.weight", None),
    "self_attn.q_proj.weight": ParameterPlace(f"{_QKV}.weight", 0, "query"),
    "self_attn.k_proj.weight": ParameterPlace(f"{_QKV}.weight", 0, "key"),
    "self_attn.v_proj.weight": ParameterPlace(f"{_QKV}.weight", 0, "value"),
    "self_attn.o_proj.weight": ParameterPlace("self_attention.linear_proj.weight", 1),
    "post_attention_layernorm.weight": ParameterPlace("pre_mlp_layernorm.weight", None),
    "mlp.gate_proj.weight": ParameterPlace(f"{_FC1}.weight", 0, "first half"),
    "mlp.up_proj.weight": ParameterPlace(f"{_FC1}.weight", 0, "second half"),
    "mlp.down_proj.weight": ParameterPlace("mlp.linear_fc2.weight", 1),
}
_QKV_BIAS = {
    f"self_attn.{name}_proj.bias": ParameterPlace(f"{_QKV}.bias", 0, view)
    for name, view in (("q", "query"), ("k", "key"), ("v", "value"))
}
_QK_NORM = {
    f"self_attn.{name}_norm.weight": ParameterPlace(
        f"self_attention.{name}_layernorm.weight", None, is_partial=True
    )
    for name in ("q", "k")
}
_EXPERTS = {
    "mlp.gate.weight": ParameterPlace("mlp.router.weight", None),
    **{
        f"mlp.experts.{name}": ParameterPlace(f"mlp.experts.{name}", None, is_expert=True)
        for name in ("gate_up_proj", "down_proj")
    },
}
_MODEL = {
    "model.embed_tokens.weight": ParameterPlace(
        "embedding.word_embeddings.weight", 0, "vocabulary"
    ),
    "model.norm.weight": ParameterPlace("decoder.final_layernorm.weight", None),
    "lm_head.weight": ParameterPlace("output_layer.weight", 0, "vocabulary"),
}
FAMILIES: Mapping[str, Mapping[str, ParameterPlace]] = {
    "llama": _LAYER,
    "qwen2": _LAYER | _QKV_BIAS,
    "qwen3": _LAYER | _QK_NORM,
    "qwen3_moe": _LAYER | _QK_NORM | _EXPERTS,
}
"""Tables by `model_type`."""
# Prefixes of the parameters of heads with one output, which Hugging Face's modules compute.
_ONE_OUTPUT_HEADS = ("value_head.", "score.")
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def place_of(name: str, config: PretrainedConfig) -> tuple[int | None, ParameterPlace]:
    """Find the place of a Hugging Face parameter in Megatron's model.

    Args:
        name: name of the parameter.
        config: configuration of the Hugging Face model.

    Returns:
        The parameter's layer, None outside of layers, and its place.

    Raises:
        ConfigError: the table of the family has no such parameter.
    """
    if name.startswith(_ONE_OUTPUT_HEADS):
        return None, ParameterPlace(name, None)
    layer: int | None = None
    key = name
    table: Mapping[str, ParameterPlace] = _MODEL
    match = _IN_LAYER.fullmatch(name)
    if match is not None:
        layer = int(match[1])
        key = match[2]
        table = FAMILIES.get(config.model_type, {})
    if key not in table:
        entry = f"{key!r} to the table of {config.model_type!r} in engines/megatron/names.py"
        raise ConfigError(
            "actor_rollout_ref.actor.strategy=megatron",
            got=f"the parameter {name} of a {config.model_type} model",
            expected=f"one of {', '.join(table)}",
            fix=f"Set strategy=fsdp, or add {entry}.",
        )
    return layer, table[key]


def view_of(
    place: ParameterPlace, local: torch.Tensor, sizes: HeadSizes, num_entries: int
) -> torch.Tensor:
    """View the rows of a Megatron parameter that belong to a Hugging Face parameter.

    Args:
        place: place of the Hugging Face parameter.
        local: [..., D], this rank's Megatron parameter, or its gradient.
        sizes: attention heads of the rank.
        num_entries: vocabulary entries of the rank, without padding.

    Returns:
        A view with the elements of the Hugging Face parameter, in order. It may have more
        dimensions than the parameter.
    """
    if place.view in ("query", "key", "value"):
        # Each group has the rows of its queries, of its key and of its value, in this order.
        heads = local.unflatten(0, (sizes.num_groups, sizes.num_queries + 2, sizes.head_size))
        if place.view == "query":
            return heads.narrow(1, 0, sizes.num_queries)
        offset = 0 if place.view == "key" else 1
        return heads.narrow(1, sizes.num_queries + offset, 1)
    if place.view == "first half":
        return local[: len(local) // 2]
    if place.view == "second half":
        return local[len(local) // 2 :]
    if place.view == "vocabulary":
        return local[:num_entries]
    return local


def require_supported(
    config: Any, layout: Layout, megatron: MegatronConfig, where: str = "actor_rollout_ref.actor"
) -> None:
    """Check that Megatron can compute a model, and that the ranks divide its layers and experts.

    Args:
        config: configuration of the Hugging Face model.
        layout: layout of the ranks.
        megatron: the section `megatron` of the role.
        where: the section of the role, for messages.

    Raises:
        ConfigError: the model or a feature of it is not supported, or the sizes do not fit.
    """
    where = f"{where}: strategy=megatron"
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            where,
            got=f"model_type {kind!r}",
            expected=f"one of {', '.join(FAMILIES)}",
            fix=f"Set strategy=fsdp, or add {kind!r} to FAMILIES in "
            "quadriga/engines/megatron/names.py.",
        )
    problem = _problem_of(config, layout, megatron)
    if problem:
        raise ConfigError(
            where,
            got=f"a {kind} model with {problem}",
            expected="a model that Megatron's layers compute here, in even stages",
            fix="Change the sizes, or set strategy=fsdp.",
        )


def _problem_of(config: Any, layout: Layout, megatron: MegatronConfig) -> str:
    """Explain why Megatron cannot compute a model of a known family; "" if it can."""
    # Features for which `FAMILIES` has no parameters, or `transformer_config` no field.
    if config.model_type == "llama" and (config.attention_bias or config.mlp_bias):
        return "biases (attention_bias, mlp_bias)"
    if getattr(config, "use_sliding_window", False):
        return "a sliding window"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act!r}"

    num_experts = getattr(config, "num_experts", 0)
    if num_experts % layout.ep or (layout.ep > 1 and not num_experts):
        return f"{num_experts or 'no'} experts, for expert_parallel_size={layout.ep}"
    # Megatron itself refuses this combination.
    if num_experts and layout.tp > 1 and not megatron.sequence_parallel:
        return "experts and tensor parallelism, but sequence_parallel=false"
    if num_experts and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        return "experts in some layers only (mlp_only_layers, decoder_sparse_step)"

    if not _divides_evenly(config.num_hidden_layers, layout.pp, megatron):
        num_stages = layout.pp * (megatron.virtual_pipeline_model_parallel_size or 1)
        sizes = f"{config.num_hidden_layers} layers, for {num_stages} pipeline stages"
        return f"{sizes} (including virtual ones)"
    return ""


def _divides_evenly(num_layers: int, pp: int, megatron: MegatronConfig) -> bool:
    """Whether Megatron can divide the layers over the stages.

    The first and the last stage may have a set number of layers, which must be a multiple of the
    virtual stages. All other stages must get the same number. Embedding and loss count as layers if
    Megatron's settings say so.

    Args:
        num_layers: layers of the model.
        pp: number of pipeline stages.
        megatron: the section `megatron` of the role.
    """
    settings = megatron.override_transformer_config
    num_virtual = megatron.virtual_pipeline_model_parallel_size or 1
    num_remaining = num_layers
    for part in ("embedding", "loss"):
        if settings.get(f"account_for_{part}_in_pipeline_split"):
            num_remaining += 1

    # Leave stages with a set number of layers out of the division.
    num_stages = pp
    for position in ("first", "last"):
        num_explicit = settings.get(f"num_layers_in_{position}_pipeline_stage")
        if num_explicit:
            if num_explicit % num_virtual:
                return False
            num_remaining -= num_explicit
            num_stages -= 1

    if num_stages > 0:
        return num_remaining > 0 and num_remaining % (num_stages * num_virtual) == 0
    # All stages have a set number of layers, so these must be all layers.
    return num_remaining == num_stages == 0
