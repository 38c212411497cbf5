# SPDX-License-Identifier: Apache-2.0
"""Process of one device: builds workers, runs their methods one by one, and reports its status.

    driver                            the process (a Ray actor)
    ------                            ----------------------------------------------------
    load.remote, build.remote   --->  working thread    load, build, call: in order of submission
    call.remote                 --->
    call_beside.remote          --->  two more threads  methods that run beside other methods
    Call.ref                    <---    an output, or a Failure
    status.remote               --->  control thread    status, stacks: frames of the other threads
                                <---    a Status                                     heartbeat.py
    take_call_times.remote      --->    the times of calls since the last request
                                      life thread       checks once a second that its raylet lives

The section Waits of `docs/controller.md` says what each thread waits for. The process is ended by
`calls.end_processes`, by Ray when its owner ends, and by the life thread when its raylet ends (Ray
would let a computing process continue). In each case its whole process group is killed, including
processes that a worker has started.
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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from types import FrameType
from typing import Any

import ray

from quadriga import streams
from quadriga.descendants import start_time_of, stat_of
from quadriga.errors import WorkerError
from quadriga.lazy import collector_paused, keep_modules
from quadriga.observe.call_times import RANK_WAITS, CallTime
from quadriga.observe.timing import PhaseTimer

# These imports load torch: in a worker process, this module is the first one of Quadriga.
with collector_paused():
    from quadriga.single_controller.ray import transport
    from quadriga.single_controller.ray.errors import Failure, WorkerName, location_of, oom_kills
    from quadriga.single_controller.worker import Worker, WorkerPlace, placed
    from quadriga.single_controller.worker_group import ClassWithInitArgs, describe_arguments

LOOK_AFTER_RAYLET_S = 1.0
# Calls that a process remembers. The driver takes them at the end of each step.
MAX_CALL_TIMES = 1000
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ProcessAddress:
    """Node and identity of a process, for contacting and ending it."""

    node: str  # address of the node
    port: int  # a free port of the node; the ranks meet at rank 0's address and port
    node_id: str  # Ray's id of the node
    raylet_port: int  # port of the node's raylet
    pid: int  # process id on the node
    started: bytes  # start time in the kernel's clock ticks; process ids are reused
    log: str  # path on the node of the file with its standard error
    # The kernel's count of processes killed for lack of memory, at the start of this process.
    oom_kills: int


@dataclass(frozen=True)
class Status:
    """The method that a process is running in its working thread."""

    role: str = ""  # "": it runs no method
    method: str = ""
    running_s: float = 0.0  # seconds since the method was called
    phase: str = ""  # file, line and function where the method is


@dataclass
class _RunningMethod:
    """A running method, in the thread that created this object."""

    role: str
    method: str
    arguments: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
    coroutine: Any = None  # the coroutine that the method returned; None: it is no coroutine
    outcome: Any = None  # its packed output, or a Failure
    thread: int = field(default_factory=threading.get_ident)
    start: float = field(default_factory=time.monotonic)
    # Seconds that the process had waited for other ranks before the method began.
    waited_before_s: float = field(default_factory=lambda: RANK_WAITS.seconds)

    def frames(self) -> Iterator[FrameType]:
        """The method's frames, innermost first."""
        # While a coroutine is suspended, its thread is in the event loop. The frames of the
        # coroutine and of the coroutines that it awaits, outermost first, show where it waits.
        suspended = []
        coroutine = self.coroutine
        while inspect.iscoroutine(coroutine) and coroutine.cr_frame and not coroutine.cr_running:
            suspended.append(coroutine.cr_frame)
            coroutine = coroutine.cr_await
        yield from reversed(suspended)
        frame = None if suspended else sys._current_frames().get(self.thread)
        while frame is not None:
            yield frame
            frame = frame.f_back


