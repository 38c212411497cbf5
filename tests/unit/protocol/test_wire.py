# SPDX-License-Identifier: Apache-2.0
"""The wire format: what travels, as what, and where its bytes lie."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from quadriga.protocol import DataProto, deep_equal, object_array

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int32,
    torch.int64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def out_of_band(data: DataProto, read_only: bool = False) -> DataProto:
    """Through a transport that takes buffers, as Ray does."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    received = [bytes(buffer) if read_only else bytearray(buffer) for buffer in buffers]
    return pickle.loads(stream, buffers=received)


def in_band(data: DataProto) -> DataProto:
    return pickle.loads(pickle.dumps(data))


def old_protocol(data: DataProto) -> DataProto:
    return pickle.loads(pickle.dumps(data, protocol=4))


WAYS = [out_of_band, lambda data: out_of_band(data, read_only=True), in_band, old_protocol]


@pytest.mark.parametrize("travel", WAYS, ids=["out-of-band", "read-only", "in-band", "protocol 4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_every_way(dtype: torch.dtype, travel) -> None:
    source = torch.tensor([[0.0, 1.0, 2.0], [3.0, -0.0, 5.0]]).to(dtype)
    column = travel(DataProto.from_dict({"x": source})).batch["x"]
    assert column.dtype == dtype and column.shape == (2, 3)
    assert torch.equal(column.view(torch.uint8), source.view(torch.uint8))
    column[0, 0] = column[1, 2]
    assert source[0, 0] == 0, "the copy is writable and its own"


@pytest.mark.parametrize("travel", WAYS)
def test_awkward_tensors(travel) -> None:
    base = torch.arange(24.0).view(4, 6)
    data = DataProto.from_dict(
        {
            "transposed": base.t()[:4],
            "strided": base[:, ::2],
            "expanded": torch.ones(1, 3).expand(4, 3),
            "narrow": torch.empty(4, 0),
            "gradient": torch.ones(4, requires_grad=True) * 2,
            "conjugate": torch.tensor([1 + 2j] * 4).conj(),
        }
    )
    arrived = travel(data)
    for key, value in data.batch.items():
        assert torch.equal(arrived.batch[key], value) and not arrived.batch[key].requires_grad, key


@pytest.mark.parametrize("travel", WAYS)
def test_objects_facts_and_no_rows(travel) -> None:
    image = Image.new("RGB", (3, 2), 9)
    nested = {
        "pixels": torch.ones(2, 2, dtype=torch.bfloat16),
        "grid": [torch.tensor(1), (torch.tensor(2), "x")],
    }
    data = DataProto.from_dict(
        {"x": torch.zeros(2)},
        {
            "info": [{"image": image, "deep": nested}, None],
            "ids": [[1, 2], []],
            "rate": np.array([0.5, np.nan]),
        },
        {"metrics": {"loss": torch.tensor(1.0)}, "text": "é"},
    )
    arrived = travel(data)
    assert deep_equal(arrived.non_tensor_batch, data.non_tensor_batch) and deep_equal(
        arrived.meta_info, data.meta_info
    )
    arrived.non_tensor_batch["rate"][0] = 1.0
    assert len(travel(data[:0])) == 0 and travel(data[:0]).batch["x"].dtype == torch.float32
    assert travel(DataProto(meta_info={"a": 1})).meta_info == {"a": 1}


def test_nested_columns_travel() -> None:
    nested = TensorDict({"p": torch.arange(6).view(3, 2)}, batch_size=[3])
    arrived = out_of_band(DataProto(batch=TensorDict({"image": nested}, batch_size=[3])))
    assert arrived.batch["image", "p"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_buffers_are_the_tensors_own_memory() -> None:
    """No byte string is built on the way: the buffers are views of the columns, also of a chunk's rows."""
    data = DataProto.from_dict(
        {"x": torch.arange(1000), "y": torch.ones(1000, dtype=torch.bfloat16)}
    )
    half = data.chunk(2)[1]
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(half, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1000 and sorted(buffer.raw().nbytes for buffer in buffers) == [1000, 4000]
    data.batch["x"][500] = -1
    arrived = pickle.loads(stream, buffers=buffers)
    assert arrived.batch["x"][0] == -1
    arrived.batch["x"][1] = -2
    assert data.batch["x"][501] == -2, "loading makes no copy either"


def test_repeated_objects_stay_one_object() -> None:
    """Rows that were repeated share their images; on the wire they are sent once."""
    row = {"pixels": torch.ones(1000)}
    data = DataProto.from_dict(
        non_tensors={"image": object_array([row, row, {"pixels": torch.zeros(2)}])}
    )
    arrived = pickle.loads(pickle.dumps(data))
    column = arrived.non_tensor_batch["image"]
    assert (
        column[0] is column[1]
        and column[0] is not column[2]
        and torch.equal(column[1]["pixels"], torch.ones(1000))
    )
    assert len(pickle.dumps(data)) < 2 * 4000


def test_cycles_travel() -> None:
    loop: dict = {"x": torch.ones(2)}
    loop["self"] = loop
    arrived = in_band(
        DataProto.from_dict(non_tensors={"loop": object_array([loop])})
    ).non_tensor_batch["loop"][0]
    assert arrived["self"] is arrived and torch.equal(arrived["x"], torch.ones(2))


def test_torch_save_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch.save was called")

    monkeypatch.setattr(torch, "save", refuse)
    in_band(
        DataProto.from_dict(
            {"x": torch.ones(2)},
            {"o": [{"t": torch.ones(1)}, [torch.ones(2)]]},
            {"m": torch.ones(1)},
        )
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="no accelerator here: nothing to bring to the CPU"
)
def test_tensors_of_an_accelerator_arrive_on_the_cpu() -> None:
    data = DataProto.from_dict({"x": torch.arange(3)}).to(torch.accelerator.current_accelerator())
    assert (
        in_band(data).batch["x"].tolist() == [0, 1, 2]
        and in_band(data).batch["x"].device.type == "cpu"
    )
