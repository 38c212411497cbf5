# SPDX-License-Identifier: Apache-2.0
"""One process of a role: what it knows of its place among the others.

A worker knows no backend. It takes its place from the backend that builds it (`placed`), else from the
environment that torchrun and its like set; alone, it is rank 0 of 1.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from quadriga.errors import WorkerError
from quadriga.observe.profiler import Recording
from quadriga.single_controller.dispatch import Dispatch, Execute, register


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker stands."""

    # Its number among all ranks of the group.
    rank: int = 0
    world_size: int = 1
    # Its number among the ranks on its node.
    local_rank: int = 0
    local_world_size: int = 1
    # Where the ranks meet to form process groups.
    master_addr: str = "localhost"
    master_port: int = 29500

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size):
            got = f"rank {self.rank}/{self.world_size}, local rank {self.local_rank}/{self.local_world_size}"
            raise WorkerError(
                "worker's place", got=got, expected="ranks from 0 to below the world sizes"
            )

    @classmethod
    def from_environment(cls) -> "WorkerPlace":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as far as they are set."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = field.name.upper()
            value = os.environ.get(name, str(field.default))
            if isinstance(field.default, int) and not value.isdecimal():
                raise WorkerError(
                    f"environment variable {name}", got=repr(value), expected="a whole number"
                )
            values[field.name] = type(field.default)(value)
        return cls(**values)


_place: ContextVar[WorkerPlace | None] = ContextVar("worker_place", default=None)


@contextmanager
def placed(place: WorkerPlace) -> Iterator[None]:
    """Workers built inside stand at `place`, whatever the environment says."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


class Worker:
    """Base class of every role's worker; it knows its `place` before `__init__` runs."""

    place: WorkerPlace
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    _meshes: dict[str, tuple[int, bool]]
    _recording: Recording | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "Worker":
        # Here and not in __init__, so that a subclass knows its rank before it calls super().__init__().
        worker = super().__new__(cls)
        worker.place = place = _place.get() or WorkerPlace.from_environment()
        worker.rank, worker.world_size = place.rank, place.world_size
        worker.local_rank, worker.local_world_size = place.local_rank, place.local_world_size
        worker._meshes = {}
        return worker

    def register_mesh(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Say which chunk of the data this rank works on, and whether its output is the one to collect: each
        data-parallel rank needs exactly one worker that is collected."""
        self._meshes[mesh_name] = (dp_rank, is_collect)

    def start_profile(
        self, tool: str, title: str, number: int, origin_ns: int, is_wanted: bool
    ) -> None:
        """Record this process, see `Recording`, unless that is being done already, as for another of its roles."""
        if is_wanted and Recording.current is None:
            self._recording = Recording(tool, title, number, origin_ns)

    def stop_profile(self) -> bytes:
        """End what this worker has begun. Returns the recording; nothing if there is none."""
        recording, self._recording = self._recording, None
        return (
            recording.finish() if recording is not None and recording is Recording.current else b""
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mesh_place(self, mesh_name: str) -> tuple[int, bool]:
        """Data-parallel rank in the mesh, and whether this rank is collected."""
        if mesh_name not in self._meshes:
            where = f"{type(self).__name__}: mesh {mesh_name!r}"
            fix = f"Call self.register_mesh({mesh_name!r}, ...) where the worker builds its model."
            raise WorkerError(
                where,
                got=f"rank {self.rank} registered {sorted(self._meshes) or 'no mesh'}",
                fix=fix,
            )
        return self._meshes[mesh_name]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `function(worker, chunk, ...)` on every rank: for work that has no method of its own."""
        return function(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        return function(*args, **kwargs)
