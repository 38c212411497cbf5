# SPDX-License-Identifier: Apache-2.0
"""Many workers, called as one.

    group.update_actor(batch)                    group = WorkerGroup of an actor class
      1. dispatch   the mode of update_actor splits the arguments, rank by rank     dispatch.py
      2. start      the backend starts the method on every rank, waiting for none   local.py
      3. resolve    the backend waits for the outputs, or a DataProtoFuture will    protocol/future.py
      4. collect    the mode makes one result of the outputs

A backend is a subclass with two methods, `start` and `resolve`. `group.as_worker()` is the same group
typed as its worker class, so that an editor finds the methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from quadriga.errors import WorkerError
from quadriga.protocol import DataProtoFuture
from quadriga.single_controller.dispatch import (
    CollectFn,
    DispatchError,
    GroupLayout,
    MeshLayout,
    dispatch_functions,
    pad_arguments,
    remove_padding,
)
from quadriga.single_controller.registration import Registration, registered_methods
from quadriga.single_controller.worker import Worker

W = TypeVar("W", bound=Worker)


class NotRegisteredError(WorkerError, AttributeError):
    """A group was asked for a method that its workers do not have, or have without `@register`."""


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


def first_output(outputs: list[Any]) -> Any:
    """The output of the only rank that was called."""
    return outputs[0]


def collect_outputs(
    outputs: list[Any], *, collect_fn: CollectFn, layout: GroupLayout, padding: tuple[int, int], where: str
) -> Any:
    """One result of all ranks' outputs, without the rows of padding."""
    try:
        return remove_padding(collect_fn(layout, outputs), *padding)
    except DispatchError as error:
        raise error.at(where) from None


class WorkerFacade:
    """The registered methods of a group, and nothing else; what `as_worker` returns."""

    def __init__(self, group: "WorkerGroup[Any]") -> None:
        self._group = group

    def __getattr__(self, name: str) -> Callable[..., Any]:
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
        self._world_size = world_size
        self._meshes: dict[str, MeshLayout] = {}
        clashes = sorted(method for method in self.methods if hasattr(type(self), method))
        if clashes:
            raise WorkerError(
                worker_class.__name__, got=f"registered methods {clashes}", expected="names that no worker group has"
            )

    @abstractmethod
    def start(self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Start a method on one rank and return a handle of its output, without waiting for it."""

    def start_all(self, method_name: str, per_rank: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Any]:
        """Start a method on the ranks 0, 1, ... with the arguments of each, and return their handles in rank order.

        A backend overrides it to pack what the ranks share once.
        """
        return [self.start(rank, method_name, args, kwargs) for rank, (args, kwargs) in enumerate(per_rank)]

    @staticmethod
    @abstractmethod
    def resolve(handles: Sequence[Any]) -> list[Any]:
        """Wait for handles and return their outputs; the first failing rank's error is raised."""

    @classmethod
    def resolve_lent(cls, handles: Sequence[Any]) -> list[Any]:
        """The same for a caller that copies the rows of the outputs: they may lie in memory that is only lent."""
        return cls.resolve(handles)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._world_size

    def mesh(self, name: str) -> MeshLayout:
        """Which chunk each rank works on in the mesh `name`: asked of the workers once."""
        if name not in self._meshes:
            places = self.execute_all("mesh_place", name)
            mesh = MeshLayout(tuple(dp_rank for dp_rank, _ in places), tuple(is_collect for _, is_collect in places))
            collected = [mesh.dp_ranks[rank] for rank in mesh.collecting_ranks()]
            if min(mesh.dp_ranks) < 0 or collected != list(range(mesh.dp_size)):
                raise WorkerError(
                    f"{self.name}: mesh {name!r}",
                    got=f"data-parallel ranks {mesh.dp_ranks}, of which {collected} are collected",
                    expected=f"one collected rank for each of 0 to {mesh.dp_size - 1}",
                )
            self._meshes[name] = mesh
        return self._meshes[name]

    def execute_all(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, on every rank with the same arguments; the outputs in rank order."""
        return self.resolve(self.start_all(method_name, [(args, kwargs)] * self.world_size))

    def execute_all_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """The same as `execute_all`."""
        return self.execute_all(method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """The same as `execute_all`, as a future."""
        handles = self.start_all(method_name, [(args, kwargs)] * self.world_size)
        return DataProtoFuture(collect_fn=list, futures=handles, resolve=self.resolve)

    def execute_rank_zero(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call any method, registered or not, on rank 0."""
        return self.resolve([self.start(0, method_name, args, kwargs)])[0]

    def execute_rank_zero_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """The same as `execute_rank_zero`."""
        return self.execute_rank_zero(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """The same as `execute_rank_zero`, as a future."""
        handles = [self.start(0, method_name, args, kwargs)]
        return DataProtoFuture(collect_fn=first_output, futures=handles, resolve=self.resolve)

    def method(self, name: str) -> Callable[..., Any]:
        """The registered method `name`, bound to the group."""
        registration = self.methods.get(name)
        if registration is None:
            raise self._not_registered(name)
        return partial(self._call, name, registration)

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
            return self._finish([self.start(0, method_name, args, kwargs)], first_output, registration.blocking)
        functions = dispatch_functions(registration.dispatch_mode)
        padding = (0, 0)
        where = f"{self.name}.{method_name} on {self.world_size} ranks ({registration.mode_name})"
        try:
            if functions.num_chunks is not None:
                args, kwargs, *padding = pad_arguments(functions.num_chunks(self), args, kwargs)
            per_rank, named_per_rank = functions.dispatch_fn(self, *args, **kwargs)
            self._check_dispatched([*per_rank, *named_per_rank.values()])
        except DispatchError as error:
            raise error.at(where) from None
        handles = self.start_all(
            method_name,
            [
                ([values[rank] for values in per_rank], {key: values[rank] for key, values in named_per_rank.items()})
                for rank in range(self.world_size)
            ],
        )
        layout = LayoutSnapshot(self.world_size, dict(self._meshes))
        collect = partial(collect_outputs, collect_fn=functions.collect_fn, layout=layout, padding=padding, where=where)
        joins_all = functions.rows_of is not None and not padding[0]
        rows_of = partial(functions.rows_of, layout) if joins_all else None
        return self._finish(handles, collect, registration.blocking, rows_of)

    def _finish(
        self,
        handles: list[Any],
        collect: Callable[[list[Any]], Any],
        blocking: bool,
        rows_of: Callable[[list[Any]], list[Any]] | None = None,
    ) -> Any:
        resolve = self.resolve if rows_of is None else self.resolve_lent
        if blocking:
            return collect(resolve(handles))
        return DataProtoFuture(collect_fn=collect, futures=handles, resolve=resolve, rows_of=rows_of)

    def _check_dispatched(self, per_rank: Sequence[Sequence[Any]]) -> None:
        for values in per_rank:
            if len(values) != self.world_size:
                raise DispatchError(
                    "dispatch function",
                    got=f"{len(values)} values for an argument",
                    expected=f"{self.world_size}, one per rank",
                )

    def _not_registered(self, name: str) -> "NotRegisteredError":
        method = getattr(self.worker_class, name, None)
        if not callable(method):
            known = ", ".join(sorted(self.methods))
            return NotRegisteredError(
                f"{self.name}.{name}", got="no such method", expected=f"a registered one: {known}"
            )
        return NotRegisteredError(
            f"{self.worker_class.__name__}.{name}",
            got="a method without @register",
            expected="one that says how its arguments reach the ranks",
            fix="Add @register(dispatch_mode=...) to it; an override needs it again.",
        )
