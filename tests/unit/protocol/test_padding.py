# SPDX-License-Identifier: Apache-2.0
"""Padding to a divisor, and folding the batch dimension."""

import numpy as np
import pytest
import torch

from quadriga.errors import ProtocolError
from quadriga.protocol import DataProto, fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto


def rows(count: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(count)}, {"uid": list(range(count))}, {"step": 1})


@pytest.mark.parametrize(
    ("count", "divisor", "expected"),
    [(3, 4, [0, 1, 2, 0]), (2, 5, [0, 1, 0, 1, 0]), (5, 2, [0, 1, 2, 3, 4, 0]), (0, 4, [])],
)
def test_padding_repeats_the_first_rows(count: int, divisor: int, expected: list[int]) -> None:
    data = rows(count)
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert padded.batch["x"].tolist() == expected == padded.non_tensor_batch["uid"].tolist()
    assert pad_size == len(expected) - count and len(data) == count
    assert unpad_dataproto(padded, pad_size).batch["x"].tolist() == list(range(count))


def test_nothing_to_pad_returns_the_same_object() -> None:
    data = rows(4)
    padded, pad_size = pad_dataproto_to_divisor(data, 2)
    assert padded is data and pad_size == 0 and unpad_dataproto(data, 0) is data


def test_impossible_paddings() -> None:
    for call in (
        lambda: pad_dataproto_to_divisor(rows(2), 0),
        lambda: unpad_dataproto(rows(2), 3),
        lambda: unpad_dataproto(rows(2), -1),
        lambda: fold_batch_dim(rows(4), 3),
        lambda: unfold_batch_dim(rows(4)),
        lambda: unfold_batch_dim(DataProto.from_dict({"a": torch.ones(2, 3), "b": torch.ones(2, 4)})),
    ):
        with pytest.raises(ProtocolError):
            call()


def test_fold_keeps_neighbours_together() -> None:
    data = DataProto.from_dict({"x": torch.arange(12).view(6, 2)}, {"uid": np.array(list("aabbcc"), dtype=object)})
    folded = fold_batch_dim(data, 3)
    assert len(folded) == 3 and folded.non_tensor_batch["uid"].tolist() == [["a", "a"], ["b", "b"], ["c", "c"]]
    assert folded.batch["x"][1].tolist() == [[4, 5], [6, 7]]
    back = unfold_batch_dim(folded)
    assert back.batch["x"].tolist() == data.batch["x"].tolist()
    assert back.non_tensor_batch["uid"].tolist() == list("aabbcc")
