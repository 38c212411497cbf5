# SPDX-License-Identifier: Apache-2.0
"""Position ids of padded prompts and of prompt plus response."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.data import compute_position_id_with_mask, extend_position_ids


def test_left_padding_gets_zero_and_tokens_count_from_zero():
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    expected = [[0, 0, 0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert compute_position_id_with_mask(mask).tolist() == expected


def test_right_padding_gets_zero_too():
    assert compute_position_id_with_mask(torch.tensor([1, 1, 1, 1, 0, 0, 0])).tolist() == [0, 1, 2, 3, 0, 0, 0]


def test_response_continues_where_the_prompt_ends():
    prompt = compute_position_id_with_mask(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]]))
    both = extend_position_ids(prompt, 4)
    assert both.tolist() == [[0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5]]


def test_multimodal_components_each_continue_on_their_own():
    prompt = torch.tensor([[[0, 1, 2], [0, 4, 4], [0, 5, 9]]])
    assert extend_position_ids(prompt, 2)[0].tolist() == [[0, 1, 2, 3, 4], [0, 4, 4, 5, 6], [0, 5, 9, 10, 11]]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 6), st.integers(1, 6), st.integers(0, 6))
def test_a_padded_sequence_has_the_positions_of_the_bare_one(num_pad: int, num_prompt: int, num_response: int):
    mask = torch.tensor([[0] * num_pad + [1] * num_prompt])
    both = extend_position_ids(compute_position_id_with_mask(mask), num_response)
    assert both[0, num_pad:].tolist() == list(range(num_prompt + num_response))
