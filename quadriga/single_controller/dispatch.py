# SPDX-License-Identifier: Apache-2.0
"""How the arguments of a worker group's method reach its workers, and how their outputs come back.

A worker's method names its dispatch mode in `@register`. A mode is a pair of functions. `dispatch_fn(group, *args,
**kwargs)` gives, for each argument, the list of its values rank by rank; `collect_fn(group, outputs)` makes one result
of the outputs, which stand in rank order. `group` is a `GroupLayout`.

    mode                         a rank's share of the arguments          result
    RANK_ZERO                    all, whole; only rank 0 is called        rank 0's output
    ONE_TO_ALL                   all, whole                               list of outputs
    ALL_TO_ALL, DP_COMPUTE       entry `rank` of each (lists)             list of outputs
    DP_COMPUTE_PROTO             its chunk of the rows                    rows of all outputs
    DP_COMPUTE_PROTO_WITH_FUNC   the function, its chunk of the rest      rows of all outputs
    DP_COMPUTE_METRIC            its chunk of the rows                    list of outputs
    make_nd_compute_dataproto_dispatch_fn(mesh)
                                 the chunk of its data-parallel rank      rows of the collecting ranks' outputs

Chunks are ragged: 7 rows on 4 ranks are 2 2 2 1, 3 rows are 1 1 1 0. Every rank is called, because workers that meet in
a collective must all be there: a worker has to cope with a DataProto without rows, and may return one without columns.
Data made with `auto_padding=True` is padded to equal chunks instead, and the rows of the padding are cut off the
result; that is for methods that treat each row for itself (a loss would count the padding). DP_COMPUTE_METRIC never
pads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial, wraps
from typing import Any, ClassVar, NamedTuple, TypeVar

from quadriga.errors import WorkerError
from quadriga.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto

Method = TypeVar("Method", bound=Callable[..., Any])
Arguments = tuple[Sequence[Any], Mapping[str, Any]]
PerRank = tuple[Sequence[Sequence[Any]], Mapping[str, Sequence[Any]]]
_PLAIN = (bool, int, float, str, type(None))
REGISTRATION = "_quadriga_registration"  # the attribute of a worker's method that `register` sets


class DispatchError(WorkerError):
    """Arguments or outputs that do not fit the mode of their method."""


class MeshLayout(NamedTuple):
    """Which part of the data each rank of a mesh works on."""

    dp_ranks: tuple[
        int, ...
    ]  # data-parallel rank of each rank; ranks of one model-parallel group share theirs
    collected: tuple[int, ...]  # of each data-parallel rank, the rank whose output is collected


class GroupLayout:
    """What dispatch and collect functions may use of a group; in the mesh "" each rank has a chunk of its own."""

    def __init__(self, world_size: int, meshes: Mapping[str, MeshLayout] | None = None) -> None:
        self.world_size, ranks = world_size, tuple(range(world_size))
        self.meshes = {"": MeshLayout(ranks, ranks), **(meshes or {})}

    def mesh(self, name: str) -> MeshLayout:
        return self.meshes[name]


DispatchFn = Callable[..., PerRank]
CollectFn = Callable[[GroupLayout, list[Any]], Any]


# ---- splitting ----------------------------------------------------------------------------------


def replicate(group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """Every argument, whole, for every rank."""
    size = group.world_size
    return [[value] * size for value in args], {
        key: [value] * size for key, value in kwargs.items()
    }


def take_per_rank(group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """Arguments that are lists with one entry per rank already."""
    for name, value in (*enumerate(args), *kwargs.items()):
        if not isinstance(value, (list, tuple)) or len(value) != group.world_size:
            length = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
            where, got = f"per-rank argument {name}", f"{type(value).__name__}{length}"
            fix = "Dispatch.ONE_TO_ALL sends one value to every rank."
            raise DispatchError(
                where,
                got=got,
                expected=f"a list of {group.world_size}, one entry per rank",
                fix=fix,
            )
    return list(args), dict(kwargs)


def split_rows(mesh_name: str, group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """A chunk of the rows of every DataProto for each data-parallel rank of a mesh; its ranks get the same one."""
    dp_ranks = group.mesh(mesh_name).dp_ranks
    chunks = max(dp_ranks) + 1
    parts: dict[str, list[Any]] = {}
    rows: dict[str, int] = {}
    for name, value in (*zip(map(str, range(len(args))), args, strict=True), *kwargs.items()):
        if isinstance(value, (DataProto, DataProtoFuture)):
            parts[name] = value.chunk(chunks)
        elif isinstance(value, _PLAIN):
            parts[name] = [value] * chunks
        else:
            expected = "a DataProto, the future of one, or a plain number, string or None, which every rank gets"
            fix = "What holds for all rows belongs into meta_info."
            raise DispatchError(
                f"argument {name}", got=type(value).__name__, expected=expected, fix=fix
            )
        # What has facts alone has no rows to differ.
        if isinstance(value, DataProto) and (value.batch is not None or value.non_tensor_batch):
            rows[name] = len(value)
    if len(set(rows.values())) > 1:
        raise DispatchError(
            "arguments to split", got=f"{rows} rows", expected="the same number in each DataProto"
        )
    per_rank = [[values[dp_rank] for dp_rank in dp_ranks] for values in parts.values()]
    return per_rank[: len(args)], dict(zip(kwargs, per_rank[len(args) :], strict=True))


def split_rows_with_function(
    group: GroupLayout, function: Any = None, /, *args: Any, **kwargs: Any
) -> PerRank:
    """The function, whole, and the ranks' chunks of the other arguments."""
    if not callable(function):
        raise DispatchError("first argument", got=type(function).__name__, expected="a function")
    chunks, named_chunks = split_rows("", group, *args, **kwargs)
    return [[function] * group.world_size, *chunks], named_chunks


