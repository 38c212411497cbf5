# SPDX-License-Identifier: Apache-2.0
"""Tiny vision-language models with our attention, and images as their processors would cut them."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.vision import attention_of
from tests.vision_folder import (
    END,
    EOS,
    FAMILIES,
    FILM,
    IMAGE,
    MIXTURE,
    START,
    VIDEO,
    WORDS,
    tiny_model,
)

__all__ = ["EOS", "FAMILIES", "IMAGE", "MIXTURE"]
VOCABULARY = len(WORDS)


def vision_config(family: str = "qwen2_5_vl") -> PreTrainedConfig:
    """Of a tiny model: images in patches of 4 by 4 pixels, of which 2 by 2 make an embedding."""
    return tiny_model(family).config


def vision_model(
    attention: str = ATTENTION_NAME, family: str = "qwen2_5_vl", **text: Any
) -> PreTrainedModel:
    """The same random model at each call."""
    model = tiny_model(family, **text)
    parts = attention_of(model.config, attention)
    model.set_attn_implementation(parts if isinstance(parts, dict) else {"": parts})
    return model


def save_vision_model(folder: Any, family: str = "qwen2_5_vl", **text: Any) -> None:
    """That model as transformers saves it."""
    tiny_model(family, **text).save_pretrained(folder)


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


def random_video(
    generator: torch.Generator, time: int, height: int, width: int, family: str
) -> dict[str, torch.Tensor]:
    """A video of noise, `time` pairs of frames, likewise."""
    video = {
        "pixel_values_videos": torch.randn(
            time * height * width, 3 * 2 * 4 * 4, generator=generator
        ),
        "video_grid_thw": torch.tensor([[time, height, width]]),
    }
    # A place along time for each pair of frames: four stand in a second.
    return video | ({"second_per_grid_ts": torch.tensor([0.25])} if family == "qwen2_5_vl" else {})


def video_tokens(inputs: dict[str, torch.Tensor], family: str) -> list[int]:
    """The tokens that stand for videos in a prompt; where frames stand apart, a word before each."""
    tokens: list[int] = []
    for time, height, width in inputs["video_grid_thw"].tolist():
        one = [IMAGE if family == "glm4v" else VIDEO] * (height * width // 4)
        if family == "glm4v":
            tokens += [FILM[0], *[START, *one, END, EOS + 6] * time, FILM[1]]
            continue
        apart = [token for _ in range(time) for token in (EOS + 6, START, *one, END)]
        tokens += apart if family in ("qwen3_vl", MIXTURE) else [START, *one * time, END]
    return tokens


def joined(*images: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Several images as those of one prompt."""
    return {name: torch.cat([image[name] for image in images]) for name in images[0]}


def positions_of(
    model: PreTrainedModel, tokens: list[int], inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    """[3, P] as transformers computes them."""
    ids = torch.tensor([tokens])
    grids = {name: value for name, value in inputs.items() if not name.startswith("pixel")}
    found, _ = model.model.get_rope_index(ids, mm_token_type_ids=token_types(ids), **grids)
    return found[:, 0]


def token_types(ids: torch.Tensor) -> torch.Tensor:
    """As transformers numbers them: 1 for images, 2 for videos."""
    is_film = (ids == FILM[0]).cumsum(-1) > (ids == FILM[1]).cumsum(-1)
    return (ids == IMAGE).int() * (1 + is_film.int()) + 2 * (ids == VIDEO).int()
