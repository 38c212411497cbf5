# SPDX-License-Identifier: Apache-2.0
"""The process of one device: it builds workers, runs their methods one after the other, and says what it is doing.

    driver                            the process (a Ray actor)
    ------                            ----------------------------------------------------
    load.remote, build.remote   --->  working thread    load, build, call: in the order of submission
    call.remote                 --->
    call_beside.remote          --->  second thread     methods that wait for what happens in others
    Call.ref                    <---    an output, or a Failure
    status.remote               --->  control thread    status, stacks: look at the frames of the other threads
                                <---    a Status                                                    heartbeat.py
                                      life thread       looks once a second whether the raylet is still its parent

What each thread waits for is in `docs/controller.md`, under Waits. What ends the process: `calls.end_processes`; the
end of its owner (Ray sees to it); the end of its raylet (the life thread does: Ray leaves a process that computes
alone). In each case Ray or the life thread kills the process group, so what a worker has started ends as well.
"""

import asyncio
import faulthandler
import gc
import inspect
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from types import FrameType
from typing import Any

import ray

from quadriga import streams
from quadriga.descendants import start_of, stat_of
from quadriga.errors import WorkerError
from quadriga.lazy import collector_paused, keep_modules
from quadriga.observe.timing import PhaseTimer

# A worker process has nothing of ours before this module: torch comes with these.
with collector_paused():
    from quadriga.single_controller.ray import transport
    from quadriga.single_controller.ray.errors import Failure, WorkerName, location_of, oom_kills
    from quadriga.single_controller.worker import Worker, WorkerPlace, placed
    from quadriga.single_controller.worker_group import ClassWithInitArgs, describe_arguments

LOOK_AFTER_RAYLET_S = 1.0


@dataclass(frozen=True)
class ProcessAddress:
    """Where a process runs, and what is needed to look after it."""

    node: str  # address of the node
    port: int  # a port that was free on it, for the ranks to meet if this is rank 0
    node_id: str  # Ray's id of the node
    raylet_port: int  # where the node's raylet responds
    pid: int  # the process on the node
    started: bytes  # its start in the kernel's clock ticks: pids are used again
    log: str  # the file on the node that takes its standard error
    oom_kills: (
        int  # the kernel's count of processes killed for lack of memory when this one started
    )


@dataclass(frozen=True)
class Status:
    """What a process is doing."""

    role: str = ""  # what runs; "": nothing
    method: str = ""
    running_s: float = 0.0  # for how many seconds
    phase: str = ""  # file, line and function where the working thread stands


@dataclass
class _Running:
    """A method in work, in the thread that made this; `outcome` is its packed output or a Failure."""

    role: str
    method: str
    arguments: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
    coroutine: Any = None
    outcome: Any = None
    thread: int = field(default_factory=threading.get_ident)
    start: float = field(default_factory=time.monotonic)

    def frames(self) -> Iterator[FrameType]:
        """The method's frames, innermost first."""
        # A coroutine that waits has left its thread, which shows the event loop alone.
        suspended: list[FrameType] = []
        coroutine = self.coroutine
        while (
            inspect.iscoroutine(coroutine)
            and coroutine.cr_frame is not None
            and not coroutine.cr_running
        ):
            suspended.append(coroutine.cr_frame)
            coroutine = coroutine.cr_await
        yield from reversed(suspended)
        frame = None if suspended else sys._current_frames().get(self.thread)
        while frame is not None:
            yield frame
            frame = frame.f_back


