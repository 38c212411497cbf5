# SPDX-License-Identifier: Apache-2.0
"""How a DataProto describes itself, and how one TensorDict holds all of it."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol import DataProto, deep_equal, object_array


def same(left: DataProto, right: DataProto) -> bool:
    def stores(data: DataProto) -> list:
        arrays = {key: (array.dtype, array) for key, array in data.non_tensor_batch.items()}
        return [
            data.batch is not None and dict(data.batch.items()),
            arrays,
            data.meta_info,
            len(data),
        ]

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
        {
            "x": torch.ones(2),
            "uid": NonTensorStack("a", "b"),
            "note": NonTensorData("all", batch_size=[2]),
        },
        batch_size=[2],
    )
    data = DataProto.from_tensordict(foreign, {"step": 1})
    assert data.non_tensor_batch["uid"].tolist() == ["a", "b"] and data.meta_info == {
        "note": "all",
        "step": 1,
    }


def test_rows_of_the_tensordict_are_rows() -> None:
    data = DataProto.from_dict({"x": torch.arange(3)}, {"rate": np.array([1.0, 2.0, 3.0])})
    assert DataProto.from_tensordict(data.to_tensordict()[1:]).non_tensor_batch[
        "rate"
    ].tolist() == [2.0, 3.0]


def test_two_entries_of_one_name() -> None:
    with pytest.raises(ProtocolError, match=r"'x'.*two entries"):
        DataProto.from_dict({"x": torch.ones(1)}, meta_info={"x": 1}).to_tensordict()


def test_data_info_of_every_store() -> None:
    nested = TensorDict({"pixels": torch.ones(2, 3)}, batch_size=[2])
    data = DataProto(
        TensorDict({"image": nested, "x": torch.ones(2, dtype=torch.bfloat16)}, batch_size=[2]),
        {"rate": np.ones((2, 4))},
        {"step": 1},
    )
    assert data.get_data_info() == "\n".join(
        [
            "batch",
            "  image",
            "    pixels: (2, 3) (torch.float32) cpu",
            "  x: (2,) (torch.bfloat16) cpu",
            "non_tensor_batch",
            "  rate: ndarray(2, 4) (float64)",
            "meta_info",
            "  step: int",
        ]
    )
    assert DataProto().get_data_info() == "batch\nnon_tensor_batch\nmeta_info"


def test_repr_is_one_line() -> None:
    data = DataProto.from_dict({"x": torch.ones(2, 3)}, {"uid": ["a", "b"]}, {"step": 1})
    assert repr(data) == "DataProto(2 rows, x (2, 3) float32, uid (2,) object; meta_info: step)"


def test_print_size_counts_shared_objects_once(capsys: pytest.CaptureFixture[str]) -> None:
    image = {"pixels": torch.zeros(1 << 18)}
    data = DataProto.from_dict(
        {"x": torch.ones(1 << 18)}, {"image": object_array([image] * (1 << 18))}
    )
    data.print_size("rollout")
    printed = capsys.readouterr().out
    # 2 MiB of pointers and 1 MiB of pixels, which all rows share.
    assert printed.startswith("rollout: tensors 1 MiB, arrays 3") and printed.endswith("MiB\n")