# ---- collecting ---------------------------------------------------------------------------------


def collect_list(group: GroupLayout, outputs: list[Any]) -> list[Any]:
    """The outputs as they are."""
    return outputs


def collect_rows(mesh_name: str, group: GroupLayout, outputs: list[Any]) -> DataProto | None:
    """The rows of the collected ranks of a mesh, in the order of their chunks; None if the method returns nothing."""
    outputs = [outputs[rank] for rank in group.mesh(mesh_name).collected]
    if all(output is None for output in outputs):
        return None
    for rank, output in enumerate(outputs):
        if not isinstance(output, DataProto):
            got, expected = (
                type(output).__name__,
                "a DataProto from each rank that is collected, or None from all",
            )
            fix = "Dispatch.DP_COMPUTE_METRIC collects outputs of any type in a list."
            raise DispatchError(
                f"output {rank} of {len(outputs)}", got=got, expected=expected, fix=fix
            )
    return DataProto.concat(outputs)


# ---- modes --------------------------------------------------------------------------------------


class _Members(type):
    """Makes the class iterable over its members, as an enumeration is, while members may be added."""

    members: ClassVar[dict[str, "Dispatch"]]

    def __iter__(cls) -> Iterator["Dispatch"]:
        return iter(tuple(cls.members.values()))

    def __len__(cls) -> int:
        return len(cls.members)

    def __getitem__(cls, name: str) -> "Dispatch":
        return cls.members[name]

    def __getattr__(cls, name: str) -> "Dispatch":
        members = type.__getattribute__(cls, "members")
        if name not in members:
            raise AttributeError(
                f"there is no dispatch mode {name!r}; there are {', '.join(members)}"
            )
        return members[name]


