# SPDX-License-Identifier: Apache-2.0
"""The model as generation computes it: from tokens to hidden states, and from these to logits.

Decoders of the plain kind, which are listed in `PLAIN`, are computed here, layer by layer, with the same arithmetic as
in training and about half the operations: queries, keys and values come from one product, and so do gate and up. All
other models are computed by their own module.

On a CPU the weights are kept a second time, in a form of `products`. These copies belong to one state of the
parameters: `Network.state` says which, and the engine makes a new network when the parameters are in another.
Elsewhere nothing is copied.

Legend: B rows, N tokens, D hidden size, H query heads, K key-value heads, d head size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from quadriga.models.attention import AttentionPlan
from quadriga.models.fused import rms_scale
from quadriga.models.load import backbone, head_of
from quadriga.models.projection import head_logits
from quadriga.models.vision import ImageTokens, PackedImages, decoder_inputs
from quadriga.rollout.native.products import PackedWeight, TwofoldWeight, Weight, WideWeight, form_for

PLAIN = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
)  # fmt: skip
_COPIES = {
    None: "",
    PackedWeight: "; a second copy of them in oneDNN's order, bfloat16",
    WideWeight: "; a second copy of them in MKL's order, float32",
    TwofoldWeight: "; a second copy of them in oneDNN's order, bfloat16, and a third in MKL's, float32",
}

State = tuple[tuple[int, int], ...]


class Network:
    """A model by its own module, under the interface of generation.

    Args:
        model: a causal model of transformers with our attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.image_tokens = model, ImageTokens.of(model.config)
        self.body, self.head = cast(Any, backbone(model)), cast(Any, head_of(model))
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)
        self.state = state_of(model)
        self.wide_head: WideWeight | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.head.weight.device

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, images: PackedImages | None = None
    ) -> torch.Tensor:
        """[B, N] tokens and positions -> [B, N, D]; positions may be [3, B, N], and with images B is 1."""
        inputs = {"input_ids": tokens} if images is None else decoder_inputs(self.model, tokens, images)
        output = self.body(**inputs, position_ids=positions, attention_mask=None, use_cache=False, attention_plan=plan)
        return output.last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, D] -> [B, V] float32, equal to those of training."""
        if self.wide_head is not None:
            return self.wide_head.multiply(hidden)
        return head_logits(hidden, self.head.weight, getattr(self.head, "bias", None))


class PlainNetwork(Network):
    """A decoder of the plain kind, computed here."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        weight = self.head.weight.detach()
        form = _form_of(model)
        self.layers = [_Layer(layer, number, form) for number, layer in enumerate(self.body.layers)]
        if form is not None:
            self.wide_head = WideWeight(weight, getattr(self.head, "bias", None))

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, images: PackedImages | None = None
    ) -> torch.Tensor:
        """See `Network.hidden`."""
        if images is None:
            hidden = embedding(tokens, self.body.embed_tokens.weight)
        else:
            hidden = decoder_inputs(self.model, tokens, images)["inputs_embeds"]
        cos, sin = self.body.rotary_emb(hidden, position_ids=positions)
        half = sin.shape[-1] // 2
        cos, sin = cos.unsqueeze(2), torch.cat((-sin[..., :half], sin[..., half:]), -1).unsqueeze(2)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, plan)
        return _rms_norm(hidden, self.body.norm)


class _Layer:
    """One layer of a plain decoder."""

    def __init__(self, layer: Any, number: int, form: type[Weight] | None) -> None:
        self.layer, self.attention, self.number = layer, layer.self_attn, number
        attention, mlp = layer.self_attn, layer.mlp
        self.head_size, self.scale = attention.head_dim, attention.scaling
        self.num_key_heads = attention.config.num_key_value_heads
        self.num_heads = attention.config.num_attention_heads
        self.has_head_norms = hasattr(attention, "q_norm")
        self.project = _Projection((attention.q_proj, attention.k_proj, attention.v_proj), form)
        self.merge = _Projection((attention.o_proj,), form)
        self.widen = _Projection((mlp.gate_proj, mlp.up_proj), form)
        self.narrow = _Projection((mlp.down_proj,), form)

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """`hidden` [B, N, D]; `cos` and `sin` [B, N, 1, d], the first half of `sin` with its sign changed."""
        heads, keys = self.num_heads, self.num_key_heads
        parts = self.project(_rms_norm(hidden, self.layer.input_layernorm))
        states = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).unflatten(-1, (-1, self.head_size))
        turning, value = states.split((heads + keys, keys), 2)
        if self.has_head_norms:
            query, key = turning.split((heads, keys), 2)
            normed = (_rms_norm(query, self.attention.q_norm), _rms_norm(key, self.attention.k_norm))
            turning = torch.cat(normed, 2)
        half = self.head_size // 2
        swapped = torch.cat((turning[..., half:], turning[..., :half]), -1)
        turned = (turning * cos).add_(swapped.mul_(sin)).transpose(1, 2)
        query, key = turned.split((heads, keys), 1)
        mixed = plan.attend(self.number, query, key, value.transpose(1, 2), self.scale)
        hidden = hidden + self.merge(mixed.flatten(2))[0]
        parts = self.widen(_rms_norm(hidden, self.layer.post_attention_layernorm))
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        return hidden + self.narrow(silu(gate).mul_(up))[0]


class _Projection:
    """Linear modules with one input: one product where their weights are kept in other forms, else one for each."""

    def __init__(self, modules: Sequence[nn.Module], form: type[Weight] | None) -> None:
        self.modules = modules
        self.weight: Weight | None = None
        plain = [module for module in modules if type(module) is nn.Linear]
        if form is not None and len(plain) == len(modules) and len({module.bias is None for module in plain}) == 1:
            weight = torch.cat([module.weight.detach() for module in plain])
            bias = None if plain[0].bias is None else torch.cat([module.bias.detach() for module in plain])
            self.weight = form(weight, bias)

    def __call__(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[B, N, D] -> one tensor with the outputs side by side, or one for each module."""
        if self.weight is None:
            return tuple(module(states) for module in self.modules)
        return (self.weight.multiply(states).to(states.dtype),)


def network_of(model: PreTrainedModel) -> Network:
    """The fastest network that computes this model exactly."""
    return PlainNetwork(model) if is_plain(model) else Network(model)


def description_of(model: PreTrainedModel) -> str:
    """How a model is computed, and which copies of its weights that takes."""
    return f"layer by layer{_COPIES[_form_of(model)]}" if is_plain(model) else "by the model's own module"


def _form_of(model: PreTrainedModel) -> type[Weight] | None:
    weight = cast(Any, head_of(model)).weight
    if weight.device.type != "cpu":
        return None
    return form_for(weight.dtype, sum(one.numel() for one in model.parameters()))


def is_plain(model: PreTrainedModel) -> bool:
    """Whether the model's layers are norms, attention over all tokens, and an MLP gated by SiLU, nothing else."""
    config = model.config.get_text_config()
    if type(model).__name__ not in PLAIN or getattr(config, "hidden_act", None) != "silu":
        return False
    layers = cast(Any, backbone(model)).layers
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    return not any(windows) and getattr(config, "partial_rotary_factor", 1.0) in (None, 1.0)


def state_of(model: nn.Module) -> State:
    """Where each parameter is and how often it was written to in place, as far as torch counts."""
    return tuple(
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version)
        for parameter in model.parameters()
    )


def _rms_norm(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    """Root-mean-square norm over the last dim, as training computes it."""
    wide = hidden.float()
    return (wide * rms_scale(wide, norm.variance_epsilon)).to(hidden.dtype) * norm.weight
