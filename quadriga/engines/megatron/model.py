# SPDX-License-Identifier: Apache-2.0
"""Megatron's GPTModel for a Hugging Face configuration: the layers of one rank, and the parts of them that are ours.

    Norm         RMSNorm of torch, also with sequence parallelism
    Rotary       by the positions of packed tokens and the frequencies of Hugging Face's module
    Attention    by the plan of the packed batch, on any device
    Router       Megatron's, which goes where it is told, and says where it went
    Experts      torch's grouped products, on the tokens that Megatron's router and dispatcher bring
    Linear       Megatron's, or on CUDA Transformer Engine's where that is installed

Legend: n packed tokens, D hidden size, E experts of width F, H query heads, K key-value heads, d head size; tp and ep
ranks of tensor and expert parallelism.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import (
    ModuleSpec,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.utils import get_te_version
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, silu
from transformers import PretrainedConfig, PreTrainedModel

from quadriga.errors import EngineError
from quadriga.models.architecture import backbone
from quadriga.models.attention import AttentionPlan
from quadriga.models.experts import RoutedTokens

_GROUPED_ALIGNMENT = 16  # bytes, of rows that torch's grouped products read


@dataclass
class Packed(PackedSeqParams):
    """A packed batch as it travels through Megatron's layers, in the place of the lengths that its kernels read."""

    qkv_format: str = "sbhd"
    positions: Tensor | None = None  # [n]
    plan: AttentionPlan | None = None
    routed: RoutedTokens | None = None


class Norm(nn.RMSNorm):
    """RMSNorm [n, 1, D]; with sequence parallelism a rank sees some of the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps, device=device, dtype=config.params_dtype)


class Rotary(nn.Module):
    """Angles [n, 1, 1, d] of the positions of a packed batch."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies.float()

    def get_rotary_seq_len(
        self, context: Any, decoder: Any, hidden: Any, config: Any, packed: Packed
    ) -> Tensor:
        """What Megatron hands to `forward`: the positions [n]."""
        assert packed.positions is not None
        return packed.positions

    def forward(
        self, positions: Tensor, *, packed_seq: bool = False, cp_group: Any = None
    ) -> Tensor:
        """[n] -> [n, 1, 1, d]."""
        angles = torch.outer(positions.float(), self.frequencies)
        return torch.cat([angles, angles], -1)[:, None, None]


