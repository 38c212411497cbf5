# SPDX-License-Identifier: Apache-2.0
"""The images of a batch, as engines are given them.

Legend: B rows, P prompt positions (padded left).
"""

import torch

from quadriga.protocol import DataProto
from quadriga.protocol.memory import images_key
from quadriga.rollout.base import Images


def images_of(prompts: DataProto) -> list[Images | None]:
    """The images of each row; None for a row without any. Rows that share their columns share the object.

    Args:
        prompts: batch `attention_mask` [B, P] and `position_ids` [B, 3, P]; non-tensors `multi_modal_data`,
            `multi_modal_inputs` and `raw_prompt_ids`, where a prompt has images.
    """
    columns = prompts.non_tensor_batch
    if "multi_modal_inputs" not in columns:
        return [None] * len(prompts)
    made: dict[tuple[int, tuple[int, ...]], Images] = {}
    result: list[Images | None] = []
    for row, inputs in enumerate(columns["multi_modal_inputs"]):
        if not inputs:
            result.append(None)
            continue
        short_prompt = tuple(columns["raw_prompt_ids"][row])
        name = (id(inputs), short_prompt)
        if name not in made:
            made[name] = Images(
                pictures=tuple(columns["multi_modal_data"][row]["images"]),
                inputs=inputs,
                position_ids=_positions(prompts, row),
                short_prompt=short_prompt,
                key=images_key(inputs),
            )
        result.append(made[name])
    return result


def _positions(prompts: DataProto, row: int) -> torch.Tensor:
    """Of the prompt without its padding, [3, tokens]."""
    mask = prompts.batch["attention_mask"][row].bool()
    return prompts.batch["position_ids"][row][:, mask]
