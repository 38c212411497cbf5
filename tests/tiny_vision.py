# SPDX-License-Identifier: Apache-2.0
"""Tiny vision-language models with our attention, and images as their processors would cut them."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.vision import attention_of
from tests.vision_folder import END, EOS, FAMILIES, IMAGE, START, WORDS, tiny_model

__all__ = ["EOS", "FAMILIES", "IMAGE"]
VOCABULARY = len(WORDS)


def vision_config(family: str = "qwen2_5_vl") -> PreTrainedConfig:
    """Of a tiny model: images in patches of 4 by 4 pixels, of which 2 by 2 make an embedding."""
    return tiny_model(family).config


def vision_model(attention: str = ATTENTION_NAME, family: str = "qwen2_5_vl") -> PreTrainedModel:
    """The same random model at each call."""
    model = tiny_model(family)
    parts = attention_of(model.config, attention)
    model.set_attn_implementation(parts if isinstance(parts, dict) else {"": parts})
    return model


def save_vision_model(folder: Any, family: str = "qwen2_5_vl") -> None:
    """That model as transformers saves it."""
    tiny_model(family).save_pretrained(folder)


def random_image(generator: torch.Generator, height: int, width: int) -> dict[str, torch.Tensor]:
    """An image of noise as the model takes it.

    Args:
        generator: of its patches.
        height, width: in patches, even ones.
    """
    return {
        "pixel_values": torch.randn(height * width, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def image_tokens(inputs: dict[str, torch.Tensor]) -> list[int]:
    """The tokens that stand for images in a prompt."""
    tokens: list[int] = []
    for grid in inputs["image_grid_thw"]:
        tokens += [START, *[IMAGE] * (int(grid.prod()) // 4), END]
    return tokens


def joined(*images: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Several images as those of one prompt."""
    return {name: torch.cat([image[name] for image in images]) for name in images[0]}


def positions_of(model: PreTrainedModel, tokens: list[int], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[3, P] as transformers computes them."""
    ids = torch.tensor([tokens])
    found, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=inputs.get("image_grid_thw")
    )
    return found[:, 0]
