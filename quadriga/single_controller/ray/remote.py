# SPDX-License-Identifier: Apache-2.0
"""A function of the command line that runs in a process on the cluster, and seems to run where it was called.

    command line                                    process on the cluster (`Host`, an actor)
      run_on_cluster("module:function", ...)
        joins or starts the cluster      cluster.py
        starts the actor           ------------------> __init__: takes over its own output      relay.py
        asks for its output        <-----------------> output: in a thread of its own
                                                       run: the function, in another
        Ctrl-C                     ------------------> interrupt: KeyboardInterrupt in that one
        outcome                    <------------------
      returns, or raises what the function raised

Consumes: output, until the outcome is there. Waits for: one of the two, a signal, or the end of actor or cluster.
Unblocked by: any of them; a head that answers no more is noticed within seconds.
"""

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga import __version__
from quadriga.errors import WorkerError
from quadriga.observe.stopping import STOP_NOTICE, request_stop
from quadriga.single_controller.ray.cluster import Cluster, cluster, forwarded_variables, num_cores
from quadriga.single_controller.ray.deaths import Remains, cause_of_death, oom_kills
from quadriga.single_controller.ray.relay import CapturedOutput, Chunk, Screen, Size, Streams
from quadriga.single_controller.threads import THREADS

# How long the actor waits for something to report before it says that there is nothing.
REPORT_S = 5.0
# How often the command line looks at signals while it waits.
LOOK_S = 0.1
# How often it looks whether the cluster's head is still there: without one the workers go on for a minute, and then
# Ray ends them all, and this process, without a word.
LOOK_AT_HEAD_S = 3.0
# Time to end in after Ctrl-C: a step's batch may have to be let go of, and processes ended.
GRACE_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """How a function ended.

    Attributes:
        error: what it raised, if anything.
        trace: the traceback there.
        is_interrupted: whether that was KeyboardInterrupt.
    """

    error: BaseException | None = None
    trace: str = ""
    is_interrupted: bool = False


@dataclass(frozen=True)
class Report:
    """What an actor has to say.

    Attributes:
        chunks: of its output.
        is_over: the function has ended, and these are the last.
        pid: its process.
    """

    chunks: list[Chunk]
    is_over: bool
    pid: int


class Host:
    """The actor in which a function runs.

    Args:
        streams: of the command line.
        environment: variables of the command line; None: it has none of this name.
    """

    def __init__(self, streams: Streams, environment: Mapping[str, str | None]) -> None:
        self._captured = CapturedOutput(streams)
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_interrupted = False
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def run(self, target: str, args: Sequence[Any], version: str) -> Outcome:
        """Call a function, given as `module:name`, and say how it ended."""
        try:
            _check_version(version)
            with self._interruptible():
                module, _, name = target.partition(":")
                getattr(import_module(module), name)(*args)
            return Outcome()
        except KeyboardInterrupt:
            return Outcome(is_interrupted=True)
        except BaseException as error:
            return Outcome(_fit_to_travel(error), traceback.format_exc())
        finally:
            self._captured.end()

    @ray.method(concurrency_group="output")
    def output(self, num_arrived: int, sizes: dict[int, Size | None]) -> Report:
        """What was printed after the first `num_arrived` chunks; waits a little if that is nothing.

        Args:
            num_arrived: chunks that the caller has.
            sizes: of its terminals.
        """
        self._captured.resize(sizes)
        chunks, is_over = self._captured.take(num_arrived, REPORT_S)
        return Report(chunks, is_over, os.getpid())

    @ray.method(concurrency_group="control")
    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the function, or keep it from starting."""
        with self._lock:
            self._is_interrupted = True
            if self._thread is not None:
                # Python delivers signals to the main thread only, which is Ray's.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(KeyboardInterrupt)
                )

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Ask the function to end after what it has in work."""
        request_stop()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        with self._lock:
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._thread = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._thread = None


def _check_version(version: str) -> None:
    if version != __version__:
        raise WorkerError(
            "quadriga on the cluster",
            got=__version__,
            expected=f"{version}, as the command line has",
            fix="Use one environment for the cluster and the command.",
        )


