# SPDX-License-Identifier: Apache-2.0
"""Loading Hugging Face causal models and vision-language models, with errors that say what to do.

Legend: B rows, N tokens of each, D hidden size, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from quadriga.config.adapter import is_adapter
from quadriga.errors import CheckpointError, EngineError
from quadriga.models.adapter_files import open_model
from quadriga.models.architecture import PACKED, head_of, way_of
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.fused import fuse
from quadriga.models.vision import attention_of, is_vision
from quadriga.models.weight_files import SafetensorFiles, distributed_folder, open_weights

_HEAD = "lm_head.weight"
_FIX = "Check actor_rollout_ref.model.path; `quadriga prepare model NAME --output DIR` writes such a folder."


def load_causal_lm(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attention: str = ATTENTION_NAME,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    needs_head: bool = True,
) -> PreTrainedModel:
    """A causal language model in evaluation mode, whose attention is an `AttentionPlan` where its rows can be packed.
    From tokens [B, N] its backbone makes hidden states [B, N, D], and its head logits [B, N, V].
    Raises EngineError: the folder is missing or incomplete, or the architecture is unknown or cannot be computed here.

    Args:
        path: a folder with config.json and safetensors, or a name that transformers can resolve.
        attention: `ATTENTION_NAME` for calls with an attention plan, which becomes an implementation of transformers
            where rows are computed one at a time; or "sdpa", which becomes "eager" where it would give other numbers.
        trust_remote_code: whether code that ships with the model may run.
        override_config: entries of the model's configuration to replace.
        needs_head: whether the projection to the vocabulary must be there; False: another head takes its place.
    """
    disable_progress_bar()
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    way = way_of(config, trust_remote_code=trust_remote_code)
    attention = {ATTENTION_NAME: way.attention, "sdpa": way.generating}.get(attention, attention)
    how = {
        "dtype": dtype,
        "attn_implementation": attention_of(config, attention),
        "ignore_mismatched_sizes": True,
    }
    with explained(path):
        model, info = from_pretrained(path, config, trust_remote_code=trust_remote_code, **how)
    head = set() if needs_head else {id(one) for one in head_of(model).parameters()}
    shapes = {
        name: f" of shape {list(one)}, but of {list(other)}"
        for name, other, one in info["mismatched_keys"]
    }
    without = {*info["missing_keys"], *shapes}
    if missing := sorted(name for name in without if id(model.get_parameter(name)) not in head):
        got = f"no weights for {len(missing)} parameters, first {missing[0]}{shapes.get(missing[0], '')}"
        fix = "Get the whole model, or take what does not belong to it from its config.json and override_config. "
        fix += "actor_rollout_ref.model.path, or the key of another role, names it."
        raise EngineError(
            f"model {path}", got, "all weights of the model; the missing ones would be random", fix
        )
    if not way.reason:
        fuse(model)
    return model.to(device).eval()


def model_folder(path: str | Path) -> Path | None:
    """The folder of a model; one on a hub is fetched, once for all processes of a machine. None: what was fetched has
    no safetensors, and transformers alone reads it.
    Raises EngineError: the hub has no such model, or does not respond."""
    if Path(path).is_dir():
        return Path(path)
    with explained(path):
        folder = Path(
            snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json", "*.py"])
        )
    return folder if any(folder.glob("*.safetensors")) else None


def _auto_class(
    config: PreTrainedConfig,
) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    return AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM


def from_pretrained(
    path: str | Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a folder or hub name, and transformers' report of its loading (`missing_keys` and the like).
    Raises CheckpointError: a checkpoint's weights are missing or damaged."""
    options |= {"config": config, "dtype": dtype, "output_loading_info": True}
    # Transformers would put an adapter beside the weights; here it is merged into them.
    if distributed_folder(path) is None and not is_adapter(path):
        model, info = _auto_class(config).from_pretrained(
            path, trust_remote_code=trust_remote_code, **options
        )
    else:
        with torch.device("meta"):
            model_class = type(
                _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
            )
        weights = open_model(path)
        state = {name: weights.read(name).to(dtype) for name in weights.shapes}
        model, info = model_class.from_pretrained(None, state_dict=state, **options)
    # Transformers ties no weights that differ, and leaves the configuration as it is.
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.weight is not model.get_input_embeddings().weight:
        _say_untied(model.config)
    # Transformers passes over a file that it cannot read, and over the tokens that end a response with it.
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model, info


