# SPDX-License-Identifier: Apache-2.0
"""Convert a Llama model from a GGUF file to the names and layout of Hugging Face.

transformers converts every architecture, but it parses the file several times in Python and builds
the model, which takes most of a minute even for a small one. This module reads the header once and
dequantises tensor by tensor, and imports no models or configurations of transformers, which alone
takes seconds. It converts only files whose metadata and tensors are all known to it; `read_llama`
returns None for others.
"""

import json
import struct
from dataclasses import dataclass, field
from math import gcd, prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

# Formats for `struct` of the metadata's value types that have a fixed size, by number of the type.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
# Numbers of the value types without a fixed size.
_STRING = 8
_ARRAY = 9
_VERSIONS = (2, 3)  # of the format that can be read
_DEFAULT_ALIGNMENT = 32  # of the first tensor, in bytes
_JOINED_ROWS = 8  # rows that `_dequantize` joins to a longer one, at most

# Values of config.json that are the same for all models, or defaults for `_TOKEN_FIELDS`.
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "pad_token_id": None,
    "pretraining_tp": 1,
    "use_cache": True,
}
_ROTATION_BASE = "llama.rope.freq_base"
# Fields of config.json by key of the metadata. A model must have the first ones; the tokens are optional.
_CONFIG_FIELDS = {
    "llama.context_length": "max_position_embeddings",
    "llama.block_count": "num_hidden_layers",
    "llama.feed_forward_length": "intermediate_size",
    "llama.embedding_length": "hidden_size",
    "llama.rope.dimension_count": "head_dim",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "llama.vocab_size": "vocab_size",
}
_TOKEN_FIELDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.unknown_token_id": "unk_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
# Names of modules in transformers by those in GGUF: of the whole model, and of each layer.
_OUTPUT = "output"
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    _OUTPUT: "lm_head",
}
_QUERY = "self_attn.q_proj"
_KEY = "self_attn.k_proj"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": _QUERY,
    "attn_k": _KEY,
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class _TensorInfo:
    """A tensor in a GGUF file.

    Attributes:
        shape: shape in torch's order of dimensions.
        kind: number of the GGML type.
        offset: position of the first byte, counted from `_Header.data_start`.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class _Header:
    """The header of a GGUF file.

    Attributes:
        metadata: values by key. Arrays are not read: their value is None.
        tensors: tensors by their names in GGUF.
        data_start: position in the file where the tensors begin.
    """

    metadata: dict[str, Any]
    tensors: dict[str, _TensorInfo]
    data_start: int


@dataclass
class LlamaModel:
    """A converted model, which can be saved like a model of transformers.

    Attributes:
        config: content of config.json.
        weights: float32 weights by their names in transformers.
        generation_config: content of generation_config.json.
    """

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    generation_config: dict[str, Any] = field(default_factory=dict)

    def save_pretrained(self, folder: Path) -> None:
        """Write the files that `LlamaForCausalLM.save_pretrained` would write."""
        _write_json(folder / "config.json", self.config)
        _write_json(folder / "generation_config.json", self.generation_config)
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})


def read_llama(file: Path) -> LlamaModel | None:
    """Read a Llama model from a GGUF file, dequantised to float32.

    Args:
        file: the GGUF file.

    Returns:
        The model. None: the file holds another architecture, or metadata or tensors that this
        function does not know.

    Raises:
        ValueError: the file is no GGUF file of a known version, or is damaged.
    """
    header = _read_header(file)
    names = _known_names(header)
    if names is None:
        return None
    metadata = header.metadata
    config: dict[str, Any] = {
        **_CONFIG,
        "rope_parameters": {"rope_theta": metadata[_ROTATION_BASE], "rope_type": "default"},
        "tie_word_embeddings": f"{_OUTPUT}.weight" not in header.tensors,
    }
    for key, name in (_CONFIG_FIELDS | _TOKEN_FIELDS).items():
        if key in metadata:
            config[name] = metadata[key]
    # Slicing a plain array is faster than slicing a memmap.
    content = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
    weights = {}
    for gguf_name, name in names.items():
        weight = _dequantize(content, header, header.tensors[gguf_name])
        if _QUERY in name:
            weight = _pair_to_half_rotation(weight, config["num_attention_heads"])
        elif _KEY in name:
            weight = _pair_to_half_rotation(weight, config["num_key_value_heads"])
        # A tensor that is float32 in the file is a read-only view of the file, which torch does not
        # accept. It is copied here.
        weights[name] = torch.from_numpy(np.require(weight, requirements=("C", "W")))
    return LlamaModel(config, weights)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    """Write JSON as transformers does, with the version of transformers."""
    content = {**content, "transformers_version": transformers.__version__}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _known_names(header: _Header) -> dict[str, str] | None:
    """Map the names of tensors in the file to those in transformers.

    Returns:
        Names in transformers by GGUF name. None: this is not a plain Llama model, or the header has
        unknown or missing keys or tensors. An unknown key, such as one of experts or of scaled
        rotations, may ask for another conversion.
    """
    metadata = header.metadata
    if metadata.get("general.architecture") != "llama":
        return None
    # Files of Mistral models name this architecture too.
    if "mistral" in str(metadata.get("general.name", "")).lower():
        return None
    model_keys = {key for key in metadata if key.startswith("llama.")}
    if model_keys != {_ROTATION_BASE, *_CONFIG_FIELDS}:
        return None
    # None: an array, such as a size for each layer.
    if any(metadata[key] is None for key in model_keys):
        return None

    names = {f"{short}.weight": f"{long}.weight" for short, long in _TOP_NAMES.items()}
    for layer in range(metadata["llama.block_count"]):
        for short, long in _LAYER_NAMES.items():
            names[f"blk.{layer}.{short}.weight"] = f"model.layers.{layer}.{long}.weight"
    # A model with tied embeddings has no output layer.
    if f"{_OUTPUT}.weight" not in header.tensors:
        del names[f"{_OUTPUT}.weight"]
    return names if names.keys() == header.tensors.keys() else None


def _read_header(file: Path) -> _Header:
    """Read the header of a GGUF file.

    Raises:
        ValueError: the file is no GGUF file of a known version, or is damaged.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError("the file does not begin with GGUF")
        (version,) = _unpack(stream, "<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of the format, which is not one of {_VERSIONS}")
        num_tensors, num_entries = _unpack(stream, "<QQ")
        metadata = {}
        for _ in range(num_entries):
            key = _read_string(stream)
            (value_type,) = _unpack(stream, "<I")
            metadata[key] = _read_value(stream, value_type)
        tensors = {}
        for _ in range(num_tensors):
            name = _read_string(stream)
            (num_dimensions,) = _unpack(stream, "<I")
            shape = _unpack(stream, f"<{num_dimensions}Q")
            kind, offset = _unpack(stream, "<IQ")
            # GGML names the dimension that is contiguous in memory first, torch last.
            tensors[name] = _TensorInfo(shape[::-1], kind, offset)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        # The data begin at the next multiple of the alignment.
        data_start = -(-stream.tell() // alignment) * alignment
    return _Header(metadata, tensors, data_start)


def _read_value(stream: BinaryIO, value_type: int) -> Any:
    """Read a value of the metadata. Skip an array, and return None for it.

    Raises:
        ValueError: the type is unknown, or the file ends before the value does.
    """
    if value_type == _STRING:
        return _read_string(stream)
    if value_type != _ARRAY:
        return _unpack(stream, _scalar_format(value_type))[0]
    item_type, num_items = _unpack(stream, "<IQ")
    if item_type in (_STRING, _ARRAY):
        for _ in range(num_items):
            _read_value(stream, item_type)
    else:
        # Skip the items: 1 means from the current position.
        stream.seek(num_items * struct.calcsize(_scalar_format(item_type)), 1)
    return None


def _scalar_format(value_type: int) -> str:
    """Format for `struct` of a value type of fixed size.

    Raises:
        ValueError: the type is unknown.
    """
    if value_type not in _SCALARS:
        raise ValueError(f"a value of the unknown type {value_type} in its metadata")
    return _SCALARS[value_type]


def _read_string(stream: BinaryIO) -> str:
    """Read a string: its length as an integer, then its bytes."""
    (size,) = _unpack(stream, "<Q")
    return stream.read(size).decode("utf-8")


def _unpack(stream: BinaryIO, form: str) -> tuple[Any, ...]:
    """Read values in a format of `struct`.

    Raises:
        ValueError: the file ends before the last value does.
    """
    size = struct.calcsize(form)
    content = stream.read(size)
    if len(content) != size:
        raise ValueError("the file ends within its header")
    return struct.unpack(form, content)


def _dequantize(content: np.ndarray, header: _Header, tensor: _TensorInfo) -> np.ndarray:
    """Read a tensor as float32.

    Args:
        content: the bytes of the file.
        header: header of the file.
        tensor: a tensor of the file.

    Raises:
        ValueError: the file ends before the tensor does.
    """
    # The package is an optional dependency.
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    num_rows = prod(tensor.shape[:-1])
    start = header.data_start + tensor.offset
    end = start + num_rows * (tensor.shape[-1] // block_size * block_bytes)
    if end > len(content):
        raise ValueError(
            f"the file ends at byte {len(content)}, within a tensor that ends at {end}"
        )
    # `dequantize` is slow with short rows. Rows can be joined, because each block of values is
    # dequantised by itself.
    num_long_rows = num_rows // gcd(num_rows, _JOINED_ROWS)
    values = dequantize(content[start:end].reshape(num_long_rows, -1), kind)
    return values.reshape(tensor.shape)


def _pair_to_half_rotation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection for the rotation in transformers.

    GGML rotates pairs of neighbouring dimensions of a head. transformers rotates pairs of a dimension in
    the first half of a head and the dimension at the same place in the second half.

    Args:
        weight: [H * D, I] with H heads of size D.
        num_heads: H.

    Returns:
        The reordered weight, [H * D, I].
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