class Dispatch(metaclass=_Members):
    """The dispatch modes: an enumeration to which `register_dispatch_mode` adds members.

    `mesh`: of modes that split rows over the data-parallel ranks of a mesh and join those of the collected outputs with
    `DataProto.concat`: its name, "" for all ranks. Auto padding is honoured then, and a backend may lend outputs as
    views of shared memory. None: the mode does something else.
    """

    members: ClassVar[dict[str, "Dispatch"]] = {}
    RANK_ZERO: ClassVar["Dispatch"]
    ONE_TO_ALL: ClassVar["Dispatch"]
    ALL_TO_ALL: ClassVar["Dispatch"]
    DP_COMPUTE: ClassVar["Dispatch"]
    DP_COMPUTE_PROTO: ClassVar["Dispatch"]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar["Dispatch"]
    DP_COMPUTE_METRIC: ClassVar["Dispatch"]

    def __init__(
        self,
        name: str,
        dispatch_fn: DispatchFn | None = None,
        collect_fn: CollectFn = collect_list,
        mesh: str | None = None,
    ) -> None:
        self.name, self.dispatch_fn, self.collect_fn, self.mesh = (
            name,
            dispatch_fn,
            collect_fn,
            mesh,
        )

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}" if self.name else "a dispatch function of its own"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name:
            return type(Dispatch).__getitem__, (Dispatch, self.name)
        return Dispatch, ("", self.dispatch_fn, self.collect_fn, self.mesh)


def register_dispatch_mode(name: str) -> Dispatch:
    """Add the mode `Dispatch.<name>`; `update_dispatch_mode` gives it its functions."""
    if not name.isidentifier() or name in Dispatch.members:
        got = "a name in use" if name in Dispatch.members else "no Python name"
        expected = f"an identifier other than {', '.join(Dispatch.members)}"
        raise WorkerError(f"register_dispatch_mode({name!r})", got=got, expected=expected)
    Dispatch.members[name] = mode = Dispatch(name)
    return mode


def update_dispatch_mode(
    mode: Dispatch, dispatch_fn: DispatchFn, collect_fn: CollectFn, mesh: str | None = None
) -> None:
    """Set the functions of a mode: one splits the arguments, the other joins the outputs; `mesh` as in `Dispatch`."""
    if mode not in Dispatch:
        raise WorkerError(
            "update_dispatch_mode", got=repr(mode), expected=f"one of {list(Dispatch)}"
        )
    mode.dispatch_fn, mode.collect_fn, mode.mesh = dispatch_fn, collect_fn, mesh


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Dispatch:
    """The mode for data-parallel ranks that every worker names by `register_mesh(mesh_name, ...)`."""
    return Dispatch("", partial(split_rows, mesh_name), partial(collect_rows, mesh_name), mesh_name)


Dispatch.members |= {
    mode.name: mode
    for mode in (
        Dispatch("RANK_ZERO", replicate, collect_list),
        Dispatch("ONE_TO_ALL", replicate, collect_list),
        Dispatch("ALL_TO_ALL", take_per_rank, collect_list),
        Dispatch("DP_COMPUTE", take_per_rank, collect_list),
        Dispatch("DP_COMPUTE_PROTO", partial(split_rows, ""), partial(collect_rows, ""), ""),
        Dispatch(
            "DP_COMPUTE_PROTO_WITH_FUNC", split_rows_with_function, partial(collect_rows, ""), ""
        ),
        Dispatch("DP_COMPUTE_METRIC", partial(split_rows, ""), collect_list),
    )
}


# ---- a call -------------------------------------------------------------------------------------


