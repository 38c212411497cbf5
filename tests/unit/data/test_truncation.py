# SPDX-License-Identifier: Apache-2.0
"""The four modes of truncation, and padding to a fixed length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.data import pad_left, pad_right, postprocess_data, truncate
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
    with pytest.raises(DataError, match=r"a\.parquet row 4: got 7 tokens, expected at most .*=3.*filter_overlong"):
        truncate(IDS, 3, "error", where="a.parquet row 4")


def test_unknown_mode_is_refused_even_when_nothing_is_too_long():
    with pytest.raises(DataError, match="one of error, left, right, middle"):
        truncate(IDS, 99, "centre")


def test_padding_sides():
    values = torch.tensor([[1, 2]])
    assert pad_left(values, 4, 9).tolist() == [[9, 9, 1, 2]]
    assert pad_right(values, 4, 9).tolist() == [[1, 2, 9, 9]]
    assert pad_left(values, 1, 9).tolist() == [[1, 2]]


def test_postprocess_pads_ids_and_mask():
    ids, mask = postprocess_data(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long), 4, 0)
    assert (ids.tolist(), mask.tolist()) == ([[0, 0, 5, 6]], [[0, 0, 1, 1]])
    ids, mask = postprocess_data(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long), 4, 0, left_pad=False)
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
