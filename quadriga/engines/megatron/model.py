# SPDX-License-Identifier: Apache-2.0
"""Megatron's GPTModel for a Hugging Face configuration, on one rank, with some modules replaced.

    Norm         torch's RMSNorm, also with sequence parallelism
    Rotary       from the positions of packed tokens and the frequencies of Hugging Face's module
    Attention    by the plan of the packed batch, on any device
    Router       Megatron's router, which also records its choices, or replays given ones
    Experts      torch's grouped products, on tokens from Megatron's router and dispatcher
    Linear       Megatron's, or on CUDA Transformer Engine's if that is installed

Legend: n packed tokens, D hidden size, E experts of width F, H query heads, K key-value heads, d
head size; tp and ep the sizes of the tensor- and expert-parallel groups.
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

_GROUPED_ALIGNMENT = 16  # bytes of a row in torch's grouped products


@dataclass
class Packed(PackedSeqParams):
    """A packed batch, passed to Megatron's layers in place of the sequence lengths they expect."""

    # With the format "thd" of packed tokens, Megatron would drop the batch dimension of [n, 1, D].
    qkv_format: str = "sbhd"
    positions: Tensor | None = None  # [n]
    plan: AttentionPlan | None = None
    routed: RoutedTokens | None = None


class Norm(nn.RMSNorm):
    """RMSNorm of hidden states [n, 1, D]. With sequence parallelism, n counts this rank's tokens.

    Args:
        config: Megatron's configuration.
        hidden_size: D.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps, device=device, dtype=config.params_dtype)


class Rotary(nn.Module):
    """Rotary position embedding: angles [n, 1, 1, d] for the positions of a packed batch.

    Args:
        frequencies: [d / 2], radians per position.
    """

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies.float()

    def get_rotary_seq_len(
        self, context: Any, decoder: Any, hidden: Any, config: Any, packed: Packed
    ) -> Tensor:
        """Return the positions [n], which Megatron passes to `forward`.

        Args:
            context: not used.
            decoder: not used.
            hidden: not used.
            config: not used.
            packed: the packed batch.

        Returns:
            Positions [n] of the packed tokens.
        """
        assert packed.positions is not None
        return packed.positions

    def forward(
        self, positions: Tensor, *, packed_seq: bool = False, cp_group: Any = None
    ) -> Tensor:
        """Compute the angles.

        Args:
            positions: [n].
            packed_seq: not used.
            cp_group: not used.

        Returns:
            [n, 1, 1, d].
        """
        angles = torch.outer(positions.float(), self.frequencies)  # [n, d / 2]
        # Number i of a head and number i + d / 2 are rotated by the same angle.
        return torch.cat([angles, angles], -1)[:, None, None]


class Attention(nn.Module):
    """Attention of packed tokens, by the plan of the batch.

    Args:
        config: Megatron's configuration.
        layer_number: number of the layer, starting at 1.
        options: Megatron's other options; only `softmax_scale` is used.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **options: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1
        self.scale = options.get("softmax_scale") or config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        """Compute attention.

        Args:
            query: [n, 1, H/tp, d].
            key: [n, 1, K/tp, d].
            value: [n, 1, K/tp, d].
            mask: not used.
            options: Megatron's keyword arguments, of which `packed_seq_params` is a `Packed`.

        Returns:
            [n, 1, H/tp * d].
        """
        packed: Packed = options["packed_seq_params"]
        assert packed.plan is not None
        # From Megatron's [n, 1, H/tp, d] to [1, H/tp, n, d].
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output = packed.plan.attend(self.layer, query, key, value, self.scale)  # [1, n, H/tp, d]
        return output.transpose(0, 1).flatten(2)