def rank_arguments(
    mode: Dispatch, group: GroupLayout, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Arguments], tuple[int, int]]:
    """`(args, kwargs)` rank by rank, and the padding that was asked for: rows added, and rows then."""
    if mode.dispatch_fn is None:
        fix = f"Give it some: update_dispatch_mode({mode!r}, ..., ...)."
        raise DispatchError("dispatch mode", got="a mode without functions", fix=fix)
    padding = 0, 0
    given = [*args, *kwargs.values()]
    if mode.mesh is not None and any(
        isinstance(each, DataProto) and each.is_padding_enabled() for each in given
    ):
        chunks = max(group.mesh(mode.mesh).dp_ranks) + 1
        padded = [
            pad_dataproto_to_divisor(each, chunks) if isinstance(each, DataProto) else (each, 0)
            for each in given
        ]
        given = [each for each, _ in padded]
        padding = max(
            (pad_size, len(each)) for each, pad_size in padded if isinstance(each, DataProto)
        )
    per_rank, named = mode.dispatch_fn(
        group, *given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True))
    )
    for values in (*per_rank, *named.values()):
        if len(values) != group.world_size:
            got = f"{len(values)} values for an argument"
            raise DispatchError(
                "dispatch function", got=got, expected=f"{group.world_size}, one per rank"
            )
    return [
        (
            [values[rank] for values in per_rank],
            {key: values[rank] for key, values in named.items()},
        )
        for rank in range(group.world_size)
    ], padding


def collect_outputs(
    outputs: list[Any],
    *,
    collect_fn: CollectFn,
    layout: GroupLayout,
    padding: tuple[int, int],
    where: str,
) -> Any:
    """One result of all ranks' outputs, without the rows that come from padding: `padding` is rows added, and rows
    then; the last rows are cut off, or as many times more as the rows grew."""
    try:
        result = collect_fn(layout, outputs)
        pad_size, padded_rows = padding
        if not pad_size or not isinstance(result, DataProto):
            return result
        if len(result) % padded_rows:
            got, expected = (
                f"{len(result)} rows from {padded_rows}",
                "the same number of rows for each row",
            )
            fix = "Send the data without auto_padding: chunks are then ragged."
            raise DispatchError("result of padded rows", got=got, expected=expected, fix=fix)
        return unpad_dataproto(result, pad_size * (len(result) // padded_rows))
    except DispatchError as error:
        error.where = f"{where}: {error.where}"
        raise


# ---- registration -------------------------------------------------------------------------------


class Execute(Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """How a method is called on a group; the arguments of `register`."""

    dispatch_mode: Dispatch
    blocking: bool
    is_rank_zero_only: bool  # rank 0 alone gets the arguments, whole, and its output is the result
    is_beside: bool = False


def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    beside: bool = False,
) -> Callable[[Method], Method]:
    """Make a method of a worker callable on its group.

    Args:
        dispatch_mode: how arguments are split and outputs collected.
        execute_mode: with RANK_ZERO, rank 0 alone is called, with the arguments whole, and its output is the result.
        blocking: whether the call on the group waits for the result, or returns a DataProtoFuture of it.
        materialize_futures: whether the worker waits for arguments that are futures; else the method gets the futures.
        beside: whether it runs in a second thread of the worker's process, so that it may wait while others run.
    """
    mode: Any = dispatch_mode
    if isinstance(mode, Mapping) and set(mode) == {"dispatch_fn", "collect_fn"}:
        mode = Dispatch("", **mode)
    if not isinstance(mode, Dispatch):
        expected = f"one of {list(Dispatch)}, or a dictionary of dispatch_fn and collect_fn"
        raise WorkerError("@register: dispatch_mode", got=repr(mode), expected=expected)
    if not isinstance(execute_mode, Execute):
        raise WorkerError(
            "@register: execute_mode", got=repr(execute_mode), expected=f"one of {list(Execute)}"
        )
    is_rank_zero_only = execute_mode is Execute.RANK_ZERO or mode is Dispatch.RANK_ZERO
    registration = Registration(mode, blocking, is_rank_zero_only, beside)

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(each, DataProtoFuture) for each in (*args, *kwargs.values())):
                args = tuple(
                    each.get() if isinstance(each, DataProtoFuture) else each for each in args
                )
                named = {
                    key: each.get()
                    for key, each in kwargs.items()
                    if isinstance(each, DataProtoFuture)
                }
                kwargs = {**kwargs, **named}
            return method(self, *args, **kwargs)

        registered: Any = call if materialize_futures else method
        setattr(registered, REGISTRATION, registration)
        return registered

    return decorate
