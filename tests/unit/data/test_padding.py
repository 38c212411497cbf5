# SPDX-License-Identifier: Apache-2.0
"""Truncation, padding, position ids, and rows that become a batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.data.padding import (
    collate_fn,
    compute_position_id_with_mask,
    pad_left,
    postprocess_data,
    truncate,
)
from quadriga.errors import DataError

IDS = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("mode", "limit", "kept"),
    [
        ("left", 3, [5, 6, 7]),
        ("right", 3, [1, 2, 3]),
        ("middle", 3, [1, 6, 7]),
        ("middle", 4, [1, 2, 6, 7]),
        ("middle", 1, [7]),
        ("error", 7, IDS),
        ("left", 9, IDS),
    ],
)
def test_modes_keep_their_side(mode: str, limit: int, kept: list[int]):
    assert truncate(IDS, limit, mode) == kept


def test_error_names_the_place_the_length_and_the_ways_out():
    with pytest.raises(
        DataError, match=r"a\.parquet row 4: got 7 tokens, expected at most .*=3.*filter_overlong"
    ):
        truncate(IDS, 3, "error", where="a.parquet row 4")


def test_unknown_mode_is_refused_even_when_nothing_is_too_long():
    with pytest.raises(DataError, match="one of error, left, right, middle"):
        truncate(IDS, 99, "centre")


def test_padding_sides():
    values = torch.tensor([[1, 2]])
    assert pad_left(values, 4, 9).tolist() == [[9, 9, 1, 2]]
    assert pad_left(values, 1, 9).tolist() == [[1, 2]]


def test_postprocess_pads_ids_and_mask():
    ids, mask = postprocess_data(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long), 4, 0)
    assert (ids.tolist(), mask.tolist()) == ([[0, 0, 5, 6]], [[0, 0, 1, 1]])
    ids, mask = postprocess_data(
        torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long), 4, 0, left_pad=False
    )
    assert (ids.tolist(), mask.tolist()) == ([[5, 6, 0, 0]], [[1, 1, 0, 0]])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from(["left", "right", "middle"]),
)
def test_list_and_tensor_forms_agree(ids: list[int], limit: int, mode: str):
    """What the batch holds between its padding is what the list form returns."""
    tensor, mask = postprocess_data(
        torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long), limit, 0, True, mode
    )
    assert tensor.shape == mask.shape == (1, limit)
    assert tensor[mask.bool()].tolist() == truncate(ids, limit, mode)
    assert len(truncate(ids, limit, mode)) == min(len(ids), limit)


def test_left_padding_gets_zero_and_tokens_count_from_zero():
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    expected = [[0, 0, 0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert compute_position_id_with_mask(mask).tolist() == expected


def test_right_padding_gets_zero_too():
    assert compute_position_id_with_mask(torch.tensor([1, 1, 1, 1, 0, 0, 0])).tolist() == [
        0,
        1,
        2,
        3,
        0,
        0,
        0,
    ]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 6), st.integers(1, 6))
def test_a_padded_sequence_has_the_positions_of_the_bare_one(num_pad: int, num_prompt: int):
    found = compute_position_id_with_mask(torch.tensor([[0] * num_pad + [1] * num_prompt]))
    assert found.tolist() == [[0] * num_pad + list(range(num_prompt))]


def make_sample(ids: list[int], truth: str, index: int) -> dict:
    pad = 5 - len(ids)
    return {
        "input_ids": torch.tensor(ids + [0] * pad),
        "attention_mask": torch.tensor([1] * len(ids) + [0] * pad),
        "position_ids": torch.tensor([*range(len(ids)), *[0] * pad]),
        "raw_prompt_ids": ids,
        "data_source": "geo3k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": index},
        "index": index,
        "tools_kwargs": {},
        "interaction_kwargs": {},
    }


def test_the_worked_example():
    batch = collate_fn([make_sample([1, 2, 3], "42", 0), make_sample([4, 5, 6, 7], "56", 1)])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 0]]
    assert batch["raw_prompt_ids"].tolist() == [[1, 2, 3], [4, 5, 6, 7]]
    assert batch["reward_model"].tolist() == [
        {"style": "rule", "ground_truth": "42"},
        {"style": "rule", "ground_truth": "56"},
    ]
    assert batch["index"].tolist() == [0, 1]
    objects = {key: value for key, value in batch.items() if isinstance(value, np.ndarray)}
    assert all(value.dtype == object and value.shape == (2,) for value in objects.values())
    assert len(objects) == 8


def test_lists_of_equal_length_stay_lists():
    column = collate_fn([{"ids": [1, 2]}, {"ids": [3, 4]}])["ids"]
    assert column.shape == (2,)
    assert column[1] == [3, 4]


def test_nested_arrays_and_strings_stay_whole():
    batch = collate_fn(
        [{"image": [np.zeros((2, 2))], "text": "ab"}, {"image": [np.ones((2, 2))], "text": "c"}]
    )
    assert batch["text"].tolist() == ["ab", "c"]
    assert batch["image"][1][0].sum() == 4


def test_rows_with_different_keys_are_an_error_not_a_shorter_column():
    with pytest.raises(DataError, match=r"rows 0 and 1 of the batch.*answer"):
        collate_fn([{"a": 1}, {"a": 2, "answer": 3}])


def test_tensors_of_different_shapes_name_their_key():
    with pytest.raises(DataError, match=r"'ids'.*\(2,\), \(3,\)"):
        collate_fn([{"ids": torch.zeros(3)}, {"ids": torch.zeros(2)}])


def test_no_rows():
    with pytest.raises(DataError, match="no rows"):
        collate_fn([])
    with pytest.raises(DataError, match="collate_fn: got a list, expected rows, each a dictionary"):
        collate_fn([[1]])