def load_config(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> PreTrainedConfig:
    """The configuration of a model, with some entries replaced.

    `tie_word_embeddings` is what the weights are: false where the files have a head that differs from the embedding. A
    padding token beyond the embedding is left out: transformers would refuse it, and padding is
    never computed.

    Raises:
        EngineError: there is no configuration, or the weights are quantized.
    """
    with explained(path):
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, **(override_config or {})
        )
    text = config.get_text_config()
    for part in (config, text):
        if quantization := getattr(part, "quantization_config", None):
            settings = quantization if isinstance(quantization, dict) else vars(quantization)
            method = settings.get("quant_method", "quantization_config")
            got = f"quantized weights ({method} in its config.json), which cannot be trained"
            fix = "Name the model that it was made of, or a copy that transformers has dequantized."
            raise EngineError(
                f"model {path}", got=got, expected="weights as floating-point numbers", fix=fix
            )
        pad_token_id = getattr(part, "pad_token_id", None)
        if pad_token_id is not None and pad_token_id >= getattr(text, "vocab_size", math.inf):
            part.pad_token_id = None
    if getattr(config, "tie_word_embeddings", False) and _has_untied_head(Path(path)):
        _say_untied(config)
    return config


def _say_untied(config: PreTrainedConfig) -> None:
    config.tie_word_embeddings = False
    config.get_text_config().tie_word_embeddings = False


def _has_untied_head(folder: Path) -> bool:
    """Whether the files of a model have a head, and no embedding that is equal to it."""
    if not folder.is_dir():
        return False
    try:
        weights = open_weights(folder)
        shapes = weights.shapes
        if _HEAD not in shapes:
            return False
        head = weights.read(_HEAD)
        tables = [
            name for name, shape in shapes.items() if name != _HEAD and shape == shapes[_HEAD]
        ]
        return bool(tables) and not any(torch.equal(head, weights.read(name)) for name in tables)
    except CheckpointError:
        return False  # loading the weights says what is wrong with them


def skeleton_causal_lm(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    auto_class: Any = None,
) -> PreTrainedModel:
    """The model that `load_causal_lm` would load, with its parameters on "meta": names and shapes, no values.
    `auto_class`: of transformers, which makes it, for packed rows; None: by the model's configuration."""
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    way = PACKED if auto_class else way_of(config, trust_remote_code=trust_remote_code)
    with explained(path):
        # Only parameters are empty. Buffers are small, and most of them are in no file.
        with register_module_parameter_registration_hook(_as_empty):
            how = {
                "dtype": torch.float32,
                "attn_implementation": attention_of(config, way.attention),
            }
            model = (auto_class or _auto_class(config)).from_config(
                config, trust_remote_code=trust_remote_code, **how
            )
        if (Path(path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
    if not way.reason:
        fuse(model)
    return model.eval()


def _as_empty(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """The parameter without values, on "meta", which transformers does not initialize."""
    empty = (
        parameter
        if parameter.is_meta
        else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    )
    # Initialization has no effect on "meta", but takes half of the time in which a model without values is made.
    empty._is_hf_initialized = True
    return empty


@contextmanager
def explained(
    path: str | Path, kind: str = "causal language model", fix: str = _FIX
) -> Iterator[None]:
    """What transformers raises while it loads a model of some kind becomes an EngineError."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        got = str(error).strip().splitlines()[0]
        if len(Path(path).parts) > 2 and not Path(path).exists():
            # No hub name has so many parts, and transformers speaks of nothing else.
            got = "no such folder"
        elif isinstance(error, SafetensorError):
            # It does not say which file it is.
            try:
                SafetensorFiles(sorted(Path(path).glob("*.safetensors")))
            except CheckpointError as damage:
                got = f"{damage.where}, {damage.got}"
        expected = f"a folder or hub name that transformers can load as a {kind}"
        raise EngineError(f"model {path}", got=got, expected=expected, fix=fix) from error


def stop_token_ids(model: PreTrainedModel, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Token ids that end a response: those of the model's generation configuration, and the tokenizer's own."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = declared if isinstance(declared, list) else [declared]
    return tuple(dict.fromkeys(token for token in [*ids, tokenizer_eos] if token is not None))
