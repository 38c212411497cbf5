# SPDX-License-Identifier: Apache-2.0
"""To one TensorDict and back."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol import DataProto, deep_equal


def same(left: DataProto, right: DataProto) -> bool:
    def stores(data: DataProto) -> list:
        arrays = {key: (array.dtype, array) for key, array in data.non_tensor_batch.items()}
        return [data.batch is not None and dict(data.batch.items()), arrays, data.meta_info, len(data)]

    return deep_equal(stores(left), stores(right))


@pytest.mark.parametrize("rows", [3, 1, 0])
def test_there_and_back_without_loss(rows: int) -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(3.0)},
        {
            "lists": [[1], [2, 3], None],
            "dicts": [{"a": [1]}] * 3,
            "rate": np.array([1, 2, 3], dtype=np.float32),
            "grid": np.arange(6).reshape(3, 2),
            "words": np.array(["a", "bc", ""]),
            "objects": np.array([[1, "x"], [2, "y"], [3, None]], dtype=object),
        },
        {"step": 1, "config": {"a": [1, 2]}, "names": ["p", "q"]},
    )[:rows]
    assert same(DataProto.from_tensordict(data.to_tensordict()), data)


def test_without_tensors_or_without_columns() -> None:
    arrays = DataProto.from_dict(non_tensors={"uid": ["a", "b"]}, meta_info={"step": 1})
    back = DataProto.from_tensordict(arrays.to_tensordict())
    assert back.non_tensor_batch["uid"].tolist() == ["a", "b"] and back.meta_info == {"step": 1}
    assert len(DataProto.from_tensordict(TensorDict({}, batch_size=[3]))) == 3


def test_objects_of_a_foreign_tensordict_are_sorted() -> None:
    foreign = TensorDict(
        {"x": torch.ones(2), "uid": NonTensorStack("a", "b"), "note": NonTensorData("all", batch_size=[2])},
        batch_size=[2],
    )
    data = DataProto.from_tensordict(foreign, {"step": 1})
    assert data.non_tensor_batch["uid"].tolist() == ["a", "b"] and data.meta_info == {"note": "all", "step": 1}


def test_rows_of_the_tensordict_are_rows() -> None:
    data = DataProto.from_dict({"x": torch.arange(3)}, {"rate": np.array([1.0, 2.0, 3.0])})
    assert DataProto.from_tensordict(data.to_tensordict()[1:]).non_tensor_batch["rate"].tolist() == [2.0, 3.0]


def test_two_entries_of_one_name() -> None:
    with pytest.raises(ProtocolError, match=r"'x'.*two entries"):
        DataProto.from_dict({"x": torch.ones(1)}, meta_info={"x": 1}).to_tensordict()
