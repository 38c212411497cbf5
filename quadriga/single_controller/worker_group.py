# SPDX-License-Identifier: Apache-2.0
"""Worker groups: many workers, called as one.

    group.update_actor(batch)                    group: a WorkerGroup of an actor class
      1. dispatch   the mode of update_actor splits the arguments by rank     dispatch.py
      2. start      the backend starts the method on every rank               start_all
      3. resolve    the backend or a DataProtoFuture waits for the outputs    protocol/operations.py
      4. collect    the mode makes one result of the outputs

A backend is a subclass: the workers of `LocalWorkerGroup` below are in this process, those of
`ray/group.py` in other processes. `group.as_worker()` is the group, typed as its worker class, so
that an editor finds the methods.
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
from quadriga.observe.call_times import CallTime
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
    """The called method does not exist in the worker class, or lacks `@register`."""


class ClassWithInitArgs(Generic[W]):
    """A worker class and the arguments to build it with, possibly in another process."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> W:
        """Build the worker."""
        return self.cls(*self.args, **self.kwargs)


class GroupMethod(partial):
    """A registered method of a group: `WorkerGroup._call` with its first two arguments.

    Calling it calls all ranks of the group.
    """

    def remote(self, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Call the method without waiting; `get()` of the returned future waits for the result."""
        name, registration = self.args
        return self.func(name, replace(registration, blocking=False), *args, **kwargs)


class WorkerGroup(GroupLayout, ABC, Generic[W]):
    """Base class of the backends. Registered methods of the workers become methods of the group.

    Args:
        worker_class: class of the workers.
        world_size: number of workers.
        name: the role, for messages. Defaults to the name of the class.

    Raises:
        WorkerError: a registered method has the name of a method of the group.
    """

    shares_processes: bool = False  # whether other roles run in the workers' processes

    def __init__(self, worker_class: type[W], world_size: int, name: str = "") -> None:
        super().__init__(world_size)
        self.worker_class = worker_class
        self.ranks = list(range(world_size))  # the ranks that are called
        self.name = name or worker_class.__name__
        self.methods: dict[str, Registration] = {}
        for attribute in dir(worker_class):
            method = getattr(worker_class, attribute, None)
            registration = getattr(method, dispatch.REGISTRATION, None)
            if registration is not None:
                self.methods[attribute] = registration
        clashes = sorted(method for method in self.methods if hasattr(type(self), method))
        if clashes:
            raise WorkerError(
                worker_class.__name__,
                f"registered methods {clashes}",
                "names that no worker group has",
            )

    @abstractmethod
    def start_all(self, method_name: str, per_rank: Sequence[Arguments]) -> list[Any]:
        """Start a method without waiting, on as many of `ranks` as there are arguments.

        Args:
            method_name: name of the method.
            per_rank: arguments for the first ranks of `ranks`; a single entry calls one rank.

        Returns:
            A handle of each output, in rank order, for `resolve`.
        """

    @staticmethod
    @abstractmethod
    def resolve(handles: Sequence[Any], borrow: bool = False) -> list[Any]:
        """Wait for handles and return their outputs.

        Args:
            handles: from `start_all`.
            borrow: whether outputs may be views of lent memory. The caller must copy their rows.

        Raises:
            WorkerError: the error of the first rank that failed.
        """

    @staticmethod
    @abstractmethod
    def first_outcomes(handles: Sequence[Any]) -> dict[Any, Any]:
        """Wait until at least one of several calls has ended.

        Args:
            handles: from `start_all`.

        Returns:
            Output or error of each call that has ended, by handle. Outputs are lent, as with
            `borrow` of `resolve`.
        """

    @abstractmethod
    def restart(self, rank: int) -> None:
        """End a worker in any state, and build another one in its place."""

    def use_ranks(self, ranks: Sequence[int]) -> Self:
        """Call only these ranks from now on, for methods without collectives."""
        self.ranks = sorted(ranks)
        self.world_size = len(ranks)
        self.meshes = GroupLayout(len(ranks)).meshes
        return self

    def mesh(self, name: str) -> MeshLayout:
        """Return the layout of a mesh. The first call for a mesh requests it from the workers.

        Raises:
            WorkerError: not exactly one rank is collected for each data-parallel rank.
        """
        if name in self.meshes:
            return self.meshes[name]
        # A pair for each rank: its data-parallel rank, and whether its output is collected.
        places = self.resolve(self.start_all("mesh_place", [((name,), {})] * self.world_size))
        dp_ranks = tuple(dp_rank for dp_rank, _ in places)
        collected = [rank for rank, (_, is_collect) in enumerate(places) if is_collect]
        # Sort by data-parallel rank, which is the order of the chunks.
        collected.sort(key=dp_ranks.__getitem__)
        collected_dp_ranks = [dp_ranks[rank] for rank in collected]
        if min(dp_ranks) < 0 or collected_dp_ranks != list(range(max(dp_ranks) + 1)):
            raise WorkerError(
                f"{self.name}: mesh {name!r}",
                got=f"data-parallel ranks {dp_ranks}, of which {collected_dp_ranks} are collected",
                expected=f"one collected rank for each of 0 to {max(dp_ranks)}",
            )
        self.meshes[name] = MeshLayout(dp_ranks, tuple(collected))
        return self.meshes[name]

    def execute_all(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, on every rank with the same arguments."""
        return self.resolve(self.start_all(method_name, [(args, kwargs)] * self.world_size))

    def method(self, name: str) -> GroupMethod:
        """Return the registered method of this name, bound to the group.

        Raises:
            NotRegisteredError: there is no such method, or it is not registered.
        """
        if name in self.methods:
            return GroupMethod(self._call, name, self.methods[name])
        if callable(getattr(self.worker_class, name, None)):
            raise NotRegisteredError(
                f"{self.worker_class.__name__}.{name}",
                got="a method without @register",
                expected="a dispatch mode, which says how arguments reach the ranks",
                fix="Add @register(dispatch_mode=...) to it; an override needs it again.",
            )
        raise NotRegisteredError(
            f"{self.name}.{name}",
            got="no such method",
            expected=f"a registered one: {', '.join(sorted(self.methods))}",
        )

    def as_worker(self) -> W:
        """Return a copy of the group, typed as the worker class, with methods as attributes."""
        view = copy(self)
        vars(view).update({name: self.method(name) for name in self.methods})
        return cast(W, view)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Only reached for missing attributes. Without `methods` the group is not built yet.
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
        """Call a registered method on the ranks.

        Args:
            method_name: name of the method.
            registration: options of the method.
            args: positional arguments of the call.
            kwargs: named arguments of the call.

        Returns:
            The result, or a future of it if the method is not blocking.
        """
        if registration.is_rank_zero_only:
            # A single entry of arguments starts the method on the first rank only.
            handles = self.start_all(method_name, [(args, kwargs)])
            future = DataProtoFuture(itemgetter(0), handles, resolve=self.resolve)
            return future.get() if registration.blocking else future

        mode = registration.dispatch_mode
        where = f"{self.name}.{method_name} on {self.world_size} ranks ({mode!r})"
        try:
            arguments, padding = dispatch.rank_arguments(mode, self, args, kwargs)
        except DispatchError as error:
            error.where = f"{where}: {error.where}"
            raise
        handles = self.start_all(method_name, arguments)

        # The future gets a copy of the layout: it may be resolved in another process.
        layout = GroupLayout(self.world_size, dict(self.meshes))
        collect = partial(
            dispatch.collect_outputs,
            collect_fn=mode.collect_fn,
            layout=layout,
            padding=padding,
            where=where,
        )
        future = DataProtoFuture(collect, handles, resolve=self.resolve)
        if mode.mesh is not None and not padding[0]:
            # `collect_rows` copies the outputs, so they may be views of lent memory. It joins only
            # the rows of collected ranks.
            future = replace(
                future,
                resolve=partial(self.resolve, borrow=True),
                rows_of=layout.mesh(mode.mesh).collected,
            )
        return future.get() if registration.blocking else future


def describe_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Describe the arguments of a call for an error message: data by shape, objects by type."""
    described = []
    for name, value in (*enumerate(args), *kwargs.items()):
        text = type(value).__name__
        if isinstance(value, (DataProto, bool, int, float, type(None))):
            text = repr(value)
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            text = f"{text} {tuple(value.shape)} {value.dtype}"
        # The name of a positional argument is its number, which is left out.
        described.append(f"{name}={text}" if isinstance(name, str) else text)
    return ", ".join(described) or "no arguments"


class LocalWorkerGroup(WorkerGroup[W]):
    """Worker objects in this process, where a debugger can stop: one for each process of the pool.

    A call runs on one rank after the other and is complete when it returns. With `blocking=False`
    the future holds the output or the error. Methods cannot use collectives, because the ranks take
    turns.

    Args:
        cls_with_init: class and arguments of the workers.
        resource_pool: number of workers; one by default.
        name: the role, for messages. Defaults to the name of the class.

    Raises:
        WorkerError: a worker could not be built, or a call failed. The original error is the cause;
            errors of Quadriga itself are raised unchanged.
    """

    def __init__(
        self,
        cls_with_init: ClassWithInitArgs[W],
        resource_pool: ResourcePool | None = None,
        name: str = "",
    ) -> None:
        pool = resource_pool or ResourcePool([1])
        entry = cls_with_init
        super().__init__(entry.cls, pool.world_size, name)
        self._entry = entry
        self._places: list[WorkerPlace] = []
        self.workers: list[W] = []
        # On each node of the pool, ranks are counted from 0.
        for num_processes in pool.process_on_nodes:
            for local_rank in range(num_processes):
                place = WorkerPlace(len(self._places), pool.world_size, local_rank, num_processes)
                self._places.append(place)
                # Create the object without `__init__`, which is called below.
                with placed(place):
                    worker = entry.cls.__new__(entry.cls, *entry.args, **entry.kwargs)
                self.workers.append(worker)
        # `__init__` runs like any other method, so that its errors name the rank.
        arguments = (entry.args, entry.kwargs)
        self.resolve(self.start_all("__init__", [arguments] * pool.world_size))

    def start_all(self, method_name: str, per_rank: Sequence[Arguments]) -> list[Future[Any]]:
        """Run a method on one rank after the other, a coroutine in an event loop of its own.

        Args:
            method_name: name of the method.
            per_rank: arguments for the first ranks of `ranks`.

        Returns:
            A future for each rank that holds the output or the error.
        """
        outcomes = []
        for rank, (args, kwargs) in zip(self.ranks, per_rank, strict=False):
            outcome = Future()
            try:
                with PhaseTimer.mark(f"{self.name}.{method_name}"):
                    output = getattr(self.workers[rank], method_name)(*args, **kwargs)
                    if inspect.iscoroutine(output):
                        output = run_coroutine(output)
                    outcome.set_result(output)
            # `resolve` raises the error, as with workers in other processes.
            except QuadrigaError as error:
                outcome.set_exception(error)
            except Exception as error:
                where = f"{self.name}[rank {rank}/{len(self.workers)}] failed in {method_name}"
                call = f"called with {describe_arguments(args, kwargs)}"
                worker_error = WorkerError(where, got=f"{type(error).__name__}: {error} ({call})")
                worker_error.__cause__ = error
                outcome.set_exception(worker_error)
            outcomes.append(outcome)
        return outcomes

    @staticmethod
    def resolve(handles: Sequence[Future[Any]], borrow: bool = False) -> list[Any]:
        """Return the outputs of calls, or raise the first error.

        Args:
            handles: from `start_all`.
            borrow: not used: outputs are in this process, so nothing is copied.
        """
        return [handle.result() for handle in handles]

    @staticmethod
    def first_outcomes(handles: Sequence[Future[Any]]) -> dict[Future[Any], Any]:
        """Return the output or error of every call: in this process, all have ended already."""
        return {handle: handle.exception() or handle.result() for handle in handles}

    def restart(self, rank: int) -> None:
        """Replace the worker of a rank by a new one with the same arguments."""
        with placed(self._places[rank]):
            self.workers[rank] = self._entry()


class WorkerGroups:
    """The worker groups of a run, one per role: all in this process, each with one worker.

    A backend with other processes is a subclass. This class only reads `classes`; the other
    arguments are for such subclasses.

    Args:
        classes: worker class and its arguments, by role.
        roles: name of the pool, by role.
        pools: number of processes on each node, by name of the pool.
        settings: device and time limits.
        runtime_env: Ray's environment of the processes.
        devices: number of devices per process, by pool, where it is not 1.
    """

    groups: dict[str, WorkerGroup[Any]]
    is_remote = False  # whether workers run in other processes, so that a call need not block

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
        """Wait until the processes have started and have imported the modules of their workers.

        Does nothing here, where there are no other processes.
        """

    def describe(self) -> dict[str, str]:
        """Choices about processes and threads, with reasons, to be printed."""
        return {}

    def take_call_times(self) -> list[CallTime]:
        """Times of the calls of all ranks since the last request; empty with a single process."""
        return []

    def close(self) -> None:
        """Call the registered method `close` of all workers that have one, then `end`."""
        with ExitStack() as stack:  # runs every callback, even if another one fails
            stack.callback(self.end)
            for group in reversed(self.groups.values()):
                if "close" in group.methods:
                    stack.callback(group.method("close"))

    def end(self) -> None:
        """End all processes that were started, in any state. May be called again.

        Does nothing here, where no process was started.
        """
