# SPDX-License-Identifier: Apache-2.0
"""Dispatch modes: split the arguments of a call over the ranks of a group, and join their outputs.

A worker's method names its dispatch mode in `@register`. A mode is a pair of functions:
`dispatch_fn(group, *args, **kwargs)` returns, for each argument, the list of its values in rank
order. `collect_fn(group, outputs)` makes one result of the outputs, which are in rank order.
`group` is a `GroupLayout`.

    mode                         arguments of a rank                      result
    RANK_ZERO                    unchanged; only rank 0 is called         output of rank 0
    ONE_TO_ALL                   unchanged                                list of outputs
    ALL_TO_ALL, DP_COMPUTE       entry `rank` of each list                list of outputs
    DP_COMPUTE_PROTO             a chunk of the rows                      rows of all outputs
    DP_COMPUTE_PROTO_WITH_FUNC   the function, and a chunk of the rows    rows of all outputs
    DP_COMPUTE_METRIC            a chunk of the rows                      list of outputs
    make_nd_compute_dataproto_dispatch_fn(mesh)
                                 the chunk of its data-parallel rank      rows of collected ranks

Chunks are ragged: 7 rows on 4 ranks are split 2 2 2 1, and 3 rows 1 1 1 0. Every rank is called,
because all ranks must take part in a collective. A worker must therefore accept a DataProto without
rows, and may return one without columns.

Data made with `auto_padding=True` is padded to equal chunks instead, and the padding is cut off the
result. Use it only with methods that treat each row independently: a loss would count the padding.
DP_COMPUTE_METRIC never pads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial, wraps
from typing import Any, ClassVar, NamedTuple, TypeVar

from quadriga.errors import WorkerError
from quadriga.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto

Method = TypeVar("Method", bound=Callable[..., Any])
Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and named arguments of a call, or of one rank in it."""
PerRank = tuple[Sequence[Sequence[Any]], Mapping[str, Sequence[Any]]]
"""Positional and named arguments of a call, each as a list of its values in rank order."""
_PLAIN = (bool, int, float, str, type(None))
REGISTRATION = "_quadriga_registration"  # the attribute of a worker's method that `register` sets


class DispatchError(WorkerError):
    """Arguments or outputs that do not fit the mode of their method."""


class MeshLayout(NamedTuple):
    """Assignment of data-parallel chunks to the ranks of a mesh."""

    # The data-parallel rank of each rank; the same for all ranks of a model-parallel group.
    dp_ranks: tuple[int, ...]
    # For each data-parallel rank, the rank whose output is collected.
    collected: tuple[int, ...]


class GroupLayout:
    """World size and meshes of a group, for dispatch and collect functions.

    Args:
        world_size: number of ranks.
        meshes: layout of each mesh. The mesh "", in which each rank has its own chunk, is added.
    """

    def __init__(self, world_size: int, meshes: Mapping[str, MeshLayout] | None = None) -> None:
        self.world_size = world_size
        ranks = tuple(range(world_size))
        self.meshes = {"": MeshLayout(ranks, ranks), **(meshes or {})}

    def mesh(self, name: str) -> MeshLayout:
        """Layout of a mesh; "" is the mesh of all ranks."""
        return self.meshes[name]


DispatchFn = Callable[..., PerRank]
CollectFn = Callable[[GroupLayout, list[Any]], Any]


# ---- splitting ----------------------------------------------------------------------------------


