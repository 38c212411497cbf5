# SPDX-License-Identifier: Apache-2.0
"""How the arguments of a worker group's method reach its workers, and how their outputs come back.

A worker's method names its dispatch mode in `@register`. A mode is a pair of functions. `dispatch_fn(group, *args,
**kwargs)` gives, for each argument, the list of its values rank by rank; `collect_fn(group, outputs)` makes one result
of the outputs, which stand in rank order. `group` is anything with a `world_size` and a `mesh(name)`.

    mode                         a rank's share of the arguments          result
    RANK_ZERO                    all, whole; only rank 0 is called        rank 0's output
    ONE_TO_ALL                   all, whole                               list of outputs
    ALL_TO_ALL, DP_COMPUTE       entry `rank` of each (lists)             list of outputs
    DP_COMPUTE_PROTO             its chunk of the rows                    rows of all outputs
    DP_COMPUTE_PROTO_WITH_FUNC   the function, its chunk of the rest      rows of all outputs
    DP_COMPUTE_METRIC            its chunk of the rows                    list of outputs
    make_nd_compute_dataproto_dispatch_fn(mesh)
                                 the chunk of its data-parallel rank      rows of the collecting ranks' outputs

Chunks are ragged: 7 rows on 4 ranks are 2 2 2 1, 3 rows are 1 1 1 0. Every rank is called, one whose
chunk is empty too, because workers that meet in a collective must all be there; a worker therefore has
to cope with a DataProto without rows, and may return one without columns. Data made with
`auto_padding=True` is padded to equal chunks instead, and the rows of the padding are cut off the
result; that is for methods that treat each row for itself (a loss would count the padding).
DP_COMPUTE_METRIC never pads.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial, wraps
from operator import attrgetter
from typing import Any, ClassVar, Protocol, TypeVar

from quadriga.errors import WorkerError
from quadriga.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto

Method = TypeVar("Method", bound=Callable[..., Any])
PerRank = tuple[Sequence[Sequence[Any]], Mapping[str, Sequence[Any]]]
_PLAIN = (bool, int, float, str, type(None))
_ATTRIBUTE = "_quadriga_registration"


class DispatchError(WorkerError):
    """Arguments or outputs that do not fit the mode of their method."""


@dataclass(frozen=True)
class MeshLayout:
    """Which part of the data each rank of a mesh works on.

    Attributes:
        dp_ranks: data-parallel rank of each rank; ranks of one model-parallel group share theirs.
        is_collect: whether the output of a rank is collected: one rank for each data-parallel rank.
    """

    dp_ranks: tuple[int, ...]
    is_collect: tuple[bool, ...]

    @property
    def dp_size(self) -> int:
        """Number of chunks."""
        return max(self.dp_ranks) + 1

    def collecting_ranks(self) -> list[int]:
        """The ranks whose outputs are collected, in the order of their chunks."""
        ranks = [rank for rank, is_collect in enumerate(self.is_collect) if is_collect]
        return sorted(ranks, key=self.dp_ranks.__getitem__)


class GroupLayout(Protocol):
    """What dispatch and collect functions may use of a group."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def mesh(self, name: str) -> MeshLayout:
        """The layout that the workers registered under `name`."""


DispatchFn = Callable[..., PerRank]
CollectFn = Callable[[GroupLayout, list[Any]], Any]


@dataclass(frozen=True)
class DispatchFunctions:
    """The two halves of a mode.

    Attributes:
        dispatch_fn: splits the arguments.
        collect_fn: joins the outputs.
        num_chunks: into how many chunks rows are split, for modes that honour auto padding; None: it does not.
        rows_of: of the outputs, those that `collect_fn` joins with `DataProto.concat`, in that order; None: it does
            something else. A backend may lend them as views of shared memory, and a rank that needs some of the rows
            need not copy the others.
    """

    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    num_chunks: Callable[[GroupLayout], int] | None = None
    rows_of: CollectFn | None = None