class Router(TopKRouter):
    """Megatron's router, with replay, and with torch's matrix product on any device."""

    # Tokens of the current call of its layer. None: choices are neither replayed nor recorded.
    tokens: RoutedTokens | None = None

    def store_tokens(self, layer: nn.Module, inputs: Any, options: Mapping[str, Any]) -> None:
        """Hook of the layer: set `tokens`, also when the layer is recomputed for gradients.

        Args:
            layer: the layer.
            inputs: not used.
            options: the layer's keyword arguments, of which `packed_seq_params` is a `Packed`.
        """
        self.tokens = options["packed_seq_params"].routed

    def routing(self, logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Choose experts or replay recorded ones, record the choice, and attach router losses.

        Args:
            logits: [n, 1, E].
            options: further arguments of Megatron's router.

        Returns:
            Weights [n, E] of the chosen experts, and which are chosen, [n, E] bool.
        """
        if self.tokens is None:
            return super().routing(logits, **options)
        replay = self.router_replay
        layer = self.layer_number - 1
        # Record the router's own choice, which metrics compare with a replayed one.
        replay.set_router_replay_action(RouterReplayAction.RECORD)
        weights, is_chosen = super().routing(logits, **options)
        chosen = replay.get_recorded_indices()
        own_choice = None  # only needed where another choice is replayed
        replayed = self.tokens.experts_to_replay(layer, len(logits))
        if replayed is not None:
            # Route once more, to the replayed experts.
            own_choice = chosen
            # Where the entry is negative, the router's own choice remains.
            chosen = torch.where(replayed >= 0, replayed, chosen)
            replay.target_topk_idx = chosen
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            weights, is_chosen = super().routing(logits, **options)
        replay.clear_router_replay_action()
        replay.clear_indices()
        # Does not change the weights. Their backward pass adds the gradients of the router losses.
        weights = self.tokens.record_choice(layer, logits[:, 0], weights, chosen, own_choice)
        return weights, is_chosen

    def gating(self, input: Tensor) -> Tensor:
        """Logits [n, 1, E] of tokens [n, 1, D]."""
        dtypes = {"fp32": torch.float32, "fp64": torch.float64}
        dtype = dtypes.get(self.config.moe_router_dtype, input.dtype)
        return linear(input.to(dtype), self.weight.to(dtype))


class Experts(nn.Module):
    """The experts of this rank, with weights [E/ep, 2 F, D] and [E/ep, D, F].

    Args:
        num_local_experts: E/ep.
        config: Megatron's configuration.
        pg_collection: not used.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None
    ) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size
        size = config.hidden_size
        options: dict[str, Any] = {
            # On a CPU, `megatron_context` makes this call return the CPU.
            "device": torch.cuda.current_device(),
            "dtype": config.params_dtype,
        }
        gate_up = torch.empty(num_local_experts, 2 * width, size, **options)
        self.gate_up_proj = nn.Parameter(gate_up)
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, size, width, **options))
        self.use_grouped_products = not loop_reason_of(config, self.down_proj.device)

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Compute each expert on its tokens.

        Args:
            tokens: [m, D], sorted by expert.
            counts: [E/ep], number of tokens of each expert; m in total.
            weights: [m], factor of each output.

        Returns:
            [m, D], and None for the bias.
        """
        if self.use_grouped_products:
            ends = counts.to(tokens.device).cumsum(0, dtype=torch.int32)
            gate, up = grouped_mm(tokens, self.gate_up_proj.mT, offs=ends).chunk(2, -1)
            output = grouped_mm(silu(gate) * up, self.down_proj.mT, offs=ends)
            return output * weights[:, None].to(output.dtype), None

        sizes = counts.tolist()
        outputs = []
        by_expert = zip(tokens.split(sizes), weights.split(sizes), strict=True)
        for expert, (expert_tokens, expert_weights) in enumerate(by_expert):
            gate, up = linear(expert_tokens, self.gate_up_proj[expert]).chunk(2, -1)
            output = linear(silu(gate) * up, self.down_proj[expert])
            outputs.append(output * expert_weights[:, None].to(expert_tokens.dtype))
        return torch.cat(outputs), None


def loop_reason_of(config: TransformerConfig, device: torch.device) -> str:
    """Explain why experts are computed one after the other, if they are.

    Args:
        config: Megatron's configuration.
        device: device of the experts.

    Returns:
        The reason; "" if torch's grouped products compute all experts at once.
    """
    widths = (config.hidden_size, config.moe_ffn_hidden_size)
    if any(width * config.params_dtype.itemsize % _GROUPED_ALIGNMENT for width in widths):
        numbers = " and ".join(map(str, widths))
        return f"rows of {numbers} numbers are no multiples of {_GROUPED_ALIGNMENT} bytes"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "grouped products need compute capability 8.0"
    return ""


def linear_modules(device: torch.device) -> tuple[type, type, str]:
    """Choose classes of column-parallel and row-parallel linear modules.

    Returns:
        The two classes, and a text that says which were chosen and why.
    """
    if device.type != "cuda":
        reason = "Transformer Engine is for CUDA"
    elif not transformer_engine.HAVE_TE:
        reason = "Transformer Engine is not installed"
    else:
        return (
            transformer_engine.TEColumnParallelLinear,
            transformer_engine.TERowParallelLinear,
            f"linear modules of Transformer Engine {get_te_version()}",
        )
    return ColumnParallelLinear, RowParallelLinear, f"Megatron's own linear modules ({reason})"


def _layer_specs(
    config: TransformerConfig, num_layers: int, device: torch.device
) -> TransformerBlockSubmodules:
    """Build Megatron's specification of equal layers and the final norm.

    Args:
        config: Megatron's configuration.
        num_layers: number of layers.
        device: device of the modules.
    """
    column, row, _ = linear_modules(device)
    query_key_norm = Norm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(column, Attention, row, query_key_norm, query_key_norm)
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
    return TransformerBlockSubmodules([layer] * num_layers, Norm)


def _detach_padding(padding_id: int, table: Any, args: tuple[Tensor], embedded: Tensor) -> Tensor:
    """Hook of the embedding: the padding entry gets no gradient, as in Hugging Face models.

    Args:
        padding_id: token id of the entry.
        table: Megatron's embedding.
        args: token ids [1, n].
        embedded: [1, n, D], or with sequence parallelism this rank's tokens [n/tp, 1, D].

    Returns:
        The embedded tokens.
    """
    (ids,) = args
    if table.reduce_scatter_embeddings:
        # The tokens of this rank.
        chunks = ids[0].chunk(table.tp_group.size())
        ids = chunks[table.tp_group.rank()][:, None]
    return torch.where((ids == padding_id)[..., None], embedded.detach(), embedded)


def transformer_config(
    model: PretrainedConfig, dtype: torch.dtype, device: torch.device, options: Mapping[str, Any]
) -> TransformerConfig:
    """Convert the configuration of a Hugging Face model to Megatron's.

    Args:
        model: the Hugging Face configuration.
        dtype: compute dtype.
        device: device of the model.
        options: fields that the layout and the user set; they take precedence.

    Returns:
        Megatron's configuration.

    Raises:
        EngineError: Megatron does not know a field, or refuses its value.
    """
    num_heads = model.num_attention_heads
    values = {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": num_heads,
        "num_query_groups": getattr(model, "num_key_value_heads", None) or num_heads,
        "kv_channels": getattr(model, "head_dim", None) or model.hidden_size // num_heads,
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
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,
        # Losses are normalised over all rows beforehand; Megatron must not average them again.
        "calculate_per_token_loss": True,
        # Fused kernels need CUDA.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "batch_p2p_comm": False,
    }
    num_experts = getattr(model, "num_experts", None)
    if num_experts:
        values |= {
            "num_moe_experts": num_experts,
            "moe_ffn_hidden_size": model.moe_intermediate_size,
            "moe_router_topk": model.num_experts_per_tok,
            # Without normalisation, weights are probabilities over all experts.
            "moe_router_pre_softmax": not model.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_enable_routing_replay": True,
        }
    values |= dict(options)
    try:
        return TransformerConfig(**values)
    except (TypeError, ValueError, AssertionError) as error:
        raise EngineError(
            "Megatron's TransformerConfig",
            got=f"{type(error).__name__}: {error}",
            expected="values that Megatron accepts",
            fix="Change megatron.override_transformer_config, or the sizes under megatron.",
        ) from error


def has_tied_head(model: PreTrainedModel) -> bool:
    """Whether the model has a vocabulary head that shares its weight [V, D] with the embedding."""
    has_head = isinstance(model.get_output_embeddings(), nn.Linear)
    return has_head and bool(model.config.tie_word_embeddings)


def build_chunks(
    model: PreTrainedModel, config: TransformerConfig, device: torch.device
) -> list[GPTModel]:
    """Build this rank's chunks of a model, without values.

    Args:
        model: the full Hugging Face model, on "meta". Only its configuration and the frequencies of
            its positions are read.
        config: Megatron's configuration.
        device: device of the chunks.

    Returns:
        One chunk for each virtual stage.

    Raises:
        EngineError: the frequencies depend on the length of the sequence, or angles are scaled.
    """
    base: Any = backbone(model)
    rotary = base.rotary_emb
    has_fixed_frequencies = "dynamic" not in rotary.rope_type and rotary.rope_type != "longrope"
    if rotary.attention_scaling != 1.0 or not has_fixed_frequencies:
        raise EngineError(
            "strategy=megatron",
            got=f"positions of type {rotary.rope_type!r}",
            expected="fixed frequencies",
            fix="Set strategy=fsdp.",
        )
    num_vocabulary = base.embed_tokens.num_embeddings
    padding_id = base.embed_tokens.padding_idx
    has_head = isinstance(model.get_output_embeddings(), nn.Linear)
    # Without a head, the output layer is deleted below. Until then, it needs no weight of its own.
    can_share_table = has_tied_head(model) or not has_head
    tp = config.tensor_model_parallel_size
    stage = parallel_state.get_pipeline_model_parallel_rank()
    num_virtual = config.virtual_pipeline_model_parallel_size
    num_chunks = num_virtual or 1
    is_last_stage = stage == config.pipeline_model_parallel_size - 1
    chunks = []
    for number in range(num_chunks):
        virtual_stage = number if num_virtual else None
        is_first = stage == 0 and number == 0
        is_last = is_last_stage and number == num_chunks - 1
        num_layers = get_num_layers_to_build(config, vp_stage=virtual_stage)
        chunk = GPTModel(
            config,
            _layer_specs(config, num_layers, device),
            # Padded to a multiple of tp.
            vocab_size=-(-num_vocabulary // tp) * tp,
            max_sequence_length=0,  # read for learned positions and by Megatron's inference only
            pre_process=is_first,
            post_process=is_last,
            # In different chunks, a tied head is a copy of the table. Each gets the sum of both
            # gradients, so they stay equal.
            share_embeddings_and_output_weights=is_first and is_last and can_share_table,
            position_embedding_type="rope",
            vp_stage=virtual_stage,
        )
        chunk.rotary_pos_emb = Rotary(rotary.inv_freq.to(device))
        if is_first and padding_id is not None:
            chunk.embedding.word_embeddings.register_forward_hook(
                partial(_detach_padding, padding_id)
            )
        # Without post-processing, the chunk returns hidden states, from which the scorer computes
        # outputs. It was set above, because the last chunk needs the modules that it creates.
        chunk.post_process = False
        if is_last and not has_head:
            del chunk.output_layer
        if config.num_moe_experts:
            for layer in chunk.decoder.layers:
                layer.register_forward_pre_hook(layer.mlp.router.store_tokens, with_kwargs=True)
        chunks.append(chunk.to(device))
    # Megatron's global list would never free the routers.
    RouterReplay.clear_global_router_replay_instances()
    return chunks