def replicate(group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """Give every rank all arguments unchanged."""
    size = group.world_size
    per_rank = [[value] * size for value in args]
    named = {key: [value] * size for key, value in kwargs.items()}
    return per_rank, named


def take_per_rank(group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """Pass lists that already hold one entry per rank.

    Raises:
        DispatchError: an argument is not a list with one entry per rank.
    """
    for name, value in (*enumerate(args), *kwargs.items()):
        got = type(value).__name__
        if isinstance(value, (list, tuple)):
            if len(value) == group.world_size:
                continue
            got += f" of {len(value)}"
        # The name of a positional argument is its number.
        raise DispatchError(
            f"per-rank argument {name}",
            got=got,
            expected=f"a list of {group.world_size}, one entry per rank",
            fix="Dispatch.ONE_TO_ALL sends one value to every rank.",
        )
    return list(args), dict(kwargs)


def split_rows(mesh_name: str, group: GroupLayout, /, *args: Any, **kwargs: Any) -> PerRank:
    """Split the rows of every DataProto over the data-parallel ranks of a mesh.

    Ranks with the same data-parallel rank get the same chunk. Numbers, strings and None go to every
    rank.

    Args:
        mesh_name: name of the mesh.
        group: world size and meshes of the group.
        args: positional arguments of the call.
        kwargs: named arguments of the call.

    Returns:
        The values of each argument, in rank order.

    Raises:
        DispatchError: an argument of another type, or DataProtos with different numbers of rows.
    """
    dp_ranks = group.mesh(mesh_name).dp_ranks
    num_chunks = max(dp_ranks) + 1
    # For each argument, positional ones first, its value for each data-parallel rank.
    chunks = []
    num_rows = {}
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, (DataProto, DataProtoFuture)):
            chunks.append(value.chunk(num_chunks))
        elif isinstance(value, _PLAIN):
            chunks.append([value] * num_chunks)
        else:
            raise DispatchError(
                f"argument {name}",
                got=type(value).__name__,
                expected="a DataProto, a future of one, or a number, string or None for every rank",
                fix="Put values that hold for all rows into meta_info.",
            )
        # A DataProto with nothing but meta_info has no rows to compare, and those of a future are
        # not known yet.
        if isinstance(value, DataProto) and (value.batch is not None or value.non_tensor_batch):
            num_rows[str(name)] = len(value)
    if len(set(num_rows.values())) > 1:
        raise DispatchError(
            "arguments to split",
            got=f"{num_rows} rows",
            expected="the same number in each DataProto",
        )

    # From one value per data-parallel rank to one value per rank.
    per_rank = [[values[dp_rank] for dp_rank in dp_ranks] for values in chunks]
    named = dict(zip(kwargs, per_rank[len(args) :], strict=True))
    return per_rank[: len(args)], named


def split_rows_with_function(
    group: GroupLayout, function: Any = None, /, *args: Any, **kwargs: Any
) -> PerRank:
    """Give every rank the function unchanged, and the rank's chunk of the other arguments.

    Raises:
        DispatchError: the first argument is not a function; or see `split_rows`.
    """
    if not callable(function):
        raise DispatchError("first argument", got=type(function).__name__, expected="a function")
    chunks, named_chunks = split_rows("", group, *args, **kwargs)
    return [[function] * group.world_size, *chunks], named_chunks


# ---- collecting ---------------------------------------------------------------------------------


def collect_list(group: GroupLayout, outputs: list[Any]) -> list[Any]:
    """Return the list of outputs unchanged."""
    return outputs


def collect_rows(mesh_name: str, group: GroupLayout, outputs: list[Any]) -> DataProto | None:
    """Join the rows of the collected ranks of a mesh, in the order of their chunks.

    Args:
        mesh_name: name of the mesh.
        group: world size and meshes of the group.
        outputs: output of each rank.

    Returns:
        The joined rows, or None if the method returns None on all ranks.

    Raises:
        DispatchError: an output is not a DataProto.
    """
    outputs = [outputs[rank] for rank in group.mesh(mesh_name).collected]
    if all(output is None for output in outputs):
        return None
    for rank, output in enumerate(outputs):
        if not isinstance(output, DataProto):
            raise DispatchError(
                f"output {rank} of {len(outputs)}",
                got=type(output).__name__,
                expected="a DataProto from each collected rank, or None from all",
                fix="Dispatch.DP_COMPUTE_METRIC collects outputs of any type in a list.",
            )
    return DataProto.concat(outputs)


# ---- modes --------------------------------------------------------------------------------------


class _Members(type):
    """Metaclass of `Dispatch`, with the interface of `enum.EnumMeta`, but members can be added."""

    members: ClassVar[dict[str, "Dispatch"]]

    def __iter__(cls) -> Iterator["Dispatch"]:
        return iter(tuple(cls.members.values()))

    def __len__(cls) -> int:
        return len(cls.members)

    def __getitem__(cls, name: str) -> "Dispatch":
        return cls.members[name]

    def __getattr__(cls, name: str) -> "Dispatch":
        """Look up the mode `Dispatch.NAME`."""
        # Not `cls.members`, which would call this method again if there are no members yet.
        members = type.__getattribute__(cls, "members")
        if name not in members:
            known = ", ".join(members)
            raise AttributeError(f"there is no dispatch mode {name!r}; there are {known}")
        return members[name]


class Dispatch(metaclass=_Members):
    """The dispatch modes: an enumeration to which `register_dispatch_mode` adds members.

    Attributes:
        name: name of the mode; "" if it is not a member.
        dispatch_fn: splits the arguments of a call; None until it is set.
        collect_fn: joins the outputs.
        mesh: name of the mesh over whose data-parallel ranks the mode splits rows ("" for all
            ranks), and whose collected outputs it joins with `DataProto.concat`. Only such a mode
            supports auto padding. A backend may give it outputs that are views of shared memory,
            because joining copies them. None for any other mode.
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
        self.name = name
        self.dispatch_fn = dispatch_fn
        self.collect_fn = collect_fn
        self.mesh = mesh

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}" if self.name else "a custom dispatch function"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a member by its name, so that another process gets its own member of that name."""
        if self.name:
            return type(Dispatch).__getitem__, (Dispatch, self.name)
        return Dispatch, ("", self.dispatch_fn, self.collect_fn, self.mesh)


def register_dispatch_mode(name: str) -> Dispatch:
    """Add the mode `Dispatch.<name>`. Set its functions with `update_dispatch_mode`.

    Raises:
        WorkerError: the name is in use, or is no Python name.
    """
    if not name.isidentifier() or name in Dispatch.members:
        raise WorkerError(
            f"register_dispatch_mode({name!r})",
            got="a name in use" if name in Dispatch.members else "no Python name",
            expected=f"an identifier other than {', '.join(Dispatch.members)}",
        )
    Dispatch.members[name] = Dispatch(name)
    return Dispatch.members[name]


def update_dispatch_mode(
    mode: Dispatch, dispatch_fn: DispatchFn, collect_fn: CollectFn, mesh: str | None = None
) -> None:
    """Set the functions of a mode.

    Args:
        mode: the mode to change.
        dispatch_fn: splits the arguments of a call.
        collect_fn: joins the outputs.
        mesh: see `Dispatch`.

    Raises:
        WorkerError: the mode is not a member of `Dispatch`.
    """
    if mode not in Dispatch:
        raise WorkerError(
            "update_dispatch_mode", got=repr(mode), expected=f"one of {list(Dispatch)}"
        )
    mode.dispatch_fn = dispatch_fn
    mode.collect_fn = collect_fn
    mode.mesh = mesh


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Dispatch:
    """Create a mode for the data-parallel ranks that workers declare with `register_mesh`.

    Args:
        mesh_name: name of the mesh.

    Returns:
        A mode that splits rows over the data-parallel ranks, and joins the collected outputs.
    """
    return Dispatch("", partial(split_rows, mesh_name), partial(collect_rows, mesh_name), mesh_name)


for _mode in (
    Dispatch("RANK_ZERO", replicate),
    Dispatch("ONE_TO_ALL", replicate),
    Dispatch("ALL_TO_ALL", take_per_rank),
    Dispatch("DP_COMPUTE", take_per_rank),
    Dispatch("DP_COMPUTE_PROTO", partial(split_rows, ""), partial(collect_rows, ""), ""),
    Dispatch("DP_COMPUTE_PROTO_WITH_FUNC", split_rows_with_function, partial(collect_rows, ""), ""),
    Dispatch("DP_COMPUTE_METRIC", partial(split_rows, "")),
):
    Dispatch.members[_mode.name] = _mode


# ---- a call -------------------------------------------------------------------------------------


def rank_arguments(
    mode: Dispatch, group: GroupLayout, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Arguments], tuple[int, int]]:
    """Split the arguments of a call by a dispatch mode.

    Args:
        mode: the dispatch mode of the method.
        group: world size and meshes of the group.
        args: positional arguments of the call.
        kwargs: named arguments of the call.

    Returns:
        `(args, kwargs)` of each rank; and the number of padding rows and the total number of rows
        after padding, or (0, 0) without padding.

    Raises:
        DispatchError: the mode has no functions, or the arguments do not fit it.
    """
    if mode.dispatch_fn is None:
        raise DispatchError(
            "dispatch mode",
            got="a mode without functions",
            fix=f"Call update_dispatch_mode({mode!r}, ..., ...).",
        )

    padding = (0, 0)
    # Positional arguments, then named ones.
    values = [*args, *kwargs.values()]
    protos = {number: value for number, value in enumerate(values) if isinstance(value, DataProto)}
    if mode.mesh is not None and any(proto.is_padding_enabled() for proto in protos.values()):
        # Ranks with the same data-parallel rank get the same chunk.
        num_chunks = max(group.mesh(mode.mesh).dp_ranks) + 1
        for number, proto in protos.items():
            values[number], pad_size = pad_dataproto_to_divisor(proto, num_chunks)
            # DataProtos with rows have equal numbers of rows. One without rows gets no padding, and
            # does not count.
            padding = max(padding, (pad_size, len(values[number])))

    named_values = dict(zip(kwargs, values[len(args) :], strict=True))
    args_by_rank, kwargs_by_rank = mode.dispatch_fn(group, *values[: len(args)], **named_values)
    # The dispatch function may be the user's, so check its result.
    for by_rank in (*args_by_rank, *kwargs_by_rank.values()):
        if len(by_rank) != group.world_size:
            raise DispatchError(
                "dispatch function",
                got=f"{len(by_rank)} values for an argument",
                expected=f"{group.world_size}, one per rank",
            )

    # From lists of values for each argument to `(args, kwargs)` for each rank.
    arguments: list[Arguments] = []
    for rank in range(group.world_size):
        rank_args = [by_rank[rank] for by_rank in args_by_rank]
        rank_kwargs = {key: by_rank[rank] for key, by_rank in kwargs_by_rank.items()}
        arguments.append((rank_args, rank_kwargs))
    return arguments, padding


