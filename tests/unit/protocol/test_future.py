# SPDX-License-Identifier: Apache-2.0
"""DataProtoFuture: nothing is waited for before `get`."""

import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.protocol.operations import Resolve, get_all, resolve_results


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
    assert [part.get().batch["x"].tolist() for part in future.chunk(2)[0].chunk(3)] == [
        [0],
        [0],
        [1],
    ]


def test_an_error_is_raised_by_get() -> None:
    handle: Future = Future()
    handle.set_exception(ValueError("the worker failed"))
    with pytest.raises(ValueError, match="the worker failed"):
        DataProtoFuture.concat([handle]).get()


def test_a_future_travels_to_the_process_that_resolves_it() -> None:
    part = DataProtoFuture.concat([4, 5], resolve=read_shelf).chunk(2)[1]
    # Without handles and resolver, which belong to a backend; a test's module cannot be imported by name.
    restored = pickle.loads(pickle.dumps(replace(part, futures=[], resolve=resolve_results)))
    assert replace(restored, futures=[1, 2], resolve=read_shelf).get().batch["x"].tolist() == [2, 2]
    assert part.get().batch["x"].tolist() == [5, 5]


def test_some_rows_are_taken_before_anything_is_joined() -> None:
    """What a rank gets of a future is what it would get of the whole, facts included, and no other row is copied."""
    sizes = [3, 0, 4, 1]
    outputs = [
        DataProto.from_dict(
            {"x": torch.arange(size) + 10 * number}, meta_info={"metrics": {"n": number}, "a": 1}
        )
        for number, size in enumerate(sizes)
    ]

    def refuse(parts: list[DataProto]) -> DataProto:
        raise AssertionError("the whole was joined")

    future = DataProtoFuture.concat([None], resolve=lambda handles: outputs)
    choosy = DataProtoFuture(refuse, [None], resolve=lambda handles: outputs, rows_of=range(4))
    for chunks in (1, 2, 3, 5, 11):
        for number, part in enumerate(choosy.chunk(chunks)):
            expected = future.get().chunk(chunks)[number]
            got = part.get()
            assert (
                got.batch["x"].tolist() == expected.batch["x"].tolist()
                and got.meta_info == expected.meta_info
            )
            inner = [piece.get().batch["x"].tolist() for piece in part.chunk(2)]
            assert inner == [piece.batch["x"].tolist() for piece in expected.chunk(2)]


def test_rows_of_other_outputs_are_left_to_collect() -> None:
    """A function in front of the chunk, or outputs that are no rows, say nothing of which rows are wanted."""
    double = DataProtoFuture(
        DataProto.concat, [0, 1], lambda data: data.repeat(2), read_shelf, rows_of=range(2)
    )
    assert [part.get().batch["x"].tolist() for part in double.chunk(2)] == [
        [0, 0, 0, 0],
        [1, 1, 1, 1],
    ]
    none = DataProtoFuture(
        lambda outputs: rows(7, 8), [0], resolve=lambda handles: [None], rows_of=range(1)
    )
    assert none.chunk(2)[1].get().batch["x"].tolist() == [8]


def test_several_are_waited_for_at_once() -> None:
    """In one call of their backend, which so sees whichever fails first; lent rows are asked for if all copy theirs."""
    calls: list[tuple[str, list[int]]] = []

    def backend(name: str) -> Resolve:
        def resolve(handles: Sequence[int]) -> list[DataProto]:
            calls.append((name, list(handles)))
            return read_shelf(handles)

        return resolve

    lent = [DataProtoFuture.concat(handles, resolve=backend("lends")) for handles in ([1, 2], [3])]
    assert [one.batch["x"].tolist() for one in get_all(lent)] == [[1, 1, 2, 2], [3, 3]]
    whole = DataProtoFuture(list, [4], resolve=backend("gives"))
    assert [len(one) for one in get_all([*lent, whole])] == [4, 2, 1]
    assert calls == [("lends", [1, 2, 3]), ("gives", [1, 2, 3, 4])]
    assert get_all([]) == []
