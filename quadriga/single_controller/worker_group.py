# SPDX-License-Identifier: Apache-2.0
"""Many workers, called as one.

    group.update_actor(batch)                    group = WorkerGroup of an actor class
      1. dispatch   the mode of update_actor splits the arguments, rank by rank     dispatch.py
      2. start      the backend starts the method on every rank, waiting for none   local.py, ray/group.py
      3. resolve    the backend waits for the outputs, or a DataProtoFuture will    protocol/future.py
      4. collect    the mode makes one result of the outputs

A backend is a subclass with two methods, `start_all` and `resolve`. `group.as_worker()` is the same group
typed as its worker class, so that an editor finds the methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar, cast

from quadriga.errors import WorkerError
from quadriga.protocol import DataProtoFuture
from quadriga.single_controller.dispatch import (
    CollectFn,
    Dispatch,
    DispatchError,
    GroupLayout,
    MeshLayout,
    Registration,
    dispatch_functions,
    pad_arguments,
    registered_methods,
    remove_padding,
)
from quadriga.single_controller.worker import Worker

W = TypeVar("W", bound=Worker)
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class NotRegisteredError(WorkerError, AttributeError):
    """A method that the workers of a group do not have, or have without `@register`."""


class ClassWithInitArgs(Generic[W]):
    """A worker class and the arguments to build it with, later and elsewhere."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> W:
        return self.cls(*self.args, **self.kwargs)


@dataclass(frozen=True)
class LayoutSnapshot:
    """What a group's layout was when a call was started: travels with the future of its result."""

    world_size: int
    meshes: Mapping[str, MeshLayout] = field(default_factory=dict)

    def mesh(self, name: str) -> MeshLayout:
        """The layout that the workers registered under `name`."""
        return self.meshes[name]


def collect_outputs(
    outputs: list[Any], *, collect_fn: CollectFn, layout: GroupLayout, padding: tuple[int, int], where: str
) -> Any:
    """One result of all ranks' outputs, without the rows of padding.

    Args:
        padding: rows added, and rows then.
        where: the call, for an error message.
    """
    try:
        return remove_padding(collect_fn(layout, outputs), *padding)
    except DispatchError as error:
        raise _at(where, error) from None


def _at(where: str, error: DispatchError) -> DispatchError:
    """The same error with the place of the call before its own."""
    return DispatchError(f"{where}: {error.where}", got=error.got, expected=error.expected, fix=error.fix)


class WorkerFacade:
    """The registered methods of a group, and nothing else; what `as_worker` returns."""

    def __init__(self, group: "WorkerGroup[Any]") -> None:
        self._group = group
        for name in group.methods:
            setattr(self, name, group.method(name))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Only for names that are no method of the group: raises the error that says so.
        if name.startswith("_"):
            raise AttributeError(name)
        return self._group.method(name)

    def __dir__(self) -> list[str]:
        return sorted(self._group.methods)

    def __repr__(self) -> str:
        return f"<{self._group!r} as {self._group.worker_class.__name__}>"


