# SPDX-License-Identifier: Apache-2.0
"""Loading of Hugging Face's causal and vision-language models, with errors that suggest a fix.

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
_GENERATION_CONFIG = "generation_config.json"
_FIX = (
    "Check actor_rollout_ref.model.path; "
    "`quadriga prepare model NAME --output DIR` writes such a folder."
)


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
    """Load a causal language model in evaluation mode.

    Its backbone turns tokens [B, N] into hidden states [B, N, D], and its head turns hidden states
    into logits [B, N, V].

    Args:
        path: folder with config.json and safetensors, or a name that transformers can resolve.
        dtype: dtype of the parameters.
        device: device of the parameters.
        attention: attention implementation. `ATTENTION_NAME` is for calls with an attention plan;
            it is replaced by an implementation of transformers if the model's rows cannot be
            packed. "sdpa" is replaced by "eager" if it computes other numbers.
        trust_remote_code: whether code that ships with the model may run.
        override_config: entries of the model's configuration to replace.
        needs_head: whether the vocabulary projection must have weights. False if another head
            replaces it.

    Raises:
        EngineError: the folder is missing or incomplete, or the architecture is unknown or cannot
            be computed here.
    """
    disable_progress_bar()
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    way = way_of(config, trust_remote_code=trust_remote_code)
    # Replace an attention implementation with which the trial has failed.
    if attention == ATTENTION_NAME:
        attention = way.attention
    elif attention == "sdpa":
        attention = way.generation_attention
    with explain_load_errors(path):
        model, info = from_pretrained(
            path,
            config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attention_of(config, attention),
            # The error of transformers does not name the parameters, unlike `_require_weights`.
            ignore_mismatched_sizes=True,
        )
    _require_weights(path, model, info, needs_head=needs_head)
    # If rows are computed one at a time, use transformers' own modules throughout.
    if not way.reason:
        fuse(model)
    return model.to(device).eval()


def _require_weights(
    path: str | Path, model: PreTrainedModel, info: dict[str, Any], *, needs_head: bool
) -> None:
    """Check that no parameters have the random values of transformers' initialization.

    Args:
        path: folder or hub name, for the message.
        model: the loaded model.
        info: transformers' report of its loading.
        needs_head: whether the vocabulary projection must have weights.

    Raises:
        EngineError: parameters lack weights, or have other shapes in the files.
    """
    # Parameters that may lack weights; by identity, because tied parameters have several names.
    optional = set() if needs_head else set(map(id, head_of(model).parameters()))
    # By name, what to add to the name in the message.
    mismatch_texts = {
        name: f", of shape {list(file_shape)} in the files and {list(model_shape)} in the model"
        for name, file_shape, model_shape in info["mismatched_keys"]
    }

    names = {*info["missing_keys"], *mismatch_texts}
    missing = [name for name in names if id(model.get_parameter(name)) not in optional]
    if missing:
        first = min(missing)
        raise EngineError(
            f"model {path}",
            got=f"no weights for {len(missing)} parameters, "
            f"first {first}{mismatch_texts.get(first, '')}",
            expected="all weights of the model; the missing ones would be random",
            fix="Get the complete model, or remove what does not belong to it from its config.json "
            "and override_config. actor_rollout_ref.model.path, or the key of another role, "
            "names the model.",
        )


def model_folder(path: str | Path) -> Path | None:
    """Folder of a model. A model on a hub is downloaded, once for all processes of a machine.

    Returns:
        The folder; None if the download has no safetensors, so that only transformers can read it.

    Raises:
        EngineError: the hub has no such model, or does not respond.
    """
    if Path(path).is_dir():
        return Path(path)
    with explain_load_errors(path):
        patterns = ["*.safetensors", "*.json", "*.py"]
        folder = Path(snapshot_download(str(path), allow_patterns=patterns))
    return folder if any(folder.glob("*.safetensors")) else None


def config_file(name: str) -> Path:
    """Find the config.json of a model on a hub. It is downloaded unless it is in the cache.

    Raises:
        EngineError: the hub has no such model, or does not respond.
    """
    fix = "Only its config.json is needed: a folder with this file alone is enough."
    with explain_load_errors(name, fix=fix):
        folder = snapshot_download(name, allow_patterns=["config.json"])
    return Path(folder) / "config.json"


def _auto_class(
    config: PreTrainedConfig,
) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """Class of transformers that chooses the class of a model."""
    return AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM


def from_pretrained(
    path: str | Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model with transformers, including adapters and distributed checkpoints.

    Args:
        path: folder or hub name.
        config: configuration of the model.
        dtype: dtype of the parameters.
        trust_remote_code: whether code that ships with the model may run.
        **options: further arguments of transformers' `from_pretrained`.

    Returns:
        The model, and transformers' report of its loading with keys such as `missing_keys`.

    Raises:
        CheckpointError: a checkpoint's weights are missing or damaged.
    """
    options |= {"config": config, "dtype": dtype, "output_loading_info": True}
    auto_class = _auto_class(config)
    # Transformers cannot read distributed checkpoints. It would load an adapter beside the weights,
    # while `open_model` merges it into them.
    if distributed_folder(path) is None and not is_adapter(path):
        options["trust_remote_code"] = trust_remote_code
        model, info = auto_class.from_pretrained(path, **options)
    else:
        # Build an empty model to find out which class transformers chooses.
        with torch.device("meta"):
            skeleton = auto_class.from_config(config, trust_remote_code=trust_remote_code)
        weights = open_model(path)
        state = {name: weights.read(name).to(dtype) for name in weights.shapes}
        model, info = type(skeleton).from_pretrained(None, state_dict=state, **options)

    # If the files have a head that differs from the embedding, transformers does not tie them, but
    # leaves `tie_word_embeddings` set.
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.weight is not model.get_input_embeddings().weight:
        _set_untied(model.config)
    _read_generation_config(path, model)
    return model, info


