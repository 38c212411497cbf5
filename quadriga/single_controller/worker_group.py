# SPDX-License-Identifier: Apache-2.0
"""Many workers, called as one.

    group.update_actor(batch)                    group = WorkerGroup of an actor class
      1. dispatch   the mode of update_actor splits the arguments, rank by rank     dispatch.py
      2. start      the backend starts the method on every rank, waiting for none   start_all
      3. resolve    the backend waits for the outputs, or a DataProtoFuture will    protocol/operations.py
      4. collect    the mode makes one result of the outputs

A backend is a subclass: `LocalWorkerGroup` below has its workers in this process, `ray/group.py` in processes of their
own. `group.as_worker()` is the group typed as its worker class, so that an editor finds the methods.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np
import torch

from quadriga.background import run_coroutine
from quadriga.config.trainer import TrainerConfig
from quadriga.errors import QuadrigaError, WorkerError
from quadriga.observe.timing import PhaseTimer
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.single_controller import dispatch
from quadriga.single_controller.dispatch import (
    Arguments,
    DispatchError,
    GroupLayout,
    MeshLayout,
    Registration,
)
from quadriga.single_controller.resource_pool import ResourcePool
from quadriga.single_controller.worker import Worker, WorkerPlace, placed

W = TypeVar("W", bound=Worker)


class NotRegisteredError(WorkerError, AttributeError):
    """A method that the workers of a group do not have, or have without `@register`."""


class ClassWithInitArgs(Generic[W]):
    """A worker class and the arguments to build it with, later and elsewhere."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> W:
        return self.cls(*self.args, **self.kwargs)


