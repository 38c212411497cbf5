# SPDX-License-Identifier: Apache-2.0
"""The process of one device: it builds workers, runs their methods one after the other, and says what it is doing.

    driver                            the process (a Ray actor)
    ------                            ----------------------------------------------------
    RemoteProcess.build, .call  --->  working thread    build, call: in the order of submission
    Call.ref                    <---    an output, or a Failure
    ask_status                  --->  control thread    status: looks at the working thread's frames
                                <---    a Status
                                      life thread       looks once a second whether the raylet is still its parent

    working thread   consumes calls; waits for their arguments (Ray fetches them) and for other ranks in collectives
    control thread   consumes questions; waits for nothing but the interpreter's lock
    life thread      waits for the end of the node's raylet; then kills the process and all of its process group

What ends the process: `end_processes`; the end of its owner (Ray sees to it); the end of its raylet (the life thread
does: Ray leaves a process that computes alone). In each case Ray or the life thread kills the process group, so what
a worker has started goes as well.
"""

import asyncio
import faulthandler
import gc
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import ray

from quadriga.errors import WorkerError
from quadriga.single_controller.local import describe_arguments
from quadriga.single_controller.ray import transport
from quadriga.single_controller.ray.deaths import oom_kills
from quadriga.single_controller.ray.failures import Failure, Seat, location_of
from quadriga.single_controller.ray.letters import seal, unseal
from quadriga.single_controller.ray.nodes import own_raylet_port
from quadriga.single_controller.worker import Worker, WorkerPlace, placed

LOOK_AFTER_RAYLET_S = 1.0


@dataclass(frozen=True)
class ProcessAddress:
    """Where a process runs, and what is needed to look after it.

    Attributes:
        node: address of the node.
        port: a port that was free on it, for the ranks to meet if this is rank 0.
        node_id: Ray's id of the node.
        raylet_port: where the node's raylet answers.
        pid, started: the process on the node, and its start in the kernel's clock ticks: pids are used again.
        log: the file on the node that takes its standard error.
        oom_kills: the kernel's count of processes killed for lack of memory when this one started.
    """

    node: str
    port: int
    node_id: str
    raylet_port: int
    pid: int
    started: int
    log: str
    oom_kills: int


@dataclass(frozen=True)
class Status:
    """What a process is doing.

    Attributes:
        role, method: what runs; "": nothing.
        running_s: for how many seconds.
        phase: file, line and function where the working thread stands.
    """

    role: str = ""
    method: str = ""
    running_s: float = 0.0
    phase: str = ""


@dataclass
class _Running:
    """A method in work."""

    role: str
    method: str
    thread: int = field(default_factory=threading.get_ident)
    start: float = field(default_factory=time.monotonic)
    coroutine: Any = None

    @property
    def running_s(self) -> float:
        return time.monotonic() - self.start

    def status(self) -> Status:
        return Status(self.role, self.method, self.running_s, location_of(self._frames()))

    def _frames(self) -> Iterator[FrameType]:
        """The working thread's frames, innermost first."""
        # A coroutine that waits has left its thread, which shows the event loop alone.
        suspended = list(_suspended_frames(self.coroutine))
        yield from reversed(suspended)
        frame = None if suspended else sys._current_frames().get(self.thread)
        while frame is not None:
            yield frame
            frame = frame.f_back


def _suspended_frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a coroutine that waits, outermost first; none if it runs."""
    while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None and not coroutine.cr_running:
        yield coroutine.cr_frame
        coroutine = coroutine.cr_await


class WorkerProcess:
    """The actor's class; `worker_actor` makes it one.

    Args:
        name: what the process is called in front of the lines that it prints.
        rank: its number among those of that name.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._node = ray.util.get_node_ip_address()
        # Chosen once: every driver that asks must hear of the same meeting point.
        self._port = _free_port(self._node)
        self._workers: dict[str, Worker] = {}
        self._seats: dict[str, Seat] = {}
        self._not_built: dict[str, Failure] = {}
        self._running: _Running | None = None
        # All threads: the one that computes is not the one that a signal meets.
        faulthandler.enable(all_threads=True)
        end_with_parent()

    def __repr__(self) -> str:
        # Ray puts it before each line that the process prints.
        return f"{self._name}[{self._rank}]"

    def address(self) -> ProcessAddress:
        """Where this process runs."""
        # Ray starts its processes with SIGINT blocked; what a worker starts from this thread shall not inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return ProcessAddress(
            node=self._node,
            port=self._port,
            node_id=ray.get_runtime_context().get_node_id(),
            raylet_port=own_raylet_port(),
            pid=os.getpid(),
            started=start_of(os.getpid()),
            log=os.readlink("/proc/self/fd/2"),
            oom_kills=oom_kills(),
        )

    def build(self, role: str, cls_with_init: Callable[[], Worker], place: WorkerPlace) -> Failure | None:
        """Build the worker of a role.

        Returns:
            None, or why it could not be built; calls to it are answered with the same failure.
        """
        os.environ.update(_environment(place))
        self._seats[role] = Seat(role, place.rank, place.world_size, self._node, os.getpid())

        def describe() -> str:
            return describe_arguments(getattr(cls_with_init, "args", ()), getattr(cls_with_init, "kwargs", {}))

        def build() -> Worker:
            with placed(place):
                return cls_with_init()

        built = self._run(role, "__init__", build, describe)
        if isinstance(built, Failure):
            self._not_built[role] = built
            return built
        self._workers[role] = built
        # What modules are made of stays; garbage collections that look at all of it take a tenth of a second each.
        gc.freeze()
        return None

    def call(self, letter: Any, *values: Any) -> Any:
        """Call a method of a role's worker.

        Args:
            letter: role, method and the header of a `transport.Message`, sealed: Ray takes time for each argument.
            values: what the message's references stand for.

        Returns:
            what `transport.pack_result` makes of the output, or a Failure.
        """
        role, method, header = unseal(letter)
        if role in self._not_built:
            return self._not_built[role]
        given: list[Any] = [(), {}]

        def call() -> Any:
            if role not in self._workers:
                raise WorkerError(f"{self}: {role}", got="a call", expected=f"one of {sorted(self._workers)}")
            given[:] = transport.unpack(header, values)
            output = getattr(self._workers[role], method)(*given[0], **given[1])
            if inspect.iscoroutine(output):
                output = self._run_coroutine(output)
            if inspect.isgenerator(output) or inspect.isasyncgen(output):
                # Ray would take its first value for the output.
                raise WorkerError(f"{role}.{method}", got="a generator", expected="an output", fix="Return a list.")
            return transport.pack_result(output)

        return self._run(role, method, call, lambda: describe_arguments(*given))

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        """What the working thread is doing; answers while a method runs."""
        running = self._running
        return Status() if running is None else running.status()

    def _run(self, role: str, method: str, work: Callable[[], Any], describe: Callable[[], str]) -> Any:
        running = self._running = _Running(role, method)
        try:
            return work()
        except BaseException as error:
            # SystemExit and KeyboardInterrupt too: what a worker raises is its answer, and the driver's to judge.
            seat = self._seats.get(role) or Seat(role, self._rank, self._rank + 1, self._node, os.getpid())
            return Failure.of(error, seat, method, describe(), running.running_s)
        finally:
            self._running = None

    def _run_coroutine(self, coroutine: Any) -> Any:
        assert self._running is not None
        self._running.coroutine = coroutine
        return asyncio.run(coroutine)


