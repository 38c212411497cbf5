# SPDX-License-Identifier: Apache-2.0
"""The images of each row's prompt, out of the column `multi_modal_inputs`.

Legend: I images of a prompt, S patches of all of them, X values of a patch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quadriga.errors import EngineError
from quadriga.models.vision import ImageTokens
from quadriga.protocol import DataProto
from quadriga.protocol.memory import images_key

COLUMN = "multi_modal_inputs"


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt.

    Attributes:
        inputs: as the model takes them: `pixel_values` [S, X], `image_grid_thw` [I, 3].
        places: of their tokens in the prompt.
        key: equal for equal images.
    """

    inputs: Mapping[str, torch.Tensor]
    places: np.ndarray
    key: bytes


def prompt_images(
    data: DataProto, prompts: Sequence[np.ndarray], tokens: ImageTokens | None
) -> list[PromptImages | None]:
    """The images of each row; None where it has none.

    Args:
        data: of which `multi_modal_inputs` is read, if it is there.
        prompts: token ids of each row, without padding.
        tokens: of the model; None: it does not see.

    Raises:
        EngineError: a prompt has more or fewer image tokens than its images have embeddings, or images for a model
            that does not see.
    """
    column = data.non_tensor_batch.get(COLUMN)
    if tokens is None and column is None:
        return [None] * len(prompts)
    keys: dict[int, bytes] = {}  # the samples of a prompt hold the same object
    return [
        _of_row(row, {} if column is None else column[row] or {}, prompt, tokens, keys)
        for row, prompt in enumerate(prompts)
    ]


def _of_row(
    row: int, inputs: dict[str, Any], prompt: np.ndarray, tokens: ImageTokens | None, keys: dict[int, bytes]
) -> PromptImages | None:
    where = f"row {row} of a batch"
    if tokens is None:
        if inputs:
            raise EngineError(where, got="images", expected="text: the model does not see")
        return None
    places = np.flatnonzero(prompt == tokens.token_id)
    expected = tokens.count(inputs["image_grid_thw"]) if inputs else 0
    if len(places) != expected:
        raise EngineError(
            where,
            got=f"{len(places)} image tokens (id {tokens.token_id}) in the prompt",
            expected=f"{expected}, one for each embedding of its images",
            fix="Let data.image_key name the column with the images; a prompt is never cut inside of one.",
        )
    if not inputs:
        return None
    if id(inputs) not in keys:
        keys[id(inputs)] = images_key(inputs).encode()
    return PromptImages(inputs, places, keys[id(inputs)])