class WorkerProcess:
    """The actor's class; `name` and `rank` stand in front of the lines that the process prints."""

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._workers: dict[str, Worker] = {}
        self._names: dict[str, WorkerName] = {}
        self._not_built: dict[str, Failure] = {}
        self._running: _Running | None = None
        streams.install()
        # All threads: the one that computes is not the one that a signal meets.
        faulthandler.enable(all_threads=True)
        keep_modules()
        threading.Thread(
            target=_end_with_parent, args=(os.getppid(),), name="life", daemon=True
        ).start()

    def __repr__(self) -> str:
        # Ray puts it before each line that the process prints.
        return f"{self._name}[{self._rank}]"

    def address(self) -> ProcessAddress:
        """Where this process runs."""
        # Ray starts its processes with SIGINT blocked; what a worker starts from this thread shall not inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        node, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        with socket.socket(socket.AF_INET6 if ":" in node else socket.AF_INET) as probe:
            probe.bind((node, 0))
            port = probe.getsockname()[1]
        return ProcessAddress(
            node=node,
            port=port,
            node_id=node_id,
            raylet_port=next(
                each["NodeManagerPort"] for each in ray.nodes() if each["NodeID"] == node_id
            ),
            pid=os.getpid(),
            started=start_of(os.getpid()),
            log=os.readlink("/proc/self/fd/2"),
            oom_kills=oom_kills(),
        )

    def load(self, modules: Sequence[str]) -> Failure | None:
        """Import the modules of the workers to come. Returns why one could not be imported: `build` says so again."""
        with self._run("worker modules", "load") as running, collector_paused():
            for module in modules:
                import_module(module)
        return running.outcome

    def build(self, role: str, entry: ClassWithInitArgs[Any], place: WorkerPlace) -> Failure | None:
        """Build the worker of a role. Returns why it could not be built: calls to it return the same failure."""
        # What torch.distributed and others read.
        os.environ.update({name.upper(): str(value) for name, value in asdict(place).items()})
        self._names[role] = WorkerName(
            role, place.rank, place.world_size, ray.util.get_node_ip_address(), os.getpid()
        )

        with self._run(role, "__init__") as running, placed(place):
            running.arguments = entry.args, entry.kwargs
            self._workers[role] = entry()
            # What modules are made of stays; garbage collections that look at all of it take a tenth of a second each.
            gc.freeze()
        if running.outcome is not None:
            self._not_built[role] = running.outcome
        return running.outcome

    def call(
        self, header: bytes | tuple[str, str, Any], *values: Any, is_shown: bool = True
    ) -> Any:
        """Call a method of a role's worker. Returns its output, packed, or a Failure.
        `header`: role, method and body of a `transport.Message`, as `RayWorkerGroup.start_all` puts them together.
        `values`: what the message's references stand for. `is_shown`: whether `status` tells of it."""
        if isinstance(header, bytes):
            role_bytes, method_bytes, body = header.split(b"\n", 2)
            role, method = role_bytes.decode(), method_bytes.decode()
        else:
            role, method, body = header
        if role in self._not_built:
            return self._not_built[role]
        with (
            self._run(role, method, is_shown=is_shown) as running,
            PhaseTimer.mark(f"{role}.{method}"),
        ):
            if role not in self._workers:
                raise WorkerError(
                    f"{self}: {role}", got="a call", expected=f"one of {sorted(self._workers)}"
                )
            running.arguments = args, kwargs = transport.unpack(body, values)
            output = getattr(self._workers[role], method)(*args, **kwargs)
            if inspect.iscoroutine(output):
                running.coroutine = output
                output = asyncio.run(output)
            if inspect.isgenerator(output) or inspect.isasyncgen(output):
                raise WorkerError(
                    f"{role}.{method}",
                    got="a generator",
                    expected="an output",
                    fix="Return a list.",
                )
            try:
                running.outcome = transport.pack_result(output)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                got, expected = f"{type(error).__name__}: {error}", "a result that can be pickled"
                raise WorkerError(
                    f"output of {role}.{method}", got=got, expected=expected
                ) from error
        return running.outcome

    @ray.method(concurrency_group="beside")
    def call_beside(self, header: bytes | tuple[str, str, Any], *values: Any) -> Any:
        """`call` in a thread of its own."""
        return self.call(header, *values, is_shown=False)

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        """What the working thread is doing; returns while a method runs."""
        running = self._running
        if running is None:
            return Status()
        running_s = time.monotonic() - running.start
        return Status(running.role, running.method, running_s, location_of(running.frames()))

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """The frames of all threads but this one, the innermost last."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"  thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)).rstrip()}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        )

    @contextmanager
    def _run(self, role: str, method: str, *, is_shown: bool = True) -> Iterator[_Running]:
        running = _Running(role, method)
        if is_shown:
            self._running = running
        try:
            yield running
        except BaseException as error:
            # SystemExit and KeyboardInterrupt too: what a worker raises is its result, and the driver's to judge.
            name = self._names.get(role) or WorkerName(
                role, self._rank, self._rank + 1, pid=os.getpid()
            )
            running_s, given = (
                time.monotonic() - running.start,
                describe_arguments(*running.arguments),
            )
            running.outcome = Failure.of(error, name, method, given, running_s)
        finally:
            if is_shown:
                self._running = None


def state_of(pid: int) -> str:
    """What the kernel says about a process of this node that does not answer; "" for nothing of note."""
    states = {
        b"T": "stopped by a signal",
        b"t": "stopped by a debugger",
        b"D": "waits for a device",
    }
    return states.get(stat_of(pid)[0], "")


def _end_with_parent(parent: int) -> None:
    """Kill this process and its process group when its parent, the node's raylet, has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_AFTER_RAYLET_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