def collect_outputs(
    outputs: list[Any],
    *,
    collect_fn: CollectFn,
    layout: GroupLayout,
    padding: tuple[int, int],
    where: str,
) -> Any:
    """Join the outputs of all ranks, without rows that come from padding.

    Args:
        outputs: one output per rank, in rank order.
        collect_fn: the collect function of the dispatch mode.
        layout: world size and meshes of the group.
        padding: from `rank_arguments`: number of padding rows, and of all rows that were sent. If
            the method returns n rows for each row, n rows are cut off for each padding row.
        where: the call, for error messages.

    Returns:
        The result of `collect_fn`.

    Raises:
        DispatchError: the outputs do not fit the mode or the padding.
    """
    try:
        result = collect_fn(layout, outputs)
        pad_size, padded_rows = padding
        if not pad_size or not isinstance(result, DataProto):
            return result
        if len(result) % padded_rows:
            raise DispatchError(
                "result of padded rows",
                got=f"{len(result)} rows from {padded_rows}",
                expected="the same number of output rows for each row that was sent",
                fix="Send the data without auto_padding: chunks are then ragged.",
            )
        rows_per_row = len(result) // padded_rows
        return unpad_dataproto(result, pad_size * rows_per_row)
    except DispatchError as error:
        error.where = f"{where}: {error.where}"
        raise


