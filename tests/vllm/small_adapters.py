# SPDX-License-Identifier: Apache-2.0
"""Adapters in small models: what an actor publishes of them, and PEFT's own reading of the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from quadriga.config import ModelConfig
from quadriga.models.adapter_files import base_name, is_factor, write_factors
from quadriga.models.lora import add_adapter, write_adapter_config
from small_models import model

LORA = {
    "lora_rank": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
}


def section(**changes: Any) -> ModelConfig:
    """All kinds of modules: packed ones with and without each of their parts, and others."""
    return ModelConfig(**LORA | changes)


def adapted(
    seed: int, dtype: torch.dtype = torch.float32, size: float = 0.3, **changes: Any
) -> PreTrainedModel:
    """The model of seed 0, and an adapter of random values that changes what it says."""
    one = model(0).to(dtype)
    add_adapter(one, section(**changes), seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * size)
            if is_factor(name):
                parameter.data = parameter.data.to(dtype)
    return one


def published(one: PreTrainedModel, *, with_frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """What an actor sends of it."""
    for name, parameter in one.named_parameters():
        if with_frozen or is_factor(name):
            yield base_name(name), parameter.detach()


def by_peft(one: PreTrainedModel, folder: Path) -> PeftModel:
    """The same, out of files by PEFT: what it is needs no code of ours."""
    folder.mkdir()
    write_adapter_config(one, folder)
    write_factors(
        folder,
        {name: tensor.detach() for name, tensor in one.named_parameters() if is_factor(name)},
    )
    return PeftModel.from_pretrained(model(0), folder).eval()
