# SPDX-License-Identifier: Apache-2.0
"""Base class of workers: one process of a role, with its rank and world size.

A worker does not depend on a backend. Its place comes from the backend that builds it (`placed`),
or else from the environment variables that torchrun sets. Without either, it is rank 0 of 1.
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
    """Rank and world size of a worker, and the address at which the ranks meet."""

    rank: int = 0
    world_size: int = 1
    # Rank and number of ranks on this node.
    local_rank: int = 0
    local_world_size: int = 1
    # Where the ranks meet to form process groups.
    master_addr: str = "localhost"
    master_port: int = 29500

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size):
            raise WorkerError(
                "worker's place",
                got=f"rank {self.rank}/{self.world_size}, "
                f"local rank {self.local_rank}/{self.local_world_size}",
                expected="ranks from 0 to below the world sizes",
            )

    @classmethod
    def from_environment(cls) -> "WorkerPlace":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        A field whose variable is not set has its default.

        Raises:
            WorkerError: a variable is not a whole number.
        """
        values = {}
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
    """Context manager: build workers at `place`, regardless of the environment."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


class Worker:
    """Base class of the workers of all roles. `place` is set before `__init__` runs.

    Attributes:
        place: rank, world size and meeting point. The next four attributes are its fields.
    """

    place: WorkerPlace
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    _meshes: dict[str, tuple[int, bool]]  # arguments of `register_mesh` by name of the mesh
    _recording: Recording | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "Worker":
        """Create the worker at its place; see `placed`."""
        # Set here, so that a subclass knows its rank before it calls super().__init__().
        worker = super().__new__(cls)
        place = _place.get() or WorkerPlace.from_environment()
        worker.place = place
        worker.rank = place.rank
        worker.world_size = place.world_size
        worker.local_rank = place.local_rank
        worker.local_world_size = place.local_world_size
        worker._meshes = {}
        return worker

    def register_mesh(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Declare the data-parallel rank of this worker in a mesh.

        Args:
            mesh_name: name of the mesh.
            dp_rank: data-parallel rank: the chunk of the data that this worker gets.
            is_collect: whether the output of this worker is collected. It must be True for exactly
                one worker of each data-parallel rank.
        """
        self._meshes[mesh_name] = (dp_rank, is_collect)

    def start_profile(
        self, tool: str, title: str, number: int, origin_ns: int, is_wanted: bool
    ) -> None:
        """Start a `Recording` of this process, unless another role of the process has done so.

        Args:
            tool: `global_profiler.tool`.
            title: name of the process in the trace.
            number: number of the process among all processes, from 0.
            origin_ns: time at which the trace begins, in nanoseconds since 1970.
            is_wanted: whether this process is to be recorded.
        """
        if is_wanted and Recording.current is None:
            self._recording = Recording(tool, title, number, origin_ns)

    def stop_profile(self) -> bytes:
        """End the recording that this worker started, and return it.

        Returns:
            The trace; b"" if another role of the process recorded it, or nothing was recorded.
        """
        recording = self._recording
        self._recording = None
        if recording is None or recording is not Recording.current:
            return b""
        return recording.finish()

    @register(Dispatch.ONE_TO_ALL)
    def mesh_place(self, mesh_name: str) -> tuple[int, bool]:
        """Return what this worker declared with `register_mesh`.

        Args:
            mesh_name: name of the mesh.

        Returns:
            Data-parallel rank in the mesh, and whether the output of this rank is collected.

        Raises:
            WorkerError: the worker did not register the mesh.
        """
        if mesh_name not in self._meshes:
            raise WorkerError(
                f"{type(self).__name__}: mesh {mesh_name!r}",
                got=f"rank {self.rank} registered {sorted(self._meshes) or 'no mesh'}",
                fix=f"Call self.register_mesh({mesh_name!r}, ...) where the worker builds its "
                "model.",
            )
        return self._meshes[mesh_name]

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `function(worker, chunk, ...)` on every rank."""
        return function(self, *args, **kwargs)

    @register(Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `function(...)` on rank 0."""
        return function(*args, **kwargs)
