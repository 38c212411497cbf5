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
from quadriga.single_controller.worker_group import ClassWithInitArgs, W, WorkerGroup


def describe_argument(value: Any) -> str:
    """An argument in an error message: data by shape, anything else by type."""
    if isinstance(value, DataProto):
        return repr(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype}"
    return repr(value) if isinstance(value, (bool, int, float, type(None))) else type(value).__name__


def describe_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """All arguments of a call in an error message."""
    named = [f"{key}={describe_argument(value)}" for key, value in kwargs.items()]
    return ", ".join([*map(describe_argument, args), *named]) or "no arguments"


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
        local_ranks, local_sizes = pool.local_rank_list(), pool.local_world_size_list()
        self.workers: list[W] = []
        for rank in range(pool.world_size):
            place = WorkerPlace(rank, pool.world_size, local_ranks[rank], local_sizes[rank])
            with placed(place):
                self.workers.append(
                    self._run(rank, "__init__", cls_with_init, cls_with_init.args, cls_with_init.kwargs)
                )

    def start(self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Run a method on one rank, to its end; a coroutine is run in an event loop of its own."""
        outcome: Future[Any] = Future()
        try:
            worker = self.workers[rank]
            outcome.set_result(
                self._run(rank, method_name, lambda: getattr(worker, method_name)(*args, **kwargs), args, kwargs)
            )
        except QuadrigaError as error:
            outcome.set_exception(error)
        return outcome

    @staticmethod
    def resolve(handles: Sequence[Future[Any]]) -> list[Any]:
        """The outputs; the error of the first rank that failed is raised."""
        return [handle.result() for handle in handles]

    def _run(
        self, rank: int, name: str, call: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        try:
            output = call()
            return asyncio.run(output) if inspect.iscoroutine(output) else output
        except QuadrigaError:
            raise
        except Exception as error:
            raise WorkerError(
                f"{self.name}[rank {rank}/{self.world_size}] failed in {name}",
                got=f"{type(error).__name__}: {error} (called with {describe_arguments(args, kwargs)})",
            ) from error