def _pack_output(output: Any, where: str) -> Any:
    """Pack the output of a method for the caller.

    Args:
        output: the output.
        where: the method, for errors.

    Raises:
        WorkerError: the output is a generator, or cannot be pickled.
    """
    # A generator would run in the caller, which has another copy of the worker's state.
    if inspect.isgenerator(output) or inspect.isasyncgen(output):
        raise WorkerError(where, got="a generator", expected="an output", fix="Return a list.")
    try:
        return transport.pack_result(output)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise WorkerError(
            f"output of {where}",
            got=f"{type(error).__name__}: {error}",
            expected="a result that can be pickled",
        ) from error


class WorkerProcess:
    """The Ray actor.

    Args:
        name: name of the group. Ray puts name and rank before each line that the process prints.
        rank: rank of the process.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank
        self._workers: dict[str, Worker] = {}  # by role
        self._names: dict[str, WorkerName] = {}  # by role
        self._not_built: dict[str, Failure] = {}  # by role: why the worker could not be built
        self._running: _RunningMethod | None = None  # the method in the working thread
        self._call_times: deque[CallTime] = deque(maxlen=MAX_CALL_TIMES)
        hide_other_devices()
        streams.install()
        # Report all threads, because the signal may arrive in a thread that does not compute.
        faulthandler.enable(all_threads=True)
        keep_modules()
        parent = os.getppid()
        threading.Thread(target=_end_with_parent, args=(parent,), name="life", daemon=True).start()

    def __repr__(self) -> str:
        # Ray's prefix of each line that the process prints.
        return f"{self._name}[{self._rank}]"

    def address(self) -> ProcessAddress:
        """Return the address of this process. Called once, before any other method."""
        # Ray blocks SIGINT in its processes. Unblock it, because processes that a worker starts
        # from this thread would inherit the block.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        node = ray.util.get_node_ip_address()
        node_id = ray.get_runtime_context().get_node_id()
        # Bind a socket to port 0, so that the kernel chooses a free port, and close it again.
        with socket.socket(socket.AF_INET6 if ":" in node else socket.AF_INET) as probe:
            probe.bind((node, 0))
            port = probe.getsockname()[1]
        [this_node] = [entry for entry in ray.nodes() if entry["NodeID"] == node_id]
        return ProcessAddress(
            node=node,
            port=port,
            node_id=node_id,
            raylet_port=this_node["NodeManagerPort"],
            pid=os.getpid(),
            started=start_time_of(os.getpid()),
            log=os.readlink("/proc/self/fd/2"),
            oom_kills=oom_kills(),
        )

    def load(self, modules: Sequence[str]) -> Failure | None:
        """Import the modules of workers that will be built, to save time in `build`.

        Args:
            modules: names of the modules.

        Returns:
            The failure of an import, with which `build` will fail, too; None if all succeed.
        """
        with self._run("worker modules", "load") as running, collector_paused():
            for module in modules:
                import_module(module)
        return running.outcome

    def build(self, role: str, entry: ClassWithInitArgs[Any], place: WorkerPlace) -> Failure | None:
        """Build the worker of a role.

        Args:
            role: the role.
            entry: class and arguments of the worker.
            place: rank and world size of the worker.

        Returns:
            The failure to build the worker; None if it was built. Later calls to the worker return
            the same failure.
        """
        # torch.distributed and other libraries read these variables.
        os.environ.update({name.upper(): str(value) for name, value in asdict(place).items()})
        self._names[role] = WorkerName(
            role, place.rank, place.world_size, ray.util.get_node_ip_address(), os.getpid()
        )
        with self._run(role, "__init__") as running, placed(place):
            running.arguments = entry.args, entry.kwargs
            self._workers[role] = entry()
            # Let garbage collections skip all objects that exist now: modules and workers stay
            # alive, and a collection that visits them takes 0.1 s.
            gc.freeze()
        if running.outcome is not None:
            self._not_built[role] = running.outcome
        return running.outcome

    def call(
        self, header: bytes | tuple[str, str, Any], *values: Any, is_shown: bool = True
    ) -> Any:
        """Call a method of a role's worker.

        Args:
            header: role, method and message body, joined by `RayWorkerGroup.start_all`: as bytes
                with a line each for role and method if the body is bytes, else as a tuple.
            values: values of the message's references, which Ray has fetched.
            is_shown: whether `status` and `take_call_times` report the call.

        Returns:
            The packed output, or a Failure.
        """
        if isinstance(header, bytes):
            role, method, body = header.split(b"\n", 2)
            header = (role.decode(), method.decode(), body)
        role, method, body = header
        # A role whose constructor failed answers every call with that failure.
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
            args, kwargs = transport.unpack(body, values)
            running.arguments = (args, kwargs)
            output = getattr(self._workers[role], method)(*args, **kwargs)
            if inspect.iscoroutine(output):
                # `status` reads the line at which the coroutine waits.
                running.coroutine = output
                output = asyncio.run(output)
            running.outcome = _pack_output(output, f"{role}.{method}")
        return running.outcome

    @ray.method(concurrency_group="beside")
    def call_beside(self, header: bytes | tuple[str, str, Any], *values: Any) -> Any:
        """Call a method in a thread beside the working thread; see `call`."""
        return self.call(header, *values, is_shown=False)

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        """Status of the working thread. Returns at once, even while a method runs there."""
        running = self._running
        if running is None:
            return Status()
        running_s = time.monotonic() - running.start
        return Status(running.role, running.method, running_s, location_of(running.frames()))

    @ray.method(concurrency_group="control")
    def take_call_times(self) -> list[CallTime]:
        """Times of the calls that have ended since the last request."""
        taken = []
        # The working thread may append meanwhile.
        while self._call_times:
            taken.append(self._call_times.popleft())
        return taken

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """Stacks of all threads except the calling one, the innermost frame last."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = []
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                stack = "".join(traceback.format_stack(frame)).rstrip()
                stacks.append(f"  thread {names.get(ident, ident)}\n{stack}")
        return "\n".join(stacks)

    @contextmanager
    def _run(self, role: str, method: str, *, is_shown: bool = True) -> Iterator[_RunningMethod]:
        """Context manager: run a method, and record its times.

        An exception does not leave the block: it becomes `outcome`, as a Failure.

        Args:
            role: role of the worker.
            method: name of the method.
            is_shown: whether `status` and `take_call_times` report the call.
        """
        running = _RunningMethod(role, method)
        if is_shown:
            self._running = running
        try:
            yield running
        except BaseException as error:
            # Including SystemExit and KeyboardInterrupt: the driver decides what to do about them.
            name = self._names.get(role)
            # Before `build`, the process does not know the number of ranks: at least its rank + 1.
            if name is None:
                name = WorkerName(role, self._rank, self._rank + 1, pid=os.getpid())
            running_s = time.monotonic() - running.start
            running.outcome = Failure.of(
                error, name, method, describe_arguments(*running.arguments), running_s
            )
        finally:
            if is_shown:
                seconds = time.monotonic() - running.start
                waited_s = RANK_WAITS.seconds - running.waited_before_s
                begin_s = time.time() - seconds
                times = CallTime(role, self._rank, method, begin_s, seconds, waited_s)
                self._call_times.append(times)
                self._running = None


def hide_other_devices() -> None:
    """Hide the GPUs that Ray has not assigned to this process, even if Ray is told not to do so.

    With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES every process sees all GPUs of its node, and
    the first ranks of two pools would use the same GPUs.
    """
    if os.environ.get(NOSET, "").lower() not in ("", "0", "false"):
        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(sorted(devices))


def state_of(pid: int) -> str:
    """Kernel's state of a process of this node; "" if the state does not explain its silence."""
    states = {
        b"T": "stopped by a signal",
        b"t": "stopped by a debugger",
        b"D": "waits for a device",
    }
    return states.get(stat_of(pid)[0], "")


def _end_with_parent(parent: int) -> None:
    """Kill this process and its process group when its parent, the node's raylet, ends."""
    while os.getppid() == parent:
        time.sleep(LOOK_AFTER_RAYLET_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
