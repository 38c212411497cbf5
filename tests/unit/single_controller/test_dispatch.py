# SPDX-License-Identifier: Apache-2.0
"""Dispatch modes: how arguments are split and outputs joined; what `@register` records and refuses."""

import asyncio
import inspect
import pickle

import pytest
import torch

from quadriga.errors import WorkerError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.single_controller import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from quadriga.single_controller import dispatch as module
from quadriga.single_controller.dispatch import (
    MeshLayout,
    dispatch_functions,
    pad_arguments,
    registered_methods,
    remove_padding,
)
from quadriga.single_controller.worker_group import LayoutSnapshot


@pytest.fixture
def own_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes registered in a test are gone after it."""
    monkeypatch.setattr(Dispatch, "members", dict(Dispatch.members))
    monkeypatch.setattr(module, "_functions", dict(module._functions))


def rows(count: int, auto_padding: bool = False) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(count)}, meta_info={"step": 1}, auto_padding=auto_padding)


def numbers(data: DataProto) -> list[int]:
    return data.batch["x"].tolist()


def dispatch(mode, size: int, *args, **kwargs):
    return dispatch_functions(mode).dispatch_fn(LayoutSnapshot(size), *args, **kwargs)


def test_the_enumeration() -> None:
    assert [mode.name for mode in Dispatch] == [
        "RANK_ZERO",
        "ONE_TO_ALL",
        "ALL_TO_ALL",
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
    ]
    assert Dispatch.ONE_TO_ALL is Dispatch["ONE_TO_ALL"] is pickle.loads(pickle.dumps(Dispatch.ONE_TO_ALL))
    assert repr(Dispatch.RANK_ZERO) == "Dispatch.RANK_ZERO" and len(Dispatch) == 7 and "ONE_TO_ALL" not in Dispatch
    with pytest.raises(AttributeError, match="no dispatch mode 'NOPE'; there are RANK_ZERO"):
        _ = Dispatch.NOPE


def test_a_mode_of_ones_own(own_modes: None) -> None:
    mode = register_dispatch_mode("EVEN_ROWS")
    assert mode is Dispatch.EVEN_ROWS and mode in Dispatch
    with pytest.raises(WorkerError, match=r"without functions.*update_dispatch_mode"):
        dispatch_functions(mode)
    update_dispatch_mode(
        mode, lambda group, data: ([[data[::2]] * group.world_size], {}), lambda group, outputs: sum(outputs)
    )
    (values,), named = dispatch(mode, 2, rows(5))
    assert [numbers(value) for value in values] == [[0, 2, 4]] * 2 and named == {}
    for name in ("EVEN_ROWS", "ONE_TO_ALL", "no name"):
        with pytest.raises(WorkerError, match="register_dispatch_mode"):
            register_dispatch_mode(name)


def test_a_mode_that_is_not_registered_takes_no_functions() -> None:
    with pytest.raises(WorkerError, match="expected one of"):
        update_dispatch_mode(Dispatch("STRAY"), None, None)


def test_one_to_all_sends_the_same_object() -> None:
    value = object()
    (first,), named = dispatch(Dispatch.ONE_TO_ALL, 3, value, key=1)
    assert all(entry is value for entry in first) and len(first) == 3 and named == {"key": [1, 1, 1]}


@pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE])
def test_lists_per_rank(mode: Dispatch) -> None:
    assert dispatch(mode, 2, [1, 2], key=(3, 4)) == ([[1, 2]], {"key": (3, 4)})
    for value in ([1, 2, 3], 5, "ab"):
        with pytest.raises(WorkerError, match=r"argument key: got .*, expected a list of 2"):
            dispatch(mode, 2, key=value)


@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC])
@pytest.mark.parametrize(
    ("count", "expected"), [(7, [[0, 1], [2, 3], [4, 5], [6]]), (3, [[0], [1], [2], []]), (0, [[], [], [], []])]
)
def test_rows_are_split_raggedly(mode: Dispatch, count: int, expected: list[list[int]]) -> None:
    (chunks, plain), named = dispatch(mode, 4, rows(count), None, other=rows(count), temperature=0.5)
    assert [numbers(chunk) for chunk in chunks] == expected == [numbers(chunk) for chunk in named["other"]]
    assert plain == [None] * 4 and named["temperature"] == [0.5] * 4
    assert all(chunk.meta_info == {"step": 1} for chunk in chunks)


def test_facts_alone_go_to_every_rank() -> None:
    (chunks,), _ = dispatch(Dispatch.DP_COMPUTE_PROTO, 2, DataProto(meta_info={"step": 3}))
    assert [chunk.meta_info for chunk in chunks] == [{"step": 3}] * 2


def test_a_future_is_split_into_futures() -> None:
    future = DataProtoFuture.concat([None], resolve=lambda handles: [rows(3)])
    (chunks,), _ = dispatch(Dispatch.DP_COMPUTE_PROTO, 2, future)
    assert [numbers(chunk.get()) for chunk in chunks] == [[0, 1], [2]]


def test_what_cannot_be_split() -> None:
    with pytest.raises(WorkerError, match=r"got Tensor.*meta_info"):
        dispatch(Dispatch.DP_COMPUTE_PROTO, 2, torch.ones(4))
    with pytest.raises(WorkerError, match=r"'0': 4, 'other': 3"):
        dispatch(Dispatch.DP_COMPUTE_PROTO, 2, rows(4), other=rows(3))


def test_the_function_goes_to_every_rank() -> None:
    (functions, chunks), _ = dispatch(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, 2, numbers, rows(3))
    assert functions == [numbers] * 2 and [numbers(chunk) for chunk in chunks] == [[0, 1], [2]]
    with pytest.raises(WorkerError, match="expected a function"):
        dispatch(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, 2, rows(3))


def test_mesh_ranks_of_one_group_share_a_chunk() -> None:
    """Four ranks, two data-parallel groups of two, numbered so that rank order is not chunk order."""
    mesh = MeshLayout(dp_ranks=(1, 1, 0, 0), is_collect=(True, False, False, True))
    layout = LayoutSnapshot(4, {"actor": mesh})
    functions = make_nd_compute_dataproto_dispatch_fn("actor")
    (chunks,), _ = functions.dispatch_fn(layout, rows(5))
    assert [numbers(chunk) for chunk in chunks] == [[3, 4], [3, 4], [0, 1, 2], [0, 1, 2]]
    assert numbers(functions.collect_fn(layout, [chunks[0], None, None, chunks[3]])) == [0, 1, 2, 3, 4]
    assert functions.num_chunks(layout) == 2


def test_rows_are_collected_in_order() -> None:
    collect = dispatch_functions(Dispatch.DP_COMPUTE_PROTO).collect_fn
    assert numbers(collect(LayoutSnapshot(4), rows(7).chunk(4))) == list(range(7))
    assert collect(LayoutSnapshot(2), [None, None]) is None
    with pytest.raises(WorkerError, match=r"output 1 of 2: got NoneType"):
        collect(LayoutSnapshot(2), [rows(1), None])


def test_padding_is_added_when_asked_for_and_leaves_the_callers_data_alone() -> None:
    asked, other = rows(3, auto_padding=True), rows(3)
    args, kwargs, pad_size, padded_rows = pad_arguments(4, [asked, 1.0], {"other": other})
    assert numbers(args[0]) == [0, 1, 2, 0] == numbers(kwargs["other"]) and args[1] == 1.0
    assert (pad_size, padded_rows, len(asked), len(other)) == (1, 4, 3, 3)
    assert pad_arguments(4, [rows(3)], {})[2:] == (0, 0)


def test_padding_is_cut_off_the_result() -> None:
    assert numbers(remove_padding(rows(4), 1, 4)) == [0, 1, 2]
    assert numbers(remove_padding(rows(8), 1, 4)) == [0, 1, 2, 3, 4, 5], "two answers to each row"
    facts = DataProto(meta_info={"metrics": {}})
    assert remove_padding(facts, 1, 4) is facts and remove_padding([1, 2], 1, 4) == [1, 2]
    with pytest.raises(WorkerError, match="6 rows from 4"):
        remove_padding(rows(6), 1, 4)


class Reader(Worker):
    """Methods that tell what they were given."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self, data: DataProto, *, more: DataProto | None = None) -> list[type]:
        """Types of the arguments."""
        return [type(data), type(more)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False, blocking=False)
    def forward(self, data: DataProto) -> type:
        """Type of the argument."""
        return type(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def read_async(self, data: DataProto) -> type:
        """Type of the argument."""
        return type(data)

    def plain(self) -> None:
        """Not registered."""


class Heir(Reader):
    """Inherits what is registered; an override has to say so again."""

    def forward(self, data: DataProto) -> type:
        """Overridden without a registration."""
        return type(data)


FUTURE = DataProtoFuture.concat([None], resolve=lambda handles: [DataProto.from_dict({"x": torch.ones(1)})])


def test_what_is_recorded() -> None:
    registered = registered_methods(Reader)
    forward = registered["forward"]
    assert forward.dispatch_mode is Dispatch.ONE_TO_ALL and not forward.blocking and not forward.is_rank_zero_only
    assert registered["read_async"].is_rank_zero_only
    assert {"read", "forward", "read_async"} <= set(registered) and "plain" not in registered
    assert "read" in registered_methods(Heir) and "forward" not in registered_methods(Heir)


def test_futures_are_resolved_in_the_worker() -> None:
    worker = Reader()
    assert worker.read(FUTURE, more=FUTURE) == [DataProto, DataProto]
    assert worker.forward(FUTURE) is DataProtoFuture
    assert asyncio.run(worker.read_async(FUTURE)) is DataProto


def test_the_method_keeps_its_face() -> None:
    assert Reader.read.__name__ == "read" and Reader.read.__doc__ == "Types of the arguments."
    assert list(inspect.signature(Reader.read).parameters) == ["self", "data", "more"]


def test_the_default_takes_one_entry_per_rank() -> None:
    @register()
    def method(self: Worker) -> None: ...

    registration = method._quadriga_registration
    assert registration.dispatch_mode is Dispatch.ALL_TO_ALL and not registration.is_rank_zero_only
    assert registration.blocking


def test_mistakes_are_met_where_the_class_is_written() -> None:
    for arguments in (
        {"dispatch_mode": "ONE_TO_ALL"},
        {"dispatch_mode": {"dispatch_fn": len}},
        {"execute_mode": "ALL"},
    ):
        with pytest.raises(WorkerError, match="@register"):
            register(**arguments)
