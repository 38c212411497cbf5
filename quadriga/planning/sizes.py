# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that decide how much memory its updates take.

Legend: D hidden size, F width of the MLP, r rank of an adapter.
"""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from quadriga.models.architecture import backbone
from quadriga.models.experts import mixtures
from quadriga.models.fused import is_gated_mlp, is_plain_norm
from quadriga.models.vision import is_vision


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder.

    Attributes:
        hidden: D.
        mlp: F.
        queries: numbers of a token's queries, over all heads.
        keys: numbers of a token's keys, over all key-value heads.
        num_heads: attention heads.
        head_size: numbers of one head.
        num_layers: decoder layers.
        vocabulary: rows of the embedding and of the head.
        num_parameters: all parameters, without an adapter.
        layer_parameters: parameters of the largest layer.
        is_tied: whether embedding and head are the same parameter.
        norms_queries: whether queries and keys are normed before the rotation.
        unknown_part: a part that the formulas do not cover; "" if they cover all.
    """

    hidden: int
    mlp: int
    queries: int
    keys: int
    num_heads: int
    head_size: int
    num_layers: int
    vocabulary: int
    num_parameters: int
    layer_parameters: int
    is_tied: bool
    norms_queries: bool = False
    unknown_part: str = ""

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding, and as many of an untied head."""
        return self.vocabulary * self.hidden

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelSizes":
        """Sizes of a model without an adapter, whose parameters may be on "meta"."""
        text = model.config.get_text_config()
        num_heads = getattr(text, "num_attention_heads", 0) or 1
        head_size = getattr(text, "head_dim", None) or text.hidden_size // num_heads
        num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
        layers = list(getattr(backbone(model), "layers", []))
        layer_sizes = [_num_parameters(layer) for layer in layers]
        table = model.get_input_embeddings()
        head = model.get_output_embeddings()
        return cls(
            hidden=text.hidden_size,
            mlp=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            queries=num_heads * head_size,
            keys=num_kv_heads * head_size,
            num_heads=num_heads,
            head_size=head_size,
            num_layers=text.num_hidden_layers,
            vocabulary=text.vocab_size,
            num_parameters=_num_parameters(model),
            layer_parameters=max(layer_sizes, default=0),
            is_tied=isinstance(head, nn.Linear) and head.weight is table.weight,
            norms_queries=any(name.endswith("q_norm") for name, _ in model.named_modules()),
            unknown_part=_unknown_part(model, layers),
        )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _unknown_part(model: PreTrainedModel, layers: list[nn.Module]) -> str:
    """The reason why the formulas do not hold for a model, or ""."""
    if is_vision(model.config):
        return "a vision encoder"
    if next(iter(mixtures(model)), None) is not None:
        return "a mixture of experts"
    for layer in layers:
        modules = list(layer.modules())
        num_norms = sum(is_plain_norm(module) for module in modules)
        num_mlps = sum(is_gated_mlp(module) for module in modules)
        if num_mlps != 1 or num_norms not in (2, 4):
            return "layers that are not a dense gated MLP with plain RMS norms"
    return "" if layers else "no list of layers"