# ---- registration -------------------------------------------------------------------------------


class Execute(Enum):
    """Selects the ranks that run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """Options of a method that is called on a group; see `register`."""

    dispatch_mode: Dispatch
    blocking: bool
    # Whether only rank 0 is called, with the arguments unchanged, and its output is the result.
    is_rank_zero_only: bool
    is_beside: bool = False  # whether it runs beside other methods, in another thread


def _materialize(value: Any) -> Any:
    """Wait for a future; return any other value unchanged."""
    return value.get() if isinstance(value, DataProtoFuture) else value


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
        execute_mode: with RANK_ZERO only rank 0 is called, with the arguments unchanged, and its
            output is the result.
        blocking: whether a call on the group waits for the result. Otherwise it returns a
            DataProtoFuture.
        materialize_futures: whether the worker waits for arguments that are futures. Otherwise the
            method gets the futures.
        beside: whether the method runs in a second thread of the worker's process, so that it may
            wait while other methods run.

    Raises:
        WorkerError: an unknown dispatch mode or execute mode.
    """
    mode: Any = dispatch_mode
    if isinstance(mode, Mapping) and set(mode) == {"dispatch_fn", "collect_fn"}:
        mode = Dispatch("", **mode)
    if not isinstance(mode, Dispatch):
        expected = f"one of {list(Dispatch)}, or a dictionary of dispatch_fn and collect_fn"
        raise WorkerError("@register: dispatch_mode", got=repr(mode), expected=expected)
    if not isinstance(execute_mode, Execute):
        expected = f"one of {list(Execute)}"
        raise WorkerError("@register: execute_mode", got=repr(execute_mode), expected=expected)
    is_rank_zero_only = execute_mode is Execute.RANK_ZERO or mode is Dispatch.RANK_ZERO
    registration = Registration(mode, blocking, is_rank_zero_only, beside)

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Call the method with the values of futures."""
            args = tuple(_materialize(value) for value in args)
            kwargs = {key: _materialize(value) for key, value in kwargs.items()}
            return method(self, *args, **kwargs)

        registered: Any = call if materialize_futures else method
        setattr(registered, REGISTRATION, registration)
        return registered

    return decorate
