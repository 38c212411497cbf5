# SPDX-License-Identifier: Apache-2.0
"""The local backend: workers in this process, so that a debugger stops in them.

Dispatch and collect are the real ones. A call runs on one rank after the other and is over when it
returns; with `blocking=False` the outcome, an error too, waits in the future. More than one worker is
for methods that need no collective: the ranks take turns, so they cannot meet.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from quadriga.errors import QuadrigaError, WorkerError
from quadriga.protocol import DataProto
from quadriga.single_controller.resource_pool import ResourcePool
from quadriga.single_controller.worker import WorkerPlace, placed
from quadriga.single_controller.worker_group import Arguments, ClassWithInitArgs, W, WorkerGroup, WorkerGroups


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
    """Worker objects in this process.

    Args:
        cls_with_init: what to build.
        resource_pool: one worker for each of its processes; None: a single worker.
        name: the role, for error messages; "": the name of the class.

    Raises:
        WorkerError: a worker could not be built, or, from a call, failed; the original error is the cause.
            Errors of Quadriga's own come through as they are.
    """

    def __init__(
        self, cls_with_init: ClassWithInitArgs[W], resource_pool: ResourcePool | None = None, name: str = ""
    ) -> None:
        pool = resource_pool or ResourcePool([1])
        super().__init__(cls_with_init.cls, pool.world_size, name)
        seats = [(local_rank, count) for count in pool.process_on_nodes for local_rank in range(count)]
        self.workers: list[W] = []
        for rank, (local_rank, local_size) in enumerate(seats):
            with placed(WorkerPlace(rank, pool.world_size, local_rank, local_size)):
                arguments = (cls_with_init.args, cls_with_init.kwargs)
                self.workers.append(self._run(rank, "__init__", cls_with_init.cls, arguments))

    def start_all(self, method_name: str, per_rank: Sequence[Arguments]) -> list[Future[Any]]:
        """Run a method on the ranks, one after the other, to its end; a coroutine in an event loop of its own."""
        outcomes: list[Future[Any]] = [Future() for _ in per_rank]
        for rank, (outcome, arguments) in enumerate(zip(outcomes, per_rank, strict=True)):
            try:
                outcome.set_result(self._run(rank, method_name, None, arguments))
            except QuadrigaError as error:
                outcome.set_exception(error)
        return outcomes

    @staticmethod
    def resolve(handles: Sequence[Future[Any]], borrow: bool = False) -> list[Any]:
        """The outputs; the error of the first rank that failed is raised."""
        return [handle.result() for handle in handles]

    def _run(self, rank: int, name: str, function: Callable[..., Any] | None, arguments: Arguments) -> Any:
        """Call a function, or the worker's method of that name if it is None."""
        args, kwargs = arguments
        try:
            call = function or getattr(self.workers[rank], name)
            output = call(*args, **kwargs)
            return asyncio.run(output) if inspect.iscoroutine(output) else output
        except QuadrigaError:
            raise
        except Exception as error:
            raise WorkerError(
                f"{self.name}[rank {rank}/{self.world_size}] failed in {name}",
                got=f"{type(error).__name__}: {error} (called with {describe_arguments(args, kwargs)})",
            ) from error


class LocalWorkerGroups(WorkerGroups):
    """One worker per role, in this process.

    Args:
        classes: what to build, by role.
        roles: pool of each role; all are this process.
        pools: processes on each node of each pool.
        device: what computes.
    """

    def __init__(
        self,
        classes: Mapping[str, ClassWithInitArgs[Any]],
        roles: Mapping[str, str],
        pools: Mapping[str, Sequence[int]],
        device: str,
    ) -> None:
        self.groups = {role: LocalWorkerGroup(entry, name=role) for role, entry in classes.items()}
