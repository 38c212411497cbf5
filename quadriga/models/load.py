# SPDX-License-Identifier: Apache-2.0
"""Loading Hugging Face causal models and vision-language models, with errors that say what to do.

Legend: B rows, N tokens of each, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
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
from quadriga.errors import EngineError
from quadriga.models.adapter_files import open_model
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.fused import fuse
from quadriga.models.vision import attention_of, is_vision
from quadriga.models.weight_files import distributed_folder

_LOADING = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


def load_causal_lm(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attention: str = ATTENTION_NAME,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal language model in evaluation mode, whose attention is an `AttentionPlan`.

    From tokens [B, N] its backbone makes hidden states [B, N, D], and its head logits [B, N, V].

    Args:
        path: a folder with config.json and safetensors, or a name that transformers can resolve.
        dtype: of the parameters.
        device: where they live.
        attention: `ATTENTION_NAME` for calls with an attention plan, or an implementation of transformers.
        trust_remote_code: whether code that ships with the model may run.
        override_config: entries of the model's configuration to replace.

    Raises:
        EngineError: the folder is missing or incomplete, or the architecture is unknown.
    """
    disable_progress_bar()
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    try:
        model, info = from_pretrained(
            path,
            config,
            dtype=dtype,
            attn_implementation=attention_of(config, attention),
            trust_remote_code=trust_remote_code,
        )
    except _LOADING as error:
        raise _not_loaded(path, error) from error
    if missing := sorted(info["missing_keys"]):
        raise EngineError(
            f"model {path}",
            got=f"no weights for {len(missing)} parameters, first {missing[0]}",
            expected="all weights of the model; the missing ones would be random",
            fix="Get the whole model, or take away what does not belong to it from its config.json.",
        )
    fuse(model)
    return model.to(device).eval()


def auto_class(config: PreTrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The class of transformers that finds the class of a model."""
    return AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM


def from_pretrained(
    path: str | Path, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool = False, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and what transformers says of its loading (`missing_keys` and the like).

    Args:
        path: a folder, or a name that transformers can resolve.
        config: of the model.
        dtype: of the parameters.
        trust_remote_code: whether code that ships with the model may run.
        options: of transformers' `from_pretrained`.

    Raises:
        CheckpointError: a checkpoint's weights are missing or damaged.
    """
    # Transformers would put an adapter beside the weights; here it is merged into them.
    if distributed_folder(path) is None and not is_adapter(path):
        return auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
    with torch.device("meta"):
        model_class = type(auto_class(config).from_config(config, trust_remote_code=trust_remote_code))
    weights = open_model(path)
    state = {name: weights.read(name).to(dtype) for name in weights.names()}
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, **options
    )
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model, info


def load_config(
    path: str | Path, *, trust_remote_code: bool = False, override_config: dict[str, Any] | None = None
) -> PreTrainedConfig:
    """The configuration of a model, with some entries replaced.

    Raises:
        EngineError: there is none.
    """
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **(override_config or {}))
    except _LOADING as error:
        raise _not_loaded(path, error) from error


def skeleton_causal_lm(
    path: str | Path, *, trust_remote_code: bool = False, override_config: dict[str, Any] | None = None
) -> PreTrainedModel:
    """The model that `load_causal_lm` would load, with its parameters on "meta": names and shapes, no values."""
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    try:
        with _parameters_on_meta():
            model = auto_class(config).from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention_of(config, ATTENTION_NAME),
                trust_remote_code=trust_remote_code,
            )
        if (Path(path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
    except _LOADING as error:
        raise _not_loaded(path, error) from error
    fuse(model)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have no memory for parameters; their buffers are real, for nothing in a file holds them."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _not_loaded(path: str | Path, error: Exception) -> EngineError:
    return EngineError(
        f"model {path}",
        got=str(error).strip().splitlines()[0],
        expected="a folder or hub name that transformers can load as a causal language model",
        fix="Check actor_rollout_ref.model.path; `quadriga prepare model NAME --output DIR` writes such a folder.",
    )


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part of a model that turns tokens [B, N] into hidden states [B, N, D], without a vision encoder."""
    body = cast(Any, model.base_model)
    return body.language_model if is_vision(model.config) else body


def head_of(model: PreTrainedModel) -> nn.Module:
    """The projection from hidden states to the vocabulary: a module with `weight` [V, D] and perhaps `bias`."""
    head = model.get_output_embeddings()
    if head is None:
        raise EngineError(
            f"model {type(model).__name__}", got="no projection to the vocabulary", expected="a causal language model"
        )
    return head


def stop_token_ids(model: PreTrainedModel, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Token ids that end a response: those of the model's generation configuration, and the tokenizer's own."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = declared if isinstance(declared, list) else [declared]
    return tuple(dict.fromkeys(token for token in [*ids, tokenizer_eos] if token is not None))
