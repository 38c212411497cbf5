# SPDX-License-Identifier: Apache-2.0
"""The model as generation computes it: from tokens to hidden states, and from these to logits.

Decoders of the plain kind, which are listed in `PLAIN`, are computed here, layer by layer, with the same arithmetic as
in training and about half the operations: queries, keys and values come from one product, and so do gate and up. All
other models are computed by their own module.

On a CPU with bfloat16 the weights are kept a second time, in the order in which oneDNN reads them, and the head in
float32. A processor without tiles (AMX) multiplies many rows faster in float32 than in bfloat16, a few rows slower;
there all weights are kept in float32, too. The factors are the same and sums are float32 either way, so are the
results, but for the order of summation. These copies belong to one state of the parameters: `Network.state` says which,
and the engine makes a new network when the parameters are in another. Elsewhere nothing is copied.

Legend: B rows, N tokens, D hidden size, H query heads, K key-value heads, d head size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import embedding, linear, silu
from transformers import PreTrainedModel

from quadriga.models.attention import AttentionPlan
from quadriga.models.load import backbone, head_of
from quadriga.models.projection import head_logits

PLAIN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_WIDE_ROWS = 24  # from here on float32 is the faster one without tiles
_MAX_WIDE_BYTES = 4 * 2**30
_PACKED_ROWS = 16  # for which oneDNN chooses the order of a weight; other numbers of rows are right, too

_COPIES = {
    (False, False): "layer by layer, on the parameters themselves",
    (True, False): "layer by layer, on packed bfloat16 weights",
    (
        True,
        True,
    ): f"layer by layer, on packed bfloat16 weights, from {_WIDE_ROWS} rows on in float32: this CPU has no AMX",
}

State = tuple[tuple[int, int], ...]


class Network:
    """A model by its own module, under the interface of generation.

    Args:
        model: a causal model of transformers with our attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.body, self.head = cast(Any, backbone(model)), cast(Any, head_of(model))
        self.num_layers = int(model.config.num_hidden_layers)
        self.state = state_of(model)
        self.description = "by the model's own module"
        self.wide_head: torch.Tensor | None = None  # [V, D] float32
        self._logits: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.head.weight.device

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """[B, N] tokens and positions -> [B, N, D]"""
        output = self.body(
            input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False, attention_plan=plan
        )
        return output.last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, D] -> [B, V] float32, equal to those of training; overwritten by the next call."""
        bias = getattr(self.head, "bias", None)
        if self.wide_head is None:
            return head_logits(hidden, self.head.weight, bias)
        if self._logits is None or len(self._logits) < len(hidden):
            self._logits = hidden.new_empty(len(hidden), len(self.wide_head), dtype=torch.float32)
        out, settings = self._logits[: len(hidden)], torch.backends.mkldnn.matmul
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"  # which both factors are, so nothing is rounded; sums stay float32
        try:
            torch.mm(hidden.float(), self.wide_head.t(), out=out)
        finally:
            settings.fp32_precision = before
        return out if bias is None else out.add_(bias)


class PlainNetwork(Network):
    """A decoder of the plain kind, computed here."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        packs = self.device.type == "cpu" and self.head.weight.dtype == torch.bfloat16 and can_pack()
        widens = packs and not has_tiles() and 4 * sum(one.numel() for one in model.parameters()) <= _MAX_WIDE_BYTES
        self.description = _COPIES[packs, widens]
        self.layers = [_Layer(layer, number, packs, widens) for number, layer in enumerate(self.body.layers)]
        if packs:
            self.wide_head = self.head.weight.detach().float()

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """See `Network.hidden`."""
        hidden = embedding(tokens, self.body.embed_tokens.weight)
        cos, sin = self.body.rotary_emb(hidden, position_ids=positions)
        half = sin.shape[-1] // 2
        cos, sin = cos.unsqueeze(2), torch.cat((-sin[..., :half], sin[..., half:]), -1).unsqueeze(2)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, plan)
        return _rms_norm(hidden, self.body.norm)


class _Layer:
    """One layer of a plain decoder."""

    def __init__(self, layer: Any, number: int, packs: bool, widens: bool) -> None:
        self.layer, self.attention, self.number = layer, layer.self_attn, number
        attention, mlp = layer.self_attn, layer.mlp
        self.head_size, self.scale = attention.head_dim, attention.scaling
        self.num_key_heads = attention.config.num_key_value_heads
        self.num_heads = attention.config.num_attention_heads
        self.has_head_norms = hasattr(attention, "q_norm")
        self.project = _Projection((attention.q_proj, attention.k_proj, attention.v_proj), packs, widens)
        self.merge = _Projection((attention.o_proj,), packs, widens)
        self.widen = _Projection((mlp.gate_proj, mlp.up_proj), packs, widens)
        self.narrow = _Projection((mlp.down_proj,), packs, widens)

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
    """Linear modules with one input: one product where their weights could be packed, else one for each."""

    def __init__(self, modules: Sequence[nn.Module], packs: bool, widens: bool) -> None:
        self.modules = modules
        self.packed: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.wide: torch.Tensor | None = None
        self.wide_bias: torch.Tensor | None = None
        plain = [module for module in modules if type(module) is nn.Linear]
        if packs and len(plain) == len(modules) and len({module.bias is None for module in plain}) == 1:
            weight = torch.cat([module.weight.detach() for module in plain])
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
            if plain[0].bias is not None:
                self.bias = torch.cat([module.bias.detach() for module in plain])
            if widens:
                self.wide, self.wide_bias = weight.float(), None if self.bias is None else self.bias.float()

    def __call__(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[B, N, D] -> one tensor with the outputs side by side, or one for each module."""
        if self.packed is None:
            return tuple(module(states) for module in self.modules)
        if self.wide is not None and states.shape[:-1].numel() >= _WIDE_ROWS:
            return (linear(states.float(), self.wide, self.wide_bias).to(states.dtype),)
        return (torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], ""),)


def network_of(model: PreTrainedModel) -> Network:
    """The fastest network that computes this model exactly."""
    return PlainNetwork(model) if is_plain(model) else Network(model)


def is_plain(model: PreTrainedModel) -> bool:
    """Whether the model's layers are norms, attention over all tokens, and an MLP gated by SiLU, nothing else."""
    if type(model).__name__ not in PLAIN or getattr(model.config, "hidden_act", None) != "silu":
        return False
    layers = cast(Any, backbone(model)).layers
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    return not any(windows) and getattr(model.config, "partial_rotary_factor", 1.0) in (None, 1.0)


def can_pack() -> bool:
    """Whether this build of torch packs bfloat16 weights for oneDNN, on a processor that multiplies them."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def has_tiles() -> bool:
    """Whether this processor multiplies bfloat16 in tiles."""
    return torch.cpu._is_amx_tile_supported()


def state_of(model: nn.Module) -> State:
    """Where each parameter is and how often it was written to in place, as far as torch counts."""
    return tuple(
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version)
        for parameter in model.parameters()
    )


def _rms_norm(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    """Root-mean-square norm over the last dim, rounded where training rounds it."""
    wide = hidden.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(hidden.shape[-1])
    scale = scale.add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(hidden.dtype) * norm.weight