def _read_generation_config(path: str | Path, model: PreTrainedModel) -> None:
    """Read the generation configuration of a folder, if it has one.

    Transformers ignores a file that it cannot read, so the tokens that end a response would be
    lost. Reading the file here raises its error.
    """
    if (Path(path) / _GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)


def load_config(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> PreTrainedConfig:
    """Load the configuration of a model.

    `tie_word_embeddings` is set to False if the files have a head that differs from the embedding.
    A padding token that the vocabulary does not have is removed.

    Args:
        path: folder or hub name.
        trust_remote_code: whether code that ships with the model may run.
        override_config: entries to replace.

    Raises:
        EngineError: there is no configuration that transformers can read, or the weights are
            quantized.
    """
    overrides = override_config or {}
    with explain_load_errors(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **overrides)
    text = config.get_text_config()
    vocabulary_size = getattr(text, "vocab_size", math.inf)
    for part in (config, text):
        quantization = getattr(part, "quantization_config", None)
        if quantization:
            settings = quantization if isinstance(quantization, dict) else vars(quantization)
            method = settings.get("quant_method", "quantization_config")
            raise EngineError(
                f"model {path}",
                got=f"quantized weights ({method} in its config.json), which cannot be trained",
                expected="weights as floating-point numbers",
                fix="Name the model that it was made of, or a copy that transformers has "
                "dequantized.",
            )
        # Transformers refuses such a padding token. It is not needed, as padding is never computed.
        pad_token_id = getattr(part, "pad_token_id", None)
        if pad_token_id is not None and pad_token_id >= vocabulary_size:
            part.pad_token_id = None
    if getattr(config, "tie_word_embeddings", False) and _has_untied_head(Path(path)):
        _set_untied(config)
    return config


def _set_untied(config: PreTrainedConfig) -> None:
    """Record that a model's head is not tied to its embedding."""
    config.tie_word_embeddings = False
    config.get_text_config().tie_word_embeddings = False


def _has_untied_head(folder: Path) -> bool:
    """Whether the files of a model have a head that differs from the embedding."""
    if not folder.is_dir():
        return False
    try:
        weights = open_weights(folder)
        if _HEAD not in weights.shapes:
            return False
        head = weights.read(_HEAD)
        # The embedding has the shape of the head. Its name depends on the architecture, so any
        # weight of this shape may be the embedding. If one of them is equal, the head is tied.
        shapes = weights.shapes.items()
        candidates = [name for name, shape in shapes if name != _HEAD and shape == head.shape]
        is_tied = any(torch.equal(head, weights.read(name)) for name in candidates)
        return bool(candidates) and not is_tied
    except CheckpointError:
        # Loading the weights later reports the error.
        return False


def skeleton_causal_lm(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    auto_class: Any = None,
) -> PreTrainedModel:
    """Build the model of `load_causal_lm` on "meta": names and shapes of parameters, no values.

    Args:
        path: folder or hub name.
        trust_remote_code: whether code that ships with the model may run.
        override_config: entries of the model's configuration to replace.
        auto_class: class of transformers that builds the model, which is then assumed to compute
            packed rows. None: chosen by the configuration, and the model is tried.

    Raises:
        EngineError: the architecture is unknown or cannot be computed here.
    """
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    way = PACKED if auto_class else way_of(config, trust_remote_code=trust_remote_code)
    # Only parameters go to "meta". Buffers are small, and most of them are not in the files.
    with explain_load_errors(path), register_module_parameter_registration_hook(_create_on_meta):
        model = (auto_class or _auto_class(config)).from_config(
            config,
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
            attn_implementation=attention_of(config, way.attention),
        )
        _read_generation_config(path, model)
    if not way.reason:
        fuse(model)
    return model.eval()


def _create_on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Hook that torch calls for each new parameter of a module: replace it by one on "meta".

    Args:
        module: not used.
        name: not used.
        parameter: the new parameter.

    Returns:
        The parameter on "meta", marked as initialized for transformers.
    """
    empty = parameter
    if not parameter.is_meta:
        empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    # Transformers would initialize it otherwise, which has no effect, but takes half of the time.
    empty._is_hf_initialized = True
    return empty


@contextmanager
def explain_load_errors(
    path: str | Path, kind: str = "causal language model", fix: str = _FIX
) -> Iterator[None]:
    """Context manager: turn the errors of loading a model with transformers into an EngineError.

    Args:
        path: folder or hub name of the model.
        kind: kind of model, for the message.
        fix: what the message suggests.

    Raises:
        EngineError: transformers could not load the model.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        # The first line of the message; some errors have none.
        got = str(error).strip().partition("\n")[0] or type(error).__name__
        if len(Path(path).parts) > 2 and not Path(path).exists():
            # A path of more than two parts can only be a folder. Transformers takes it for a name
            # on the hub, and its message would mislead.
            got = "no such folder"
        elif isinstance(error, SafetensorError):
            # The error does not name the damaged file, so open each file to find it.
            try:
                SafetensorFiles(sorted(Path(path).glob("*.safetensors")))
            except CheckpointError as damage:
                got = f"{damage.where}, {damage.got}"
        raise EngineError(
            f"model {path}",
            got=got,
            expected=f"a folder or hub name that transformers can load as a {kind}",
            fix=fix,
        ) from error


def stop_token_ids(model: PreTrainedModel, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Collect the token ids that end a response, without repetitions.

    Args:
        model: model whose generation configuration lists such tokens.
        tokenizer_eos: end-of-sequence token of the tokenizer.

    Returns:
        The ids of the model, then the tokenizer's.
    """
    token_ids = []
    if model.generation_config is not None:
        # One id or a list of ids.
        declared = model.generation_config.eos_token_id
        token_ids += declared if isinstance(declared, list) else [declared]
    token_ids.append(tokenizer_eos)
    return tuple(dict.fromkeys(token for token in token_ids if token is not None))
