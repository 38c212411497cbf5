# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that decide how much memory its updates take, from its modules.

`sizes.py` has the same from the model's config.json alone.
"""

from torch import nn
from transformers import PreTrainedModel

from quadriga.models.adapter_files import is_factor
from quadriga.models.architecture import backbone
from quadriga.models.experts import mixtures
from quadriga.models.fused import is_gated_mlp, is_plain_norm
from quadriga.models.vision import is_vision
from quadriga.planning.sizes import ModelSizes


def module_sizes(model: PreTrainedModel) -> ModelSizes:
    """Measure a model, without the factors of an adapter.

    Args:
        model: the model. Its parameters may be on "meta".
    """
    text = model.config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", 0) or 1
    head_size = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    layers = list(getattr(backbone(model), "layers", []))
    layer_sizes = [_num_parameters(layer) for layer in layers]
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    return ModelSizes(
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
        is_tied=isinstance(head, nn.Linear) and head.weight is embedding.weight,
        norms_queries=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        unknown_part=_unknown_part(model, layers),
    )


def _num_parameters(module: nn.Module) -> int:
    """Number of parameters of a module, without the factors of an adapter."""
    num_parameters = 0
    for name, parameter in module.named_parameters():
        if not is_factor(name):
            num_parameters += parameter.numel()
    return num_parameters


def _unknown_part(model: PreTrainedModel, layers: list[nn.Module]) -> str:
    """Name a part of a model that the formulas of `memory.py` do not cover; "" if they cover all.

    Args:
        model: the model.
        layers: its decoder layers; [] if the model does not call them `layers`.
    """
    if is_vision(model.config):
        return "a vision encoder"
    if next(iter(mixtures(model)), None) is not None:
        return "a mixture of experts"
    for layer in layers:
        modules = list(layer.modules())
        num_norms = sum(is_plain_norm(module) for module in modules)
        num_mlps = sum(is_gated_mlp(module) for module in modules)
        # Two norms of the residual stream, and in some models one of queries and one of keys.
        if num_mlps != 1 or num_norms not in (2, 4):
            return "layers that are not a dense gated MLP with plain RMS norms"
    return "" if layers else "no list of layers"
