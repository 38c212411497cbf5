# SPDX-License-Identifier: Apache-2.0
"""From padded rows to packed tokens and back."""

import pytest
import torch

from quadriga.engines.packing import pack, row_tokens
from quadriga.errors import EngineError
from quadriga.protocol import DataProto

CPU = torch.device("cpu")


def batch(
    rows: list[tuple[list[int], list[int], list[int]]], width: int = 3, columns: int = 4
) -> DataProto:
    """Rows of (prompt, response, response mask)."""
    input_ids = torch.zeros(len(rows), width + columns).long()
    attention, mask = torch.zeros_like(input_ids), torch.zeros(len(rows), columns).long()
    for number, (prompt, response, trained) in enumerate(rows):
        span = slice(width - len(prompt), width + len(response))
        input_ids[number, span] = torch.tensor(prompt + response)
        attention[number, span] = 1
        mask[number, : len(trained)] = torch.tensor(trained)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention,
            "position_ids": positions,
            "response_mask": mask,
        }
    )


def test_shared_prompt_by_hand() -> None:
    """Two answers to one prompt: the prompt stands once, the last token of each answer nowhere."""
    data = batch([([7, 8], [1, 2, 3], [1, 1, 1]), ([7, 8], [4], [1])])
    packed = pack(row_tokens(data), 4, share_prompts=True, device=CPU)
    assert packed.input_ids.tolist() == [[7, 8, 1, 2]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3]]
    assert packed.predictors.tolist() == [1, 2, 3, 1]
    assert packed.targets.tolist() == [1, 2, 3, 4]
    assert packed.unpack(torch.tensor([1.0, 2, 3, 4])).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]


def test_prompts_apart_by_hand() -> None:
    data = batch([([7, 8], [1, 2, 3], [1, 1, 1]), ([7, 8], [4], [1])])
    packed = pack(row_tokens(data), 4, share_prompts=False, device=CPU)
    assert packed.input_ids.tolist() == [[7, 8, 1, 2, 7, 8]]
    assert packed.predictors.tolist() == [1, 2, 3, 5]


def test_tokens_of_a_tool_are_seen_and_not_predicted() -> None:
    """Mask 0 inside a response: a token that the policy read and did not write."""
    data = batch([([9], [1, 2, 3, 4], [1, 0, 0, 1])])
    packed = pack(row_tokens(data), 4, share_prompts=True, device=CPU)
    assert packed.input_ids.tolist() == [[9, 1, 2, 3]]
    assert packed.targets.tolist() == [1, 4]
    assert packed.predictors.tolist() == [0, 3]
    assert packed.unpack(torch.tensor([5.0, 6])).tolist() == [[5, 0, 0, 6]]


def test_what_follows_the_last_trained_token_is_left_out() -> None:
    data = batch([([9], [1, 2, 3, 4], [1, 1, 0, 0])])
    assert pack(row_tokens(data), 4, share_prompts=True, device=CPU).input_ids.tolist() == [[9, 1]]


def test_rows_without_trained_tokens_unpack_to_zero() -> None:
    data = batch([([9], [1], [0]), ([5], [6], [1])])
    packed = pack(row_tokens(data), 4, share_prompts=True, device=CPU)
    assert packed.input_ids.tolist() == [[5]]
    assert packed.unpack(torch.tensor([2.0])).tolist() == [[0, 0, 0, 0], [2, 0, 0, 0]]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(EngineError, match="row 1 of a batch: got an empty prompt"):
        row_tokens(batch([([9], [1], [1]), ([], [1], [1])]))
