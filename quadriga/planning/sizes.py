# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that decide about memory and time, from its config.json alone.

Legend: D hidden size, F width of the MLP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quadriga.errors import ConfigError

_KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` for dense decoders with gated MLPs and plain RMS norms."""
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder.

    Attributes:
        hidden: D.
        mlp: F.
        queries: size of a token's queries, over all heads.
        keys: size of a token's keys, over all key-value heads.
        num_heads: number of attention heads.
        head_size: size of a head.
        num_layers: number of decoder layers.
        vocabulary: number of rows of the embedding and of the head.
        num_parameters: number of all parameters, without an adapter.
        layer_parameters: number of parameters of the largest layer.
        is_tied: whether embedding and head are the same parameter.
        norms_queries: whether queries and keys are normalized before the rotation.
        unknown_part: a part of the model that the formulas do not cover; "" if they cover all.
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
        """Number of parameters of the embedding. An untied head has as many."""
        return self.vocabulary * self.hidden

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters in the matrices of all layers."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        return self.num_layers * (attention + 3 * self.hidden * self.mlp)

    def with_value_head(self) -> "ModelSizes":
        """Sizes of a model in which a value head [1, D] with a bias replaces the vocabulary head."""
        num_parameters = self.num_parameters + self.hidden + 1
        if not self.is_tied:
            num_parameters -= self.table_parameters
        return replace(self, num_parameters=num_parameters, is_tied=False)

    def with_layers(self, num_layers: int) -> "ModelSizes":
        """Sizes of the model with another number of layers, each of the size of the largest."""
        added_parameters = (num_layers - self.num_layers) * self.layer_parameters
        num_parameters = self.num_parameters + added_parameters
        return replace(self, num_layers=num_layers, num_parameters=num_parameters)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> "ModelSizes":
        """Derive the sizes of a model from its config.json.

        Args:
            config: contents of the file.
            where: path of the file, for errors.

        Raises:
            ConfigError: the file lacks sizes, or they are not whole numbers above 0.
        """
        # The decoder of a vision-language model is described in a section.
        text = config.get("text_config") or config
        numbers = {name: _read_size(text, name, where) for name in _REQUIRED}
        hidden = numbers["hidden_size"]
        num_heads = numbers["num_attention_heads"]
        model_type = text.get("model_type") or config.get("model_type")
        num_kv_heads = num_heads
        if text.get("num_key_value_heads") is not None:
            num_kv_heads = _read_size(text, "num_key_value_heads", where)
        # The size of a head is 128 in Qwen3, whatever D is.
        head_size = 128 if model_type == "qwen3" else hidden // num_heads
        if text.get("head_dim") is not None:
            head_size = _read_size(text, "head_dim", where)

        queries = num_heads * head_size
        keys = num_kv_heads * head_size
        # Parameters of a layer: matrices of attention and MLP, two norms of the residual stream.
        layer = 2 * hidden * (queries + keys) + 3 * hidden * numbers["intermediate_size"]
        layer += 2 * hidden
        norms_queries = model_type == "qwen3"
        if norms_queries:
            # One norm for the queries and one for the keys, which all heads share.
            layer += 2 * head_size
        # Qwen2 always has biases of queries, keys and values; other models if they say so, and
        # then one of the output as well.
        has_bias = bool(text.get("attention_bias"))
        if has_bias or model_type == "qwen2":
            layer += queries + 2 * keys
        if has_bias:
            layer += hidden
        if text.get("mlp_bias"):
            layer += 2 * numbers["intermediate_size"] + hidden
        is_tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        # The embedding, and the head if it has weights of its own.
        table = numbers["vocab_size"] * hidden
        num_tables = 1 if is_tied else 2
        # The last term of `num_parameters` is the last norm.
        return cls(
            hidden=hidden,
            mlp=numbers["intermediate_size"],
            queries=queries,
            keys=keys,
            num_heads=num_heads,
            head_size=head_size,
            num_layers=numbers["num_hidden_layers"],
            vocabulary=numbers["vocab_size"],
            num_parameters=numbers["num_hidden_layers"] * layer + num_tables * table + hidden,
            layer_parameters=layer,
            is_tied=is_tied,
            norms_queries=norms_queries,
            unknown_part=_unknown_part(config, text),
        )


def _read_size(config: Mapping[str, Any], name: str, where: str) -> int:
    """Read a size. Raise a ConfigError if it is missing or no whole number above 0.

    Args:
        config: the config.json, or its section about the decoder.
        name: key of the size.
        where: path of the file, for errors.
    """
    value = config.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(
        where,
        got="no value" if value is None else f"{value!r}",
        expected=f"{name}, a whole number of at least 1",
        fix="Name a folder whose config.json describes a decoder with this size, as transformers "
        "writes it.",
    )


def _unknown_part(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Name a part of a model that the formulas do not cover; "" if they cover all.

    Args:
        config: contents of the config.json.
        text: the section of the file about the decoder; the whole file if it has none.
    """
    if "vision_config" in config:
        return "a vision encoder"
    if any(text.get(name) for name in _EXPERTS):
        return "a mixture of experts"
    model_type = text.get("model_type")
    if model_type not in _KNOWN_TYPES:
        return f"models of the type {model_type}"
    if text.get("hidden_act", "silu") != "silu":
        return f"the activation {text['hidden_act']}"
    return ""
