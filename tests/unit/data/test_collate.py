# SPDX-License-Identifier: Apache-2.0
"""Rows become a batch."""

import numpy as np
import pytest
import torch

from quadriga.data import collate_fn
from quadriga.errors import DataError


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
    batch = collate_fn([{"image": [np.zeros((2, 2))], "text": "ab"}, {"image": [np.ones((2, 2))], "text": "c"}])
    assert batch["text"].tolist() == ["ab", "c"]
    assert batch["image"][1][0].sum() == 4


def test_rows_with_different_keys_are_an_error_not_a_shorter_column():
    with pytest.raises(DataError, match=r"row 1 of the batch.*answer"):
        collate_fn([{"a": 1}, {"a": 2, "answer": 3}])


def test_tensors_of_different_shapes_name_their_key():
    with pytest.raises(DataError, match=r"'ids'.*\(2,\), \(3,\)"):
        collate_fn([{"ids": torch.zeros(3)}, {"ids": torch.zeros(2)}])


def test_no_rows():
    with pytest.raises(DataError, match="no rows"):
        collate_fn([])
