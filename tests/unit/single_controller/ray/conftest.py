# SPDX-License-Identifier: Apache-2.0
"""The transport between a driver and its workers, without Ray: a store of copies, and pickling as Ray does it."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ray")

from quadriga.protocol import DataProto, deep_equal
from quadriga.protocol.memory import bytes_of
from quadriga.single_controller.ray.transport import (
    Message,
    Outbox,
    pack_result,
    unpack,
    unpack_result,
)


class Shelf(Outbox):
    """An outbox whose store is here: keeps copies of the bytes, read-only, and counts what is put."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: list[list[bytes]] = []
        self.name = "first"

    def put(self, arrays: list[np.ndarray]) -> int:
        self.objects.append([array.tobytes() for array in arrays])
        return len(self.objects) - 1

    def session(self) -> str:
        return self.name

    def get(self, ref: int) -> list[np.ndarray]:
        return [np.frombuffer(content, dtype=np.uint8) for content in self.objects[ref]]

    def puts(self) -> int:
        return len(self.objects)

    def nbytes(self) -> int:
        return sum(len(content) for arrays in self.objects for content in arrays)


def through_ray(value: Any) -> Any:
    """Pickled as Ray does it: buffers apart, and read-only when they arrive."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=[bytes(buffer) for buffer in buffers])


class Post:
    """An outbox, its store, and the workers at the other end."""

    def __init__(self) -> None:
        self.outbox = self.shelf = Shelf()

    def received(self, message: Message) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a worker gets."""
        return unpack(through_ray(message.body), [self.shelf.get(ref) for ref in message.refs])

    def there(self, parts: Sequence[DataProto]) -> list[DataProto]:
        """The parts, one to a rank, as the ranks get them."""
        return [
            self.received(message)[0][0]
            for message in self.outbox.pack([((part,), {}) for part in parts])
        ]

    @staticmethod
    def back(output: Any, borrow: bool = False) -> Any:
        """A worker's output, as the driver gets it."""
        return unpack_result(through_ray(pack_result(output)), borrow)

    def check(self, parts: Sequence[DataProto]) -> None:
        """Send the parts, and raise unless they arrive as they are."""
        for arrived, sent in zip(self.there(parts), parts, strict=True):
            check_same(arrived, sent)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def check_same(left: DataProto, right: DataProto) -> None:
    """Raise unless two batches are the same to the bit."""
    assert len(left) == len(right)
    assert deep_equal(left.non_tensor_batch, right.non_tensor_batch) and deep_equal(
        left.meta_info, right.meta_info
    )
    assert (left.batch is None) == (right.batch is None)
    if left.batch is not None:
        assert list(left.batch.keys(True)) == list(right.batch.keys(True))
        for key in left.batch.keys(True, True):
            one, other = left.batch[key], right.batch[key]
            assert one.dtype == other.dtype and one.shape == other.shape, key
            assert bytes_of(one.contiguous()).tobytes() == bytes_of(plain(other)).tobytes(), key


@pytest.fixture(scope="session")
def make_post() -> Callable[[], Post]:
    """A new outbox with an empty store."""
    return Post


@pytest.fixture
def post() -> Post:
    """An outbox with an empty store."""
    return Post()


@pytest.fixture(scope="session")
def same() -> Callable[[DataProto, DataProto], None]:
    """Raises unless two batches are the same to the bit."""
    return check_same
