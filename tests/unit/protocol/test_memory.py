# SPDX-License-Identifier: Apache-2.0
"""Memory: its bytes, and what is lent."""

import gc

import numpy as np
import pytest
import torch

from quadriga.protocol import DataProto
from quadriga.protocol.memory import (
    HUGE_PAGES_FROM_BYTES,
    allocate,
    bytes_of,
    is_lent,
    lend,
    tensor_over,
)


def read_only(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(bytes_of(tensor).tobytes(), dtype=np.uint8)


def test_allocated_memory_is_whole_and_writable() -> None:
    for size in (0, 3, HUGE_PAGES_FROM_BYTES // 4 + 7):
        tensor = allocate((size,), torch.float32).fill_(2.0)
        assert tensor.sum() == 2.0 * size


SHAPES = {
    "plain": torch.rand(3, 4),
    "rows": torch.rand(4, 6)[1:3],
    "one row on its side": torch.rand(4, 1).t(),
    "empty": torch.rand(0, 5),
    "scalar": torch.tensor(2.0),
    "bool": torch.eye(3) > 0,
}


@pytest.mark.parametrize("tensor", SHAPES.values(), ids=SHAPES)
def test_bytes_and_back(tensor: torch.Tensor) -> None:
    memory = bytes_of(tensor)
    assert memory.nbytes == tensor.nbytes and torch.equal(
        tensor_over(memory, tensor.dtype, tensor.shape), tensor
    )
    if tensor.numel():
        memory[:] = 0
        assert not tensor.any(), "the bytes are the tensor's own"


def test_lent_memory_and_its_views() -> None:
    copied: list[str] = []
    tensor = lend(
        tensor_over(read_only(torch.ones(600, 1000)), torch.float32, (600, 1000)),
        lambda: copied.append("x"),
    )
    small = lend(tensor_over(read_only(torch.ones(600)), torch.float32, (600,)))
    assert (
        is_lent(tensor) and is_lent(tensor[3:5]) and is_lent(small) and not is_lent(tensor.clone())
    )
    parts = DataProto.from_dict({"x": tensor, "y": small}).chunk(3)
    own = DataProto.concat(parts)
    assert copied == ["x"] * 3, "the lender hears of each part"
    own.batch["x"].zero_()
    own.batch["y"].zero_()
    assert tensor.all() and small.all()
    for single in (DataProto.concat(parts[:1]), DataProto.concat([parts[1], DataProto()])):
        assert not any(map(is_lent, single.batch.values()))


def test_lending_ends_with_the_tensor() -> None:
    tensor = lend(tensor_over(read_only(torch.ones(5)), torch.float32, (5,)))
    view = tensor[1:]
    del tensor
    gc.collect()
    assert is_lent(view), "a view is lent as long as it lives"


def test_concat_allocates_once_and_keeps_gradients() -> None:
    large = torch.rand(700, 2000)
    joined = DataProto.concat(
        DataProto.from_dict({"x": large, "y": large.t()[:700]}).chunk(4)
    ).batch
    assert torch.equal(joined["x"], large) and torch.equal(joined["y"], large.t()[:700])
    assert joined["x"].untyped_storage().nbytes() == large.nbytes
    weight = torch.rand(700, 2000, requires_grad=True)
    DataProto.concat(DataProto.from_dict({"x": weight * 2}).chunk(2)).batch["x"].sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, 2.0))