class _Members(type):
    """Makes the class iterable over its members, as an enumeration is, while members may be added."""

    members: ClassVar[dict[str, "Dispatch"]]

    def __iter__(cls) -> Iterator["Dispatch"]:
        return iter(tuple(cls.members.values()))

    def __len__(cls) -> int:
        return len(cls.members)

    def __contains__(cls, mode: object) -> bool:
        return any(mode is member for member in cls.members.values())

    def __getitem__(cls, name: str) -> "Dispatch":
        return cls.members[name]

    def __getattr__(cls, name: str) -> "Dispatch":
        members = type.__getattribute__(cls, "members")
        if name not in members:
            raise AttributeError(f"there is no dispatch mode {name!r}; there are {', '.join(members)}")
        return members[name]


class Dispatch(metaclass=_Members):
    """The dispatch modes: an enumeration to which `register_dispatch_mode` adds members."""

    members: ClassVar[dict[str, "Dispatch"]] = {}
    RANK_ZERO: ClassVar["Dispatch"]
    ONE_TO_ALL: ClassVar["Dispatch"]
    ALL_TO_ALL: ClassVar["Dispatch"]
    DP_COMPUTE: ClassVar["Dispatch"]
    DP_COMPUTE_PROTO: ClassVar["Dispatch"]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar["Dispatch"]
    DP_COMPUTE_METRIC: ClassVar["Dispatch"]

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(Dispatch).__getitem__, (Dispatch, self.name)


_functions: dict[str, DispatchFunctions] = {}


def register_dispatch_mode(name: str) -> Dispatch:
    """Add the mode `Dispatch.<name>`; `update_dispatch_mode` gives it its functions."""
    if not name.isidentifier() or name in Dispatch.members:
        raise WorkerError(
            f"register_dispatch_mode({name!r})",
            got="a name in use" if name in Dispatch.members else "no Python name",
            expected=f"an identifier other than {', '.join(Dispatch.members)}",
        )
    Dispatch.members[name] = mode = Dispatch(name)
    return mode


def update_dispatch_mode(
    mode: Dispatch,
    dispatch_fn: DispatchFn,
    collect_fn: CollectFn,
    num_chunks: Callable[[GroupLayout], int] | None = None,
) -> None:
    """Set the functions of a mode; `DispatchFunctions` says what each does."""
    if mode not in Dispatch:
        raise WorkerError("update_dispatch_mode", got=repr(mode), expected=f"one of {list(Dispatch)}")
    _functions[mode.name] = DispatchFunctions(dispatch_fn, collect_fn, num_chunks)


def dispatch_functions(mode: Dispatch | DispatchFunctions) -> DispatchFunctions:
    """The functions of a mode."""
    if isinstance(mode, DispatchFunctions):
        return mode
    if mode.name not in _functions:
        raise WorkerError(
            repr(mode), got="a mode without functions", fix=f"Give it some: update_dispatch_mode({mode!r}, ..., ...)."
        )
    return _functions[mode.name]


# ---- splitting ----------------------------------------------------------------------------------


