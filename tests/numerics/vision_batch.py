# SPDX-License-Identifier: Apache-2.0
"""A ragged batch of answers to prompts with images and without, for tests that compare numbers."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from quadriga.protocol import DataProto
from tests.tiny_vision import (
    VOCABULARY,
    image_tokens,
    joined,
    positions_of,
    random_image,
    random_video,
    video_tokens,
)

RESPONSE_WIDTH = 6


@dataclass
class Row:
    """One sample; `images` as the model takes them, empty without any."""

    prompt: list[int]
    images: dict[str, torch.Tensor]
    answer: list[int]


def vision_rows(family: str = "qwen2_5_vl") -> list[Row]:
    """Three answers to each of five prompts: with an image, the same tokens with another image, text alone, two images
    of other sizes with text between them, and a video behind an image. Answers to the first two prompts are the same.
    Of GLM-4V the video stands alone: transformers takes no other.
    """
    generator = torch.Generator().manual_seed(2)

    def words(count: int) -> list[int]:
        return torch.randint(7, VOCABULARY, (count,), generator=generator).tolist()

    red, blue = (random_image(generator, 4, 4) for _ in range(2))
    wide, tall = random_image(generator, 4, 6), random_image(generator, 6, 2)
    film = random_video(torch.Generator().manual_seed(4), 3, 6, 6, family)
    text, asked = words(3), words(2)
    prompts = [
        ([*text, *image_tokens(red), *asked], red),
        ([*text, *image_tokens(blue), *asked], blue),
        (words(7), {}),
        ([*image_tokens(wide), *words(2), *image_tokens(tall), *words(1)], joined(wide, tall)),
        ([*image_tokens(tall), *words(2), *video_tokens(film, family), *words(1)], tall | film),
    ]
    if family == "glm4v":
        prompts[-1] = ([*words(3), *video_tokens(film, family), *words(1)], film)
    answers = [words(count) for count in (4, 1, 6)]
    rows = []
    for number, (prompt, images) in enumerate(prompts):
        own = (
            answers
            if number < 2
            else [words(int(count)) for count in torch.randint(1, 7, (3,), generator=generator)]
        )
        rows += [Row(prompt, images, list(answer)) for answer in own]
    return rows


def vision_batch(model: PreTrainedModel, rows: list[Row]) -> DataProto:
    """Rows as training gets them, padded, with advantages and old log-probs.

    Args:
        model: computes the positions of prompts.
        rows: in their order.
    """
    generator = torch.Generator().manual_seed(3)
    prompt_width = max(len(row.prompt) for row in rows)
    width = prompt_width + RESPONSE_WIDTH
    input_ids, attention = (
        torch.zeros(len(rows), width).long(),
        torch.zeros(len(rows), width).long(),
    )
    positions, inputs = torch.zeros(len(rows), 3, width).long(), np.empty(len(rows), dtype=object)
    for number, row in enumerate(rows):
        start, end = prompt_width - len(row.prompt), prompt_width + len(row.answer)
        input_ids[number, start:end] = torch.tensor([*row.prompt, *row.answer])
        attention[number, start:end] = 1
        of_prompt = positions_of(model, row.prompt, row.images)
        after = of_prompt.max() + 1 + torch.arange(len(row.answer))
        positions[number, :, start:end] = torch.cat([of_prompt, after.expand(3, -1)], -1)
        inputs[number] = row.images
    mask = attention[:, prompt_width:]
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention,
            "position_ids": positions,
            "responses": input_ids[:, prompt_width:],
            "response_mask": mask,
            "advantages": torch.randn(len(rows), 1, generator=generator) * mask,
            "old_log_probs": torch.randn(mask.shape, generator=generator) * 0.2 - 4.2,
        },
        non_tensors={"multi_modal_inputs": inputs},
    )