class Attention(nn.Module):
    """Attention of packed tokens, by the plan of the batch."""

    def __init__(self, config: TransformerConfig, layer_number: int, **options: Any) -> None:
        super().__init__()
        self.layer, self.scale = (
            layer_number - 1,
            options.get("softmax_scale") or config.kv_channels**-0.5,
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        """[n, 1, H/tp, d], [n, 1, K/tp, d] twice -> [n, 1, H/tp * d]."""
        packed: Packed = options["packed_seq_params"]
        assert packed.plan is not None
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = packed.plan.attend(self.layer, query, key, value, self.scale)  # [1, n, H, d]
        return mixed.transpose(0, 1).flatten(2)


class Router(TopKRouter):
    """Megatron's, whose own product of tokens and weight [E, D] needs Transformer Engine."""

    tokens: RoutedTokens | None = None  # those of the call that its layer is in

    def begin(self, layer: nn.Module, inputs: Any, options: Mapping[str, Any]) -> None:
        """Hook of the layer, also when it is computed again for the backward pass."""
        self.tokens = options["packed_seq_params"].routed

    def routing(self, logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """[n, 1, E] -> the weights [n, E] of the chosen experts, and which these are, [n, E]."""
        if self.tokens is None:
            return super().routing(logits, **options)
        replay, number, own = self.router_replay, self.layer_number - 1, None
        replay.set_router_replay_action(RouterReplayAction.RECORD)
        weights, is_chosen = super().routing(logits, **options)
        chosen = replay.get_recorded_indices()
        if (told := self.tokens.told(number, len(logits))) is not None:
            own, chosen = chosen, torch.where(told >= 0, told, chosen)
            replay.target_topk_idx = chosen
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            weights, is_chosen = super().routing(logits, **options)
        replay.clear_router_replay_action()
        replay.clear_indices()
        return self.tokens.see(number, logits[:, 0], weights, chosen, own), is_chosen

    def gating(self, input: Tensor) -> Tensor:
        """[n, 1, D] -> [n, 1, E]."""
        kind = {"fp32": torch.float32, "fp64": torch.float64}.get(
            self.config.moe_router_dtype, input.dtype
        )
        return linear(input.to(kind), self.weight.to(kind))


class Experts(nn.Module):
    """The experts of this rank [E/ep, 2 F, D] and [E/ep, D, F], each for the tokens that it was chosen for."""

    def __init__(self, number: int, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__()
        width, size = config.moe_ffn_hidden_size, config.hidden_size
        options: dict[str, Any] = {
            "device": torch.cuda.current_device(),
            "dtype": config.params_dtype,
        }
        self.gate_up_proj = nn.Parameter(torch.empty(number, 2 * width, size, **options))
        self.down_proj = nn.Parameter(torch.empty(number, size, width, **options))
        self.are_grouped = not why_in_a_loop(config, self.down_proj.device)

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Tokens [m, D] sorted by expert, `counts` [E/ep] of each, with their weights [m] -> [m, D]."""
        if self.are_grouped:
            ends = counts.to(tokens.device).cumsum(0, dtype=torch.int32)
            gate, up = grouped_mm(tokens, self.gate_up_proj.mT, offs=ends).chunk(2, -1)
            mixed = grouped_mm(silu(gate) * up, self.down_proj.mT, offs=ends)
            return mixed * weights[:, None].to(mixed.dtype), None
        sizes, found = counts.tolist(), []
        for expert, (own, weight) in enumerate(
            zip(tokens.split(sizes), weights.split(sizes), strict=True)
        ):
            gate, up = linear(own, self.gate_up_proj[expert]).chunk(2, -1)
            found.append(
                linear(silu(gate) * up, self.down_proj[expert]) * weight[:, None].to(own.dtype)
            )
        return torch.cat(found), None


def why_in_a_loop(config: TransformerConfig, device: torch.device) -> str:
    """Why experts compute one after the other; empty: torch's grouped products take all of them at once."""
    widths = config.hidden_size, config.moe_ffn_hidden_size
    if any(width * config.params_dtype.itemsize % _GROUPED_ALIGNMENT for width in widths):
        return f"rows of {' and '.join(map(str, widths))} numbers are no multiples of {_GROUPED_ALIGNMENT} bytes"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "grouped products need compute capability 8.0"
    return ""


def linear_modules(device: torch.device) -> tuple[type, type, str]:
    """What cuts its rows over tensor-parallel ranks and what its columns, in layers; and the reason, to be printed."""
    own, name = (ColumnParallelLinear, RowParallelLinear), "Megatron's own linear modules"
    if device.type != "cuda":
        return *own, f"{name} (Transformer Engine is for CUDA)"
    if not transformer_engine.HAVE_TE:
        return *own, f"{name} (Transformer Engine is not installed)"
    found = f"linear modules of Transformer Engine {get_te_version()}"
    return transformer_engine.TEColumnParallelLinear, transformer_engine.TERowParallelLinear, found


def _layers(
    config: TransformerConfig, number: int, device: torch.device
) -> TransformerBlockSubmodules:
    norm, (column, row, _) = Norm if config.qk_layernorm else IdentityOp, linear_modules(device)
    attention = SelfAttentionSubmodules(column, Attention, row, norm, norm)
    dense = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    mixture = ModuleSpec(MoELayer, submodules=MoESubmodules(experts=Experts, router=Router))
    layer = ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=mixture if config.num_moe_experts else dense,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules([layer] * number, Norm)


def _keep_padding(padding: int, table: Any, args: tuple[Tensor], found: Tensor) -> Tensor:
    """Hook of the embedding: the entry that architectures give no gradient gets none. [1, n, D], or with sequence
    parallelism this rank's tokens [n/tp, 1, D]."""
    (ids,) = args
    if table.reduce_scatter_embeddings:
        ids = ids[0].chunk(table.tp_group.size())[table.tp_group.rank()][:, None]
    return torch.where((ids == padding)[..., None], found.detach(), found)


def transformer_config(
    model: PretrainedConfig, dtype: torch.dtype, device: torch.device, options: Mapping[str, Any]
) -> TransformerConfig:
    """Megatron's configuration of a Hugging Face one. `options`: what the layout and the user say, by field of it.
    Raises EngineError: Megatron does not know a field, or refuses its value."""
    is_cpu = device.type == "cpu"
    heads = model.num_attention_heads
    values = {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": getattr(model, "num_key_value_heads", None) or heads,
        "kv_channels": getattr(model, "head_dim", None) or model.hidden_size // heads,
        "ffn_hidden_size": model.intermediate_size,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": model.model_type == "qwen2",
        "qk_layernorm": model.model_type in ("qwen3", "qwen3_moe"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu_initialization": is_cpu,
        "perform_initialization": False,
        # Losses are normalised over all rows beforehand.
        "calculate_per_token_loss": True,
        # Fused kernels are CUDA's.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "batch_p2p_comm": False,
    }
    if experts := getattr(model, "num_experts", None):
        values |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": model.moe_intermediate_size,
            "moe_router_topk": model.num_experts_per_tok,
            # Without normalisation the weights are shares of all experts.
            "moe_router_pre_softmax": not model.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_enable_routing_replay": True,
        }
    values |= dict(options)
    try:
        return TransformerConfig(**values)
    except (TypeError, ValueError, AssertionError) as error:
        fix = "Change megatron.override_transformer_config, or the sizes under megatron."
        got = f"{type(error).__name__}: {error}"
        raise EngineError(
            "Megatron's TransformerConfig", got=got, expected="values that it takes", fix=fix
        ) from error


def is_tied_policy(model: PreTrainedModel) -> bool:
    """Whether it has a head whose weight [V, D] is the embedding's."""
    return isinstance(model.get_output_embeddings(), nn.Linear) and bool(
        model.config.tie_word_embeddings
    )


def chunks_of(
    model: PreTrainedModel, config: TransformerConfig, device: torch.device
) -> list[GPTModel]:
    """The chunks of a model that this rank has, one for each virtual stage, without values.
    `model`: on "meta"; its configuration, and the frequencies of its positions, are read."""
    base: Any = backbone(model)
    rotary = base.rotary_emb
    if (
        rotary.attention_scaling != 1.0
        or "dynamic" in rotary.rope_type
        or rotary.rope_type == "longrope"
    ):
        got = f"positions of type {rotary.rope_type!r}"
        raise EngineError(
            "strategy=megatron", got, "frequencies that do not change", "Set strategy=fsdp."
        )
    vocabulary, has_head = (
        base.embed_tokens.num_embeddings,
        isinstance(model.get_output_embeddings(), nn.Linear),
    )
    tp, num_chunks = config.tensor_model_parallel_size, config.virtual_pipeline_model_parallel_size
    pp, chunks = parallel_state.get_pipeline_model_parallel_rank(), []
    for chunk in range(num_chunks or 1):
        vp_stage = chunk if num_chunks else None
        is_first = pp == 0 and chunk == 0
        is_last = pp == config.pipeline_model_parallel_size - 1 and chunk == (num_chunks or 1) - 1
        part = GPTModel(
            config,
            _layers(config, get_num_layers_to_build(config, vp_stage=vp_stage), device),
            vocab_size=-(-vocabulary // tp) * tp,
            max_sequence_length=0,
            pre_process=is_first,
            post_process=is_last,
            # With several stages a tied head has a weight of its own, which is kept equal to the table's.
            share_embeddings_and_output_weights=is_first
            and is_last
            and (is_tied_policy(model) or not has_head),
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        part.rotary_pos_emb = Rotary(rotary.inv_freq.to(device))
        if is_first and (padding := base.embed_tokens.padding_idx) is not None:
            part.embedding.word_embeddings.register_forward_hook(partial(_keep_padding, padding))
        # The hidden states are wanted: what they score is computed without logits.
        part.post_process = False
        if is_last and not has_head:
            del part.output_layer
        for layer in part.decoder.layers:
            if config.num_moe_experts:
                layer.register_forward_pre_hook(layer.mlp.router.begin, with_kwargs=True)
        chunks.append(part.to(device))
    RouterReplay.clear_global_router_replay_instances()  # which would hold them for ever
    return chunks
