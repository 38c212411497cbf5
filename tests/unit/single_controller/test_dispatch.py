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
    ClassWithInitArgs,
    Dispatch,
    Execute,
    LocalWorkerGroup,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from quadriga.single_controller.dispatch import (
    GroupLayout,
    MeshLayout,
    collect_outputs,
    rank_arguments,
)


@pytest.fixture
def own_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes registered in a test are gone after it."""
    monkeypatch.setattr(Dispatch, "members", dict(Dispatch.members))


def rows(count: int, auto_padding: bool = False) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(count)}, meta_info={"step": 1}, auto_padding=auto_padding
    )


def numbers(data: DataProto) -> list[int]:
    return data.batch["x"].tolist()


def dispatch(mode, size: int, *args, **kwargs):
    return mode.dispatch_fn(GroupLayout(size), *args, **kwargs)


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
    assert (
        Dispatch.ONE_TO_ALL
        is Dispatch["ONE_TO_ALL"]
        is pickle.loads(pickle.dumps(Dispatch.ONE_TO_ALL))
    )
    assert (
        repr(Dispatch.RANK_ZERO) == "Dispatch.RANK_ZERO"
        and len(Dispatch) == 7
        and "ONE_TO_ALL" not in Dispatch
    )
    with pytest.raises(AttributeError, match="no dispatch mode 'NOPE'; there are RANK_ZERO"):
        _ = Dispatch.NOPE


def test_a_mode_of_ones_own(own_modes: None) -> None:
    mode = register_dispatch_mode("EVEN_ROWS")
    assert mode is Dispatch.EVEN_ROWS and mode in Dispatch
    with pytest.raises(WorkerError, match=r"without functions.*update_dispatch_mode"):
        rank_arguments(mode, GroupLayout(2), [rows(5)], {})
    update_dispatch_mode(
        mode,
        lambda group, data: ([[data[::2]] * group.world_size], {}),
        lambda group, outputs: sum(outputs),
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
    assert (
        all(entry is value for entry in first) and len(first) == 3 and named == {"key": [1, 1, 1]}
    )


@pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE])
def test_lists_per_rank(mode: Dispatch) -> None:
    assert dispatch(mode, 2, [1, 2], key=(3, 4)) == ([[1, 2]], {"key": (3, 4)})
    for value in ([1, 2, 3], 5, "ab"):
        with pytest.raises(WorkerError, match=r"argument key: got .*, expected a list of 2"):
            dispatch(mode, 2, key=value)


@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC])
@pytest.mark.parametrize(
    ("count", "expected"),
    [(7, [[0, 1], [2, 3], [4, 5], [6]]), (3, [[0], [1], [2], []]), (0, [[], [], [], []])],
)
def test_rows_are_split_raggedly(mode: Dispatch, count: int, expected: list[list[int]]) -> None:
    (chunks, plain), named = dispatch(
        mode, 4, rows(count), None, other=rows(count), temperature=0.5
    )
    assert (
        [numbers(chunk) for chunk in chunks]
        == expected
        == [numbers(chunk) for chunk in named["other"]]
    )
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
    layout = GroupLayout(4, {"actor": MeshLayout(dp_ranks=(1, 1, 0, 0), collected=(3, 0))})
    functions = make_nd_compute_dataproto_dispatch_fn("actor")
    (chunks,), _ = functions.dispatch_fn(layout, rows(5))
    assert [numbers(chunk) for chunk in chunks] == [[3, 4], [3, 4], [0, 1, 2], [0, 1, 2]]
    assert numbers(functions.collect_fn(layout, [chunks[0], None, None, chunks[3]])) == [
        0,
        1,
        2,
        3,
        4,
    ]
    padded, (added, _) = rank_arguments(functions, layout, [rows(5, auto_padding=True)], {})
    assert [len(args[0]) for args, _ in padded] == [3] * 4 and added == 1


def test_rows_are_collected_in_order() -> None:
    collect = Dispatch.DP_COMPUTE_PROTO.collect_fn
    assert numbers(collect(GroupLayout(4), rows(7).chunk(4))) == list(range(7))
    assert collect(GroupLayout(2), [None, None]) is None
    with pytest.raises(WorkerError, match=r"output 1 of 2: got NoneType"):
        collect(GroupLayout(2), [rows(1), None])


def test_padding_is_added_when_asked_for_and_leaves_the_callers_data_alone() -> None:
    asked, other = rows(3, auto_padding=True), rows(3)
    per_rank, padding = rank_arguments(
        Dispatch.DP_COMPUTE_PROTO, GroupLayout(4), [asked, 1.0], {"other": other}
    )
    assert [numbers(args[0]) for args, _ in per_rank] == [[0], [1], [2], [0]]
    assert [numbers(kwargs["other"]) for _, kwargs in per_rank] == [[0], [1], [2], [0]]
    assert all(args[1] == 1.0 for args, _ in per_rank)
    assert padding == (1, 4) and (len(asked), len(other)) == (3, 3)
    for mode, data in ((Dispatch.DP_COMPUTE_PROTO, rows(3)), (Dispatch.DP_COMPUTE_METRIC, asked)):
        assert rank_arguments(mode, GroupLayout(4), [data], {})[1] == (0, 0)


def test_padding_is_cut_off_the_result() -> None:
    def cut(result: object) -> object:
        return collect_outputs(
            [result],
            collect_fn=lambda group, outputs: outputs[0],
            layout=GroupLayout(1),
            padding=(1, 4),
            where="call",
        )

    assert numbers(cut(rows(4))) == [0, 1, 2]
    assert numbers(cut(rows(8))) == [0, 1, 2, 3, 4, 5], "two outputs for each row"
    facts = DataProto(meta_info={"metrics": {}})
    assert cut(facts) is facts and cut([1, 2]) == [1, 2]
    with pytest.raises(WorkerError, match=r"call: .*6 rows from 4"):
        cut(rows(6))


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


FUTURE = DataProtoFuture.concat(
    [None], resolve=lambda handles: [DataProto.from_dict({"x": torch.ones(1)})]
)


def test_what_is_recorded() -> None:
    registered = LocalWorkerGroup(ClassWithInitArgs(Reader)).methods
    forward = registered["forward"]
    assert (
        forward.dispatch_mode is Dispatch.ONE_TO_ALL
        and not forward.blocking
        and not forward.is_rank_zero_only
    )
    assert registered["read_async"].is_rank_zero_only
    assert {"read", "forward", "read_async"} <= set(registered) and "plain" not in registered
    inherited = LocalWorkerGroup(ClassWithInitArgs(Heir)).methods
    assert "read" in inherited and "forward" not in inherited


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
