# SPDX-License-Identifier: Apache-2.0
"""Causal models of transformers from a folder with either kind of weights: Hugging Face's, or a checkpoint's."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from quadriga.config.adapter import is_adapter
from quadriga.models.adapter_files import open_model
from quadriga.models.vision import is_vision
from quadriga.models.weight_files import distributed_folder

_GENERATION = "generation_config.json"


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The class of transformers that finds the class of a model."""
    return AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM


def from_pretrained(
    path: str | Path, config: PretrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool = False, **options: Any
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
    if (Path(path) / _GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model, info