def replicate(group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """Every argument, whole, for every rank."""
    size = group.world_size
    return [[value] * size for value in args], {key: [value] * size for key, value in kwargs.items()}


def take_per_rank(group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """Arguments that are lists with one entry per rank already."""
    for name, value in (*enumerate(args), *kwargs.items()):
        if not isinstance(value, (list, tuple)) or len(value) != group.world_size:
            length = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
            raise DispatchError(
                f"per-rank argument {name}: got {type(value).__name__}{length}, expected a list of "
                f"{group.world_size}, one entry per rank",
                fix="Dispatch.ONE_TO_ALL sends one value to every rank.",
            )
    return list(args), dict(kwargs)


def split_rows(group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """Chunk `rank` of the rows of every DataProto for rank `rank`."""
    return _split(group.world_size, args, kwargs)


def split_rows_with_function(group: GroupLayout, function: Any = None, /, *args: Any, **kwargs: Any) -> PerRank:
    """The function, whole, and the ranks' chunks of the other arguments."""
    if not callable(function):
        raise DispatchError("first argument", got=type(function).__name__, expected="a function")
    chunks, named_chunks = _split(group.world_size, args, kwargs)
    return [[function] * group.world_size, *chunks], named_chunks


def split_rows_over_mesh(mesh_name: str, group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """One chunk for each data-parallel rank of the mesh, the same for all ranks that share it."""
    mesh = group.mesh(mesh_name)
    chunks, named_chunks = _split(mesh.dp_size, args, kwargs)
    return (
        [[parts[dp_rank] for dp_rank in mesh.dp_ranks] for parts in chunks],
        {key: [parts[dp_rank] for dp_rank in mesh.dp_ranks] for key, parts in named_chunks.items()},
    )


def _has_columns(value: Any) -> bool:
    return isinstance(value, DataProto) and (value.batch is not None or bool(value.non_tensor_batch))


def _split(chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PerRank:
    arguments = {**{str(position): value for position, value in enumerate(args)}, **kwargs}
    rows = {name: len(value) for name, value in arguments.items() if _has_columns(value)}
    if len(set(rows.values())) > 1:
        raise DispatchError("arguments to split", got=f"{rows} rows", expected="the same number in each DataProto")
    parts: dict[str, list[Any]] = {}
    for name, value in arguments.items():
        if isinstance(value, (DataProto, DataProtoFuture)):
            parts[name] = value.chunk(chunks)
        elif isinstance(value, _PLAIN):
            parts[name] = [value] * chunks
        else:
            raise DispatchError(
                f"argument {name}: got {type(value).__name__}, expected a DataProto, the future of one, or a plain "
                "number, string or None, which every rank gets",
                fix="What holds for all rows belongs into meta_info.",
            )
    return [parts[str(position)] for position in range(len(args))], {name: parts[name] for name in kwargs}


# ---- collecting ---------------------------------------------------------------------------------


def collect_list(group: GroupLayout, outputs: list[Any]) -> list[Any]:
    """The outputs as they are."""
    return outputs


def collect_rows(group: GroupLayout, outputs: list[Any], mesh_name: str = "") -> DataProto | None:
    """All rows, in rank order; of a mesh: those of the ranks that collect. None if the method returns nothing."""
    if mesh_name:
        outputs = outputs_of_mesh(mesh_name, group, outputs)
    if all(output is None for output in outputs):
        return None
    for rank, output in enumerate(outputs):
        if not isinstance(output, DataProto):
            raise DispatchError(
                f"output {rank} of {len(outputs)}: got {type(output).__name__}, expected a DataProto from each rank "
                "that is collected, or None from all",
                fix="Dispatch.DP_COMPUTE_METRIC collects outputs of any type in a list.",
            )
    return DataProto.concat(outputs)


def outputs_of_mesh(mesh_name: str, group: GroupLayout, outputs: list[Any]) -> list[Any]:
    """The outputs of the ranks that collect, in the order of their chunks."""
    return [outputs[rank] for rank in group.mesh(mesh_name).collecting_ranks()]


# ---- auto padding -------------------------------------------------------------------------------


def pad_arguments(
    chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], int, int]:
    """Pad every DataProto to a multiple of `chunks` rows if one of them has `auto_padding`.

    Returns:
        the arguments (those of the caller stay as they are), rows added, and rows then.
    """
    data = [value for value in (*args, *kwargs.values()) if _has_columns(value)]
    if not any(value.is_padding_enabled() for value in data):
        return tuple(args), dict(kwargs), 0, 0
    padded = {id(value): pad_dataproto_to_divisor(value, chunks) for value in data}
    result, pad_size = padded[id(data[0])]
    return (
        tuple(padded[id(value)][0] if id(value) in padded else value for value in args),
        {key: padded[id(value)][0] if id(value) in padded else value for key, value in kwargs.items()},
        pad_size,
        len(result),
    )


def remove_padding(result: Any, pad_size: int, padded_rows: int) -> Any:
    """Cut off the rows that come from padding: the last ones, or as many times more as the rows grew."""
    if pad_size == 0 or not _has_columns(result):
        return result
    if len(result) % padded_rows:
        raise DispatchError(
            f"result of padded rows: got {len(result)} rows from {padded_rows}, expected the same number of rows for "
            "each row",
            fix="Send the data without auto_padding: chunks are then ragged.",
        )
    return unpad_dataproto(result, pad_size * (len(result) // padded_rows))


# ---- modes --------------------------------------------------------------------------------------


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchFunctions:
    """The mode for engines whose data-parallel size differs from the world size.

    Args:
        mesh_name: the name under which every worker calls `register_mesh`.
    """
    return DispatchFunctions(
        partial(split_rows_over_mesh, mesh_name),
        partial(collect_rows, mesh_name=mesh_name),
        partial(_dp_size, mesh_name),
        partial(outputs_of_mesh, mesh_name),
    )


def _dp_size(mesh_name: str, group: GroupLayout) -> int:
    return group.mesh(mesh_name).dp_size


_world_size: Callable[[GroupLayout], int] = attrgetter("world_size")
for _name, _entry in {
    "RANK_ZERO": DispatchFunctions(replicate, collect_list),
    "ONE_TO_ALL": DispatchFunctions(replicate, collect_list),
    "ALL_TO_ALL": DispatchFunctions(take_per_rank, collect_list),
    "DP_COMPUTE": DispatchFunctions(take_per_rank, collect_list),
    "DP_COMPUTE_PROTO": DispatchFunctions(split_rows, collect_rows, _world_size, collect_list),
    "DP_COMPUTE_PROTO_WITH_FUNC": DispatchFunctions(split_rows_with_function, collect_rows, _world_size, collect_list),
    "DP_COMPUTE_METRIC": DispatchFunctions(split_rows, collect_list),
}.items():
    register_dispatch_mode(_name)
    _functions[_name] = _entry


# ---- registration -------------------------------------------------------------------------------


class Execute(Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """How a method is called on a group; the arguments of `register`.

    Attributes:
        is_rank_zero_only: rank 0 alone gets the arguments, whole, and its output is the result.
    """

    dispatch_mode: Dispatch | DispatchFunctions
    blocking: bool
    is_rank_zero_only: bool


def register(
    dispatch_mode: Dispatch | DispatchFunctions | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Method], Method]:
    """Make a method of a worker callable on its group.

    Args:
        dispatch_mode: how arguments are split and outputs collected.
        execute_mode: with RANK_ZERO, rank 0 alone is called, with the arguments whole, and its output is
            the result; the dispatch mode has nothing to split then.
        blocking: whether the call on the group waits for the result, or returns a DataProtoFuture of it.
        materialize_futures: whether arguments that are futures are waited for before the method runs,
            in the worker; otherwise the method gets the futures.
    """
    mode: Any = dispatch_mode
    if isinstance(mode, Mapping) and set(mode) == {"dispatch_fn", "collect_fn"}:
        mode = DispatchFunctions(**mode)
    if not isinstance(mode, (Dispatch, DispatchFunctions)):
        raise WorkerError(
            f"@register: dispatch_mode: got {mode!r}, expected one of {list(Dispatch)}, or a dictionary of "
            "dispatch_fn and collect_fn",
        )
    if not isinstance(execute_mode, Execute):
        raise WorkerError("@register: execute_mode", got=repr(execute_mode), expected=f"one of {list(Execute)}")
    is_rank_zero_only = execute_mode is Execute.RANK_ZERO or mode is Dispatch.RANK_ZERO

    def decorate(method: Method) -> Method:
        registered = _with_futures_resolved(method) if materialize_futures else method
        setattr(registered, _ATTRIBUTE, Registration(mode, blocking, is_rank_zero_only))
        return registered

    return decorate


def _with_futures_resolved(method: Any) -> Any:
    def value(argument: Any) -> Any:
        return argument.get() if isinstance(argument, DataProtoFuture) else argument

    @wraps(method)
    async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await method(self, *map(value, args), **{key: value(each) for key, each in kwargs.items()})

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, DataProtoFuture) for each in (*args, *kwargs.values())):
            args, kwargs = tuple(map(value, args)), {key: value(each) for key, each in kwargs.items()}
        return method(self, *args, **kwargs)

    return call_async if inspect.iscoroutinefunction(method) else call


def registered_methods(worker_class: type) -> dict[str, Registration]:
    """All registered methods of a class, inherited ones included, by name."""
    found = {name: getattr(getattr(worker_class, name, None), _ATTRIBUTE, None) for name in dir(worker_class)}
    return {name: registration for name, registration in found.items() if registration is not None}