class WorkerGroup(ABC, Generic[W]):
    """Base class of the backends.

    Args:
        worker_class: the class of the workers; its registered methods become the group's.
        world_size: how many workers there are.
        name: the role, for error messages; "": the name of the class.
    """

    def __init__(self, worker_class: type[W], world_size: int, name: str = "") -> None:
        self.worker_class = worker_class
        self.methods = registered_methods(worker_class)
        self.name = name or worker_class.__name__
        self.world_size = world_size
        self._meshes: dict[str, MeshLayout] = {}
        clashes = sorted(method for method in self.methods if hasattr(type(self), method))
        if clashes:
            raise WorkerError(
                worker_class.__name__, got=f"registered methods {clashes}", expected="names that no worker group has"
            )

    @abstractmethod
    def start_all(self, method_name: str, per_rank: Sequence[Arguments]) -> list[Any]:
        """Start a method on the ranks 0, 1, ... with the arguments of each.

        Returns:
            handles of their outputs in rank order, without having waited for any.
        """

    @staticmethod
    @abstractmethod
    def resolve(handles: Sequence[Any], borrow: bool = False) -> list[Any]:
        """Wait for handles and return their outputs; the first failing rank's error is raised.

        Args:
            handles: what `start_all` returned.
            borrow: the caller copies the rows of the outputs: they may lie in memory that is only lent.
        """

    def mesh(self, name: str) -> MeshLayout:
        """Which chunk each rank works on in the mesh `name`; the workers are called for it once."""
        if name not in self._meshes:
            places = self.execute_all("mesh_place", name)
            mesh = MeshLayout(tuple(dp_rank for dp_rank, _ in places), tuple(is_collect for _, is_collect in places))
            collected = [mesh.dp_ranks[rank] for rank in mesh.collecting_ranks()]
            if min(mesh.dp_ranks) < 0 or collected != list(range(mesh.dp_size)):
                raise WorkerError(
                    f"{self.name}: mesh {name!r}: got data-parallel ranks {mesh.dp_ranks}, of which {collected} are "
                    f"collected, expected one collected rank for each of 0 to {mesh.dp_size - 1}",
                )
            self._meshes[name] = mesh
        return self._meshes[name]

    def execute_all(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, on every rank with the same arguments; the outputs in rank order."""
        return self.resolve(self.start_all(method_name, [(args, kwargs)] * self.world_size))

    def method(self, name: str) -> Callable[..., Any]:
        """The registered method `name`, bound to the group."""
        if name in self.methods:
            return partial(self._call, name, self.methods[name])
        if callable(getattr(self.worker_class, name, None)):
            raise NotRegisteredError(
                f"{self.worker_class.__name__}.{name}: got a method without @register, expected one that says how its "
                "arguments reach the ranks",
                fix="Add @register(dispatch_mode=...) to it; an override needs it again.",
            )
        known = ", ".join(sorted(self.methods))
        raise NotRegisteredError(f"{self.name}.{name}", got="no such method", expected=f"a registered one: {known}")

    def as_worker(self) -> W:
        """The group, typed as its worker; attributes are the registered methods, bound to the group."""
        return cast(W, WorkerFacade(self))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Only reached for names that are no attributes; without `methods` the group is not built yet.
        if name.startswith("_") or "methods" not in self.__dict__:
            raise AttributeError(name)
        return self.method(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.methods})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.world_size} workers)"

    def _call(self, method_name: str, registration: Registration, /, *args: Any, **kwargs: Any) -> Any:
        if registration.is_rank_zero_only:
            handles = self.start_all(method_name, [(args, kwargs)])
            future = DataProtoFuture(collect_fn=itemgetter(0), futures=handles, resolve=self.resolve)
            return future.get() if registration.blocking else future
        mode = registration.dispatch_mode
        functions = dispatch_functions(mode)
        mode_name = f"Dispatch.{mode.name}" if isinstance(mode, Dispatch) else "a dispatch function of its own"
        where = f"{self.name}.{method_name} on {self.world_size} ranks ({mode_name})"
        pad_size = padded_rows = 0
        try:
            if functions.num_chunks is not None:
                args, kwargs, pad_size, padded_rows = pad_arguments(functions.num_chunks(self), args, kwargs)
            per_rank, named_per_rank = functions.dispatch_fn(self, *args, **kwargs)
            for values in (*per_rank, *named_per_rank.values()):
                if len(values) != self.world_size:
                    got = f"{len(values)} values for an argument"
                    raise DispatchError("dispatch function", got=got, expected=f"{self.world_size}, one per rank")
        except DispatchError as error:
            raise _at(where, error) from None
        arguments = [
            ([values[rank] for values in per_rank], {key: values[rank] for key, values in named_per_rank.items()})
            for rank in range(self.world_size)
        ]
        handles = self.start_all(method_name, arguments)
        layout = LayoutSnapshot(self.world_size, dict(self._meshes))
        collect = partial(
            collect_outputs,
            collect_fn=functions.collect_fn,
            layout=layout,
            padding=(pad_size, padded_rows),
            where=where,
        )
        # Rows that are all joined are copied by that, so the outputs may be lent.
        is_joined = functions.rows_of is not None and not pad_size
        rows_of = partial(functions.rows_of, layout) if is_joined else None
        resolve = partial(self.resolve, borrow=True) if is_joined else self.resolve
        if registration.blocking:
            return collect(resolve(handles))
        return DataProtoFuture(collect_fn=collect, futures=handles, resolve=resolve, rows_of=rows_of)


class WorkerGroups:
    """The worker groups of a run, one per role; a backend starts them, and ends what it has started.

    Attributes:
        groups: by role; their workers are built, or are being built.
        is_remote: the workers are other processes than the driver, so that a call need not hold it up.
    """

    groups: Mapping[str, WorkerGroup[Any]]
    is_remote = False

    def describe(self) -> dict[str, str]:
        """What was chosen about processes and threads, with reasons, to be printed."""
        return {}

    def close(self) -> None:
        """Call the registered method `close` of all workers that have one, then `end`."""
        try:
            for group in self.groups.values():
                if "close" in group.methods:
                    group.method("close")()
        finally:
            self.end()

    def end(self) -> None:
        """End what was started, whatever it is doing and however far it has come. May be called again."""