def _environment(place: WorkerPlace) -> dict[str, str]:
    """What torch.distributed and others read."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
    }


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def start_of(pid: int) -> int:
    """When a process of this node started, in clock ticks since the node did; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # A zombie has ended; it only waits to be reaped.
    return 0 if fields[0] in "ZX" else int(fields[19])


def end_with_parent() -> None:
    """Kill this process and its process group when its parent has ended; for actors: when the node's raylet has."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_AFTER_RAYLET_S)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="life", daemon=True).start()


def worker_actor(**options: Any) -> Any:
    """`WorkerProcess` as a Ray actor class; its constructor takes the process's name and rank.

    Args:
        options: further options of `ray.remote`: num_cpus, num_gpus, scheduling_strategy, runtime_env, name, lifetime.
    """
    # In order even if the arguments of the first call are the last to be there: ranks meet in their collectives.
    fixed: dict[str, Any] = {"concurrency_groups": {"control": 1}, "allow_out_of_order_execution": False}
    return ray.remote(**fixed, **options)(WorkerProcess)


@dataclass(frozen=True)
class RemoteProcess:
    """The driver's handle of a worker process.

    Attributes:
        actor: Ray's handle of the `WorkerProcess`.
        address: where it runs.
        rank, world_size: its number in its group.
    """

    actor: Any
    address: ProcessAddress
    rank: int
    world_size: int

    def build(self, role: str, cls_with_init: Callable[[], Worker], place: WorkerPlace) -> "Call":
        """Start building the worker of a role; resolves to None."""
        args, kwargs = getattr(cls_with_init, "args", ()), getattr(cls_with_init, "kwargs", {})
        ref = self.actor.build.remote(role, cls_with_init, place)
        return self._started(ref, role, "__init__", describe_arguments(args, kwargs))

    def call(self, role: str, method: str, message: transport.Message, arguments: "Arguments") -> "Call":
        """Start a method of a role's worker.

        Args:
            message: its arguments, packed.
            arguments: describes them, if it comes to that.
        """
        ref = self.actor.call.remote(seal((role, method, message.header)), *message.refs)
        return self._started(ref, role, method, arguments)

    def _started(self, ref: Any, role: str, method: str, arguments: "Arguments") -> "Call":
        seat = Seat(role, self.rank, self.world_size, self.address.node, self.address.pid)
        return Call(ref, self.actor, self.address, seat, method, arguments)


Arguments = str | Callable[[], str]


@dataclass(frozen=True)
class Call:
    """The handle of a method that was started: what `WorkerGroup.start` returns.

    Attributes:
        ref: Ray's reference of what it will return.
        actor: the process that runs it.
        address: where that is; None: not known yet.
        seat, method: what was called.
        arguments: describes the arguments, for an error message. A function may hold on to them; a call that is kept
            or pickled has the text instead.
    """

    ref: Any
    actor: Any
    address: ProcessAddress | None
    seat: Seat
    method: str
    arguments: Arguments

    def described(self) -> str:
        """The arguments, data by shape."""
        return self.arguments if isinstance(self.arguments, str) else self.arguments()

    def without_arguments(self) -> "Call":
        """The same call, without a hold on its arguments."""
        return Call(self.ref, self.actor, self.address, self.seat, self.method, self.described())

    def __reduce__(self) -> tuple[Any, ...]:
        return Call, (self.ref, self.actor, self.address, self.seat, self.method, self.described())

    def __str__(self) -> str:
        return f"{self.seat}.{self.method}"


def ask_status(actors: Sequence[Any], limit_s: float) -> list[Status | None]:
    """What processes are doing; None for one that does not answer in time, or is gone."""
    refs = [actor.status.remote() for actor in actors]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s)
    return [_status(ref) if ref in ready else None for ref in refs]


def _status(ref: Any) -> Status | None:
    try:
        return ray.get(ref)
    except ray.exceptions.RayError:
        # Gone: whoever waits for its answer learns that from the call itself, with the reason.
        return None
