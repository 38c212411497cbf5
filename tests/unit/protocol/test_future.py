# SPDX-License-Identifier: Apache-2.0
"""DataProtoFuture: nothing is waited for before `get`."""

import pickle
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch

from quadriga.protocol import DataProto, DataProtoFuture


def rows(*numbers: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(numbers)})


def read_shelf(handles: Sequence[int]) -> list[DataProto]:
    """A backend of its own: handles are numbers."""
    return [rows(handle, handle) for handle in handles]


def test_get_waits_and_concatenates() -> None:
    handles: list[Future] = [Future(), Future()]
    future = DataProtoFuture.concat(handles)
    chunks = future.chunk(2)
    assert not any(handle.done() for handle in handles), "made and split before any output is there"
    handles[1].set_result(rows(3))
    handles[0].set_result(rows(1, 2))
    assert future.get().batch["x"].tolist() == [1, 2, 3]
    assert [chunk.get().batch["x"].tolist() for chunk in chunks] == [[1, 2], [3]]


def test_chunk_of_a_chunk() -> None:
    future = DataProtoFuture.concat([0, 1, 2], resolve=read_shelf)
    assert [part.get().batch["x"].tolist() for part in future.chunk(2)[0].chunk(3)] == [[0], [0], [1]]


def test_an_error_is_raised_by_get() -> None:
    handle: Future = Future()
    handle.set_exception(ValueError("the worker failed"))
    with pytest.raises(ValueError, match="the worker failed"):
        DataProtoFuture.concat([handle]).get()


def test_a_future_travels_to_the_process_that_resolves_it() -> None:
    part = DataProtoFuture.concat([4, 5], resolve=read_shelf).chunk(2)[1]
    # Without handles and resolver, which belong to a backend; a test's module cannot be imported by name.
    restored = pickle.loads(pickle.dumps(DataProtoFuture(part.collect_fn, [], part.dispatch_fn)))
    assert restored.dispatch_fn(rows(1, 2, 3)).batch["x"].tolist() == [3]
    assert part.get().batch["x"].tolist() == [5, 5]