class GroupMethod(partial):
    """A registered method of a group, which is called on all its ranks."""

    def remote(self, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """The same call without waiting for it; `get()` of the future does."""
        name, registration = self.args
        return self.func(name, replace(registration, blocking=False), *args, **kwargs)


class WorkerGroup(GroupLayout, ABC, Generic[W]):
    """Base class of the backends. The worker class's registered methods become the group's; `name` is its role."""

    shares_processes: bool = False  # whether other roles are in the workers' processes

    def __init__(self, worker_class: type[W], world_size: int, name: str = "") -> None:
        super().__init__(world_size)
        self.worker_class = worker_class
        self.ranks = list(range(world_size))  # those that are called
        self.name = name or worker_class.__name__
        found = {
            each: getattr(getattr(worker_class, each, None), dispatch.REGISTRATION, None)
            for each in dir(worker_class)
        }
        self.methods: dict[str, Registration] = {
            method: how for method, how in found.items() if how is not None
        }
        clashes = sorted(method for method in self.methods if hasattr(type(self), method))
        if clashes:
            raise WorkerError(
                worker_class.__name__,
                f"registered methods {clashes}",
                "names that no worker group has",
            )

    @abstractmethod
    def start_all(self, method_name: str, per_rank: Sequence[Arguments]) -> list[Any]:
        """Start a method on `ranks` without waiting. Returns handles of their outputs in rank order."""

    @staticmethod
    @abstractmethod
    def resolve(handles: Sequence[Any], borrow: bool = False) -> list[Any]:
        """Wait for handles and return their outputs; the first failing rank's error is raised. With `borrow` the caller
        copies the rows of the outputs: they may lie in memory that is only lent."""

    @staticmethod
    @abstractmethod
    def first_outcomes(handles: Sequence[Any]) -> dict[Any, Any]:
        """Wait for one of several handles. Returns what has come: outputs, to be copied as with `borrow`; errors."""

    @abstractmethod
    def restart(self, rank: int) -> None:
        """End a worker, in whatever state it is, and build another in its place."""

    def use_ranks(self, ranks: Sequence[int]) -> Self:
        """Call these workers alone from here on, for methods in which they do not meet. They keep their ranks."""
        self.ranks, self.world_size, self.meshes = (
            sorted(ranks),
            len(ranks),
            GroupLayout(len(ranks)).meshes,
        )
        return self

    def mesh(self, name: str) -> MeshLayout:
        """Which chunk each rank works on in the mesh `name`; the workers are called for it once."""
        if name not in self.meshes:
            places = self.resolve(self.start_all("mesh_place", [((name,), {})] * self.world_size))
            dp_ranks = tuple(dp_rank for dp_rank, _ in places)
            collected = sorted(
                (dp_rank, rank) for rank, (dp_rank, is_collect) in enumerate(places) if is_collect
            )
            if min(dp_ranks) < 0 or [dp_rank for dp_rank, _ in collected] != list(
                range(max(dp_ranks) + 1)
            ):
                where = f"{self.name}: mesh {name!r}"
                got = f"data-parallel ranks {dp_ranks}, of which {[dp_rank for dp_rank, _ in collected]} are collected"
                raise WorkerError(
                    where, got=got, expected=f"one collected rank for each of 0 to {max(dp_ranks)}"
                )
            self.meshes[name] = MeshLayout(dp_ranks, tuple(rank for _, rank in collected))
        return self.meshes[name]

    def execute_all(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, on every rank with the same arguments; the outputs in rank order."""
        return self.resolve(self.start_all(method_name, [(args, kwargs)] * self.world_size))

    def method(self, name: str) -> GroupMethod:
        """The registered method `name`, bound to the group."""
        if name in self.methods:
            return GroupMethod(self._call, name, self.methods[name])
        if callable(getattr(self.worker_class, name, None)):
            where, expected = (
                f"{self.worker_class.__name__}.{name}",
                "one that says how its arguments reach the ranks",
            )
            fix = "Add @register(dispatch_mode=...) to it; an override needs it again."
            raise NotRegisteredError(
                where, got="a method without @register", expected=expected, fix=fix
            )
        known = ", ".join(sorted(self.methods))
        raise NotRegisteredError(
            f"{self.name}.{name}", got="no such method", expected=f"a registered one: {known}"
        )

    def as_worker(self) -> W:
        """A copy of the group, typed as its worker, whose registered methods are attributes of it."""
        view = copy(self)
        vars(view).update({name: self.method(name) for name in self.methods})
        return cast(W, view)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Only reached for names that are no attributes; without `methods` the group is not built yet.
        if name.startswith("_") or "methods" not in self.__dict__:
            raise AttributeError(name)
        return self.method(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.methods})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.world_size} workers)"

    def _call(
        self, method_name: str, registration: Registration, /, *args: Any, **kwargs: Any
    ) -> Any:
        if registration.is_rank_zero_only:
            handles = self.start_all(method_name, [(args, kwargs)])
            future = DataProtoFuture(itemgetter(0), handles, resolve=self.resolve)
            return future.get() if registration.blocking else future
        mode = registration.dispatch_mode
        mode_name = f"Dispatch.{mode.name}" if mode.name else "a dispatch function of its own"
        where = f"{self.name}.{method_name} on {self.world_size} ranks ({mode_name})"
        try:
            arguments, padding = dispatch.rank_arguments(mode, self, args, kwargs)
        except DispatchError as error:
            error.where = f"{where}: {error.where}"
            raise
        handles = self.start_all(method_name, arguments)
        # What the future knows of the group, wherever it is resolved.
        layout = GroupLayout(self.world_size, dict(self.meshes))
        collect = partial(
            dispatch.collect_outputs,
            collect_fn=mode.collect_fn,
            layout=layout,
            padding=padding,
            where=where,
        )
        # Rows that are all joined are copied by that, so the outputs may be lent.
        rows_of = None if mode.mesh is None or padding[0] else layout.mesh(mode.mesh).collected
        resolve = self.resolve if rows_of is None else partial(self.resolve, borrow=True)
        future = DataProtoFuture(collect, handles, resolve=resolve, rows_of=rows_of)
        return future.get() if registration.blocking else future


def describe_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """All arguments of a call in an error message: data by shape, plain values as they are, anything else by type."""
    described = []
    for name, value in (*enumerate(args), *kwargs.items()):
        text = type(value).__name__
        if isinstance(value, (DataProto, bool, int, float, type(None))):
            text = repr(value)
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            text = f"{text} {tuple(value.shape)} {value.dtype}"
        described.append(f"{name}={text}" if isinstance(name, str) else text)
    return ", ".join(described) or "no arguments"


class LocalWorkerGroup(WorkerGroup[W]):
    """Worker objects in this process, so that a debugger stops in them: one for each process of the pool.

    A call runs on one rank after the other and is over when it returns; with `blocking=False` the outcome, an error
    too, waits in the future. Ranks take turns, so they cannot meet in a collective. Raises WorkerError: a worker could
    not be built, or, from a call, failed; the original error is the cause. Errors of Quadriga's own stay as they are.
    """

    def __init__(
        self,
        cls_with_init: ClassWithInitArgs[W],
        resource_pool: ResourcePool | None = None,
        name: str = "",
    ) -> None:
        pool = resource_pool or ResourcePool([1])
        super().__init__(cls_with_init.cls, pool.world_size, name)
        self._entry, arguments = cls_with_init, (cls_with_init.args, cls_with_init.kwargs)
        seats = [
            (local_rank, count) for count in pool.process_on_nodes for local_rank in range(count)
        ]
        self._places = [
            WorkerPlace(rank, pool.world_size, *seat) for rank, seat in enumerate(seats)
        ]
        self.workers: list[W] = []
        for place in self._places:
            with placed(place):
                self.workers.append(
                    cls_with_init.cls.__new__(cls_with_init.cls, *arguments[0], **arguments[1])
                )
        self.resolve(self.start_all("__init__", [arguments] * pool.world_size))

    def start_all(self, method_name: str, per_rank: Sequence[Arguments]) -> list[Future[Any]]:
        """Run a method on the ranks, one after the other, to its end; a coroutine in an event loop of its own."""
        outcomes: list[Future[Any]] = []
        for rank, (args, kwargs) in zip(self.ranks, per_rank, strict=False):
            outcome: Future[Any] = Future()
            try:
                with PhaseTimer.mark(f"{self.name}.{method_name}"):
                    output = getattr(self.workers[rank], method_name)(*args, **kwargs)
                    outcome.set_result(
                        run_coroutine(output) if inspect.iscoroutine(output) else output
                    )
            except QuadrigaError as error:
                outcome.set_exception(error)
            except Exception as error:
                where = f"{self.name}[rank {rank}/{len(self.workers)}] failed in {method_name}"
                told = f"{type(error).__name__}: {error} (called with {describe_arguments(args, kwargs)})"
                failed = WorkerError(where, got=told)
                failed.__cause__ = error
                outcome.set_exception(failed)
            outcomes.append(outcome)
        return outcomes

    @staticmethod
    def resolve(handles: Sequence[Future[Any]], borrow: bool = False) -> list[Any]:
        return [handle.result() for handle in handles]

    @staticmethod
    def first_outcomes(handles: Sequence[Future[Any]]) -> dict[Future[Any], Any]:
        return {handle: handle.exception() or handle.result() for handle in handles}

    def restart(self, rank: int) -> None:
        with placed(self._places[rank]):
            self.workers[rank] = self._entry()


class WorkerGroups:
    """The worker groups of a run, one per role: all in this process, each with one worker.

    A backend with processes of its own is a subclass, which ends what it has started. It reads the other arguments: the
    pool of each role, the processes on each node of each pool and how many devices each has, if not one, device and
    limits of time, and Ray's environment.
    """

    groups: dict[str, WorkerGroup[Any]]
    is_remote = False  # whether the workers are other processes than the driver, so that a call need not hold it up

    def __init__(
        self,
        classes: Mapping[str, ClassWithInitArgs[Any]],
        roles: Mapping[str, str],
        pools: Mapping[str, Sequence[int]],
        settings: TrainerConfig,
        runtime_env: Mapping[str, Any] | None = None,
        devices: Mapping[str, int] | None = None,
    ) -> None:
        self.groups = {role: LocalWorkerGroup(entry, name=role) for role, entry in classes.items()}

    def await_start(self) -> None:
        """Wait until the processes have started and have imported the modules of their workers."""

    def describe(self) -> dict[str, str]:
        """What was chosen about processes and threads, with reasons, to be printed."""
        return {}

    def close(self) -> None:
        """Call the registered method `close` of all workers that have one, then `end`."""
        with ExitStack() as stack:  # one that fails keeps no other from it
            stack.callback(self.end)
            for group in reversed(list(self.groups.values())):
                if "close" in group.methods:
                    stack.callback(group.method("close"))

    def end(self) -> None:
        """End what was started, whatever it is doing and however far it has come. May be called again."""