def _fit_to_travel(error: BaseException) -> BaseException:
    """The error itself, or one that says the same and can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PickleError, TypeError, ValueError, AttributeError, ImportError, RecursionError):
        return WorkerError("training", got=f"{type(error).__name__}: {error}")
    return error


def run_on_cluster(
    target: str,
    args: Sequence[Any],
    *,
    ray_init: Mapping[str, Any],
    num_processes: int,
    timeline_file: str | None = None,
) -> None:
    """Call a function in a process on the cluster, and print here what it prints there.

    Args:
        target: `module:name` of the function.
        args: its arguments. After them it gets the parts of the start-up before it, each with the time of the wall
            clock at which it began.
        ray_init: arguments of `ray.init`.
        num_processes: that the function will start.
        timeline_file: where Ray's timeline is written in the end.

    Raises:
        KeyboardInterrupt: it was interrupted; it has seen that too.
        WorkerError: the cluster cannot be had or went away, or the process died.
        BaseException: what the function raised; its traceback there is a note of it.
    """
    start_up = [("cluster", time.time())]
    screen = Screen()
    # Ray goes on printing until it is shut down.
    with screen.sharing(), cluster(ray_init, num_processes) as joined:
        start_up.append(("driver's process", time.time()))
        host = _start_host(joined)
        watch = _Watch(host, host.run.remote(target, (*args, start_up), __version__), joined, screen)
        try:
            outcome = watch.follow()
        finally:
            watch.end()
        if timeline_file:
            Path(timeline_file).parent.mkdir(parents=True, exist_ok=True)
            ray.timeline(filename=timeline_file)
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    if outcome.error is not None:
        outcome.error.add_note(f"\nIn the driver on the cluster:\n{outcome.trace}")
        raise outcome.error


def _start_host(joined: Cluster) -> Any:
    here = ray.get_runtime_context().get_node_id()
    # Read when torch is loaded, and set by Ray unless it is there; the process shall compute as this one would.
    threads = os.environ.get(THREADS)
    options: dict[str, Any] = {
        "num_cpus": 0,
        "concurrency_groups": {"output": 1, "control": 1},
        "runtime_env": {"env_vars": {THREADS: threads or str(num_cores())}},
        # Next to the command line: its directory, its files and its disk are those of the run.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    actor = ray.remote(**options)(Host)
    variables = {} if joined.is_own else forwarded_variables()
    return actor.remote(Streams.here(), {**variables, THREADS: threads})


class _Watch:
    """Follows an actor until its function ends."""

    def __init__(self, host: Any, outcome: Any, joined: Cluster, screen: Screen) -> None:
        self._host, self._outcome, self._cluster, self._screen = host, outcome, joined, screen
        self._signals: list[int] = []
        self._num_arrived = self._pid = 0
        self._oom_kills = oom_kills()
        self._interrupted_at = self._looked_at = 0.0
        self._is_stop_asked = False

    def follow(self) -> Outcome:
        """Show its output until it ends. Returns how."""
        with self._listening():
            is_over = False
            while not is_over:
                sizes = Streams.here().sizes
                report = self._answer(self._host.output.remote(self._num_arrived, sizes))
                self._screen.show(report.chunks)
                self._num_arrived += len(report.chunks)
                self._pid = report.pid
                is_over = report.is_over
            return self._answer(self._outcome)

    def end(self) -> None:
        """End its process, and with it what it has started."""
        if not self._cluster.is_gone():
            ray.kill(self._host)
        elif self._pid and Path(f"/proc/{self._pid}").exists():
            # Without its head Ray kills nothing; the process is on this machine.
            os.kill(self._pid, signal.SIGKILL)

    def _answer(self, ref: Any) -> Any:
        """Wait for an answer of the actor, and mind what may come instead."""
        while True:
            self._mind_signals()
            if time.monotonic() - self._looked_at > LOOK_AT_HEAD_S:
                self._looked_at = time.monotonic()
                if self._cluster.is_gone():
                    raise self._cluster.gone()
            if ray.wait([ref], timeout=LOOK_S)[0]:
                break
        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            if self._interrupted_at:
                raise KeyboardInterrupt from error
            if self._cluster.is_gone():
                raise self._cluster.gone() from error
            cause = cause_of_death(error, Remains(oom_kills=oom_kills()), oom_kills_before=self._oom_kills, pid=0)
            raise WorkerError(
                "the driver's process on the cluster",
                got=cause.got,
                expected="a process that lives as long as the run",
                fix=f"{cause.fix} The same command goes on from the run's newest checkpoint.".strip(),
            ) from error

    def _mind_signals(self) -> None:
        num_stops = self._signals.count(signal.SIGTERM)
        if num_stops and not self._is_stop_asked:
            self._is_stop_asked = True
            print(STOP_NOTICE, file=sys.stderr, flush=True)
            self._host.stop.remote()
        if num_stops > 1:
            # The status of a process that a shell has seen die of it.
            raise SystemExit(128 + signal.SIGTERM)
        count = self._signals.count(signal.SIGINT)
        if count and not self._interrupted_at:
            self._interrupted_at = time.monotonic()
            self._host.interrupt.remote()
        if count > 1 or (count and time.monotonic() - self._interrupted_at > GRACE_S):
            raise KeyboardInterrupt

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Inside, SIGINT and SIGTERM are noted, and minded between two looks: no output is lost to them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
