# SPDX-License-Identifier: Apache-2.0
"""Errors of worker processes on the driver: exceptions of methods, and deaths of processes.

If a method raises, its process returns a `Failure`, which describes the exception in strings. Ray
sees a successful call. Therefore it does not wrap the error, and an exception that cannot be
pickled is reported like any other.

When a process dies, Ray reports its end and, if it exited by itself, its exit status, but no
signal. Python's fault handler reports most fatal signals at the end of the process's standard
error. A SIGKILL leaves no report, but the kernel counts the processes that it kills for lack of
memory.
"""

import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RuntimeEnvSetupError

from quadriga import errors
from quadriga.errors import PeerLostError, QuadrigaError, WorkerError
from quadriga.observe.watchdog import LIBRARIES
from quadriga.single_controller import dispatch

NUM_LAST_LINES = 20  # lines of a dead process's standard error that are shown
_PACKAGE = Path(errors.__file__).parent
# Beginnings of the paths of files that only carry a call to a worker.
_PLUMBING = (str(Path(__file__).parent), dispatch.__file__)

# ---- a method that raised -----------------------------------------------------------------------

_LOST_PEER = re.compile(
    r"gloo/transport|Connection (closed|reset) by|ncclRemoteError|communicator was aborted"
)
"""Messages of the bare RuntimeErrors that collectives raise when another process has left."""


@dataclass(frozen=True)
class WorkerName:
    """A worker and its process, printed as `actor[rank 3/8 on 10.0.0.2]`."""

    role: str  # name of the group
    rank: int
    world_size: int
    node: str = ""  # address of its node; "": not known yet
    pid: int = 0  # process id on the node

    def __str__(self) -> str:
        node = f" on {self.node}" if self.node else ""
        return f"{self.role}[rank {self.rank}/{self.world_size}{node}]"


@dataclass(frozen=True)
class Failure:
    """Description of an exception, returned by a worker instead of an output."""

    worker: WorkerName
    method: str
    arguments: str  # arguments of the call, data by shape
    summary: str  # type and message of the exception
    location: str  # file, line and function of the innermost frame outside libraries
    trace: str  # formatted traceback, without the frames that carried the call to the worker
    time_s: float  # wall clock time of the exception, in seconds
    running_s: float  # running time of the method until then, in seconds
    # The exception if it is an error of Quadriga, or a PeerLostError if a collective failed because
    # another process left it; else None. `error.worker` is set if this worker has called another
    # one, which failed.
    error: QuadrigaError | None = None

    @classmethod
    def of(
        cls, error: BaseException, worker: WorkerName, method: str, arguments: str, running_s: float
    ) -> "Failure":
        """Describe an exception.

        Args:
            error: the exception.
            worker: the worker that raised it.
            method: name of the called method.
            arguments: description of the call's arguments.
            running_s: running time of the method until then, in seconds.
        """
        # Skip the outermost frames, which carried the call to the worker.
        first = error.__traceback__
        while first is not None and not is_of_interest(first.tb_frame.f_code.co_filename):
            first = first.tb_next
        frames = first or error.__traceback__

        # The error in a class that the driver has, too.
        driver_error = None
        if isinstance(error, QuadrigaError):
            # Instead of a user's subclass, take its nearest base class in `errors`.
            kind = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
            if _is_lost_peer(error):
                kind = PeerLostError
            # As texts, which can be pickled whatever the worker had put there.
            driver_error = kind(*map(str, (error.where, error.got, error.expected, error.fix)))
            driver_error.worker = error.worker
        elif _is_lost_peer(error):
            got = str(error).partition("\n")[0]
            driver_error = PeerLostError("a collective", got, "all ranks to take part")

        return cls(
            worker,
            method,
            arguments,
            summary="".join(traceback.format_exception_only(error)).strip(),
            location=location_of(reversed([frame for frame, _ in traceback.walk_tb(frames)])),
            trace="".join(traceback.format_exception(type(error), error, frames)),
            time_s=time.time(),
            running_s=running_s,
            error=driver_error,
        )

    def as_error(self) -> QuadrigaError:
        """Make the error to raise on the driver, with a note of the traceback.

        Returns:
            `error` with the worker and the method before its place; a WorkerError if the exception
            was none of Quadriga.
        """
        where = f"{self.worker} failed in {self.method}"
        error = self.error
        if error is None:
            got = f"{self.summary} (at {self.location}; after {self.running_s:.1f} s, "
            got += f"called with {self.arguments})"
            error = WorkerError(where, got=got)
        elif not error.worker:
            where = f"{where}: {error.where}"
            error = type(error)(where, got=error.got, expected=error.expected, fix=error.fix)
        # Otherwise the error names another worker already, and only the note names this worker.
        error.worker = error.worker or str(self.worker)
        process = f"{self.worker}, process {self.worker.pid}"
        error.add_note(f"\n{process}, called with {self.arguments}:\n{self.trace}")
        return error

    def __str__(self) -> str:
        return f"{self.worker} failed in {self.method}: {self.summary} (at {self.location})"


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, says that another process left a collective."""
    while error is not None:
        if isinstance(error, dist.DistNetworkError):
            return True
        if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
            return True
        error = error.__cause__
    return False


def is_of_interest(filename: str) -> bool:
    """Whether a file is the user's or Quadriga's, and does not only carry calls to workers."""
    if filename.startswith(f"{_PACKAGE}/"):
        return not filename.startswith(_PLUMBING)
    return not filename.startswith((*LIBRARIES, "<frozen "))


def location_of(frames: Iterator[FrameType]) -> str:
    """Describe where a thread is, in code of the user or Quadriga.

    Args:
        frames: the frames of the thread, innermost first.

    Returns:
        File, line and function of the innermost frame outside libraries. If that frame has called a
        library, also those of the innermost frame of all. If all frames are in libraries, only those
        of the innermost one.
    """
    innermost = next(frames, None)
    frame = innermost
    while frame is not None and not is_of_interest(frame.f_code.co_filename):
        frame = next(frames, None)
    if frame is None or frame is innermost:
        return _describe_frame(innermost)
    assert innermost is not None, "there is a frame"
    return f"{_describe_frame(frame)}, inside {_describe_frame(innermost)}"


def _describe_frame(frame: FrameType | None) -> str:
    """File, line and function of a frame."""
    if frame is None:
        return "an unknown place"
    path = frame.f_code.co_filename
    # Show a path relative to site-packages or to the checkout. Site-packages come first, because
    # they may be in the checkout.
    for root in (*LIBRARIES, str(_PACKAGE.parent)):
        path = path.removeprefix(f"{root}/")
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_qualname}"


# ---- a process that is gone ---------------------------------------------------------------------

_TAIL_BYTES = 64 * 1024
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_RAY_OUT_OF_MEMORY = re.compile(
    r"Memory on the node \(.*?\).*? was ([\d.]+\w+)(?: used)? / ([\d.]+\w+)", re.DOTALL
)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LESS_MEMORY = (
    "Give the node more memory, put fewer processes on it, or lower the micro-batches; "
    "`RAY_memory_usage_threshold`, set where Ray is started, is the share of the memory that it "
    "allows."
)
# Pairs of a cause of death and a fix. `_RAY_MESSAGES` finds them by words of Ray's messages.
_KERNEL = ("killed by the kernel while the node was out of memory", _LESS_MEMORY)
_SILENT = (
    "it ended without a word, as after SIGKILL or os._exit()",
    "If nobody killed it, `dmesg` on its node may say why.",
)
_NODE_GONE = ("its node is gone", "`ray status` lists the nodes that are there.")
_RAY_MESSAGES = {
    "killed by `ray.kill`": ("killed with ray.kill, as when its group is closed", ""),
    "owner has died": ("ended because the driver, or the worker that started it, is gone", ""),
    "node has died": _NODE_GONE,
    "node was terminated": _NODE_GONE,
    "End of file": _SILENT,
    "Socket closed": _SILENT,
}


@dataclass(frozen=True)
class CrashLog:
    """Traces of a dead process on its node."""

    last_lines: tuple[str, ...] = ()  # the end of its standard error
    # Number of processes that the kernel has killed for lack of memory since the node was booted.
    oom_kills: int = 0


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that this node's kernel has killed for lack of memory; 0 if unknown."""
    text = vmstat.read_text(encoding="ascii") if vmstat.exists() else ""
    count = re.search(r"^oom_kill (\d+)", text, re.MULTILINE)
    return int(count[1]) if count else 0


def crash_log(log: str) -> CrashLog:
    """Read the traces of a dead process on this node.

    Args:
        log: path of the file with the process's standard error.
    """
    path = Path(log)
    if not path.is_file():
        return CrashLog(oom_kills=oom_kills())
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    # Drop Ray's marks for its log monitor, and the fault handler's list of C extensions.
    noise = (":", "Extension modules: ")
    lines = [line for line in lines if line.strip() and not line.startswith(noise)]
    # Show the whole last report of the fault handler, if there is one, even if it is longer.
    reports = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    first = min([len(lines) - NUM_LAST_LINES, *reports[-1:]])
    return CrashLog(tuple(lines[max(0, first) :]), oom_kills())


def cause_of_death(
    error: RayError, log: CrashLog, oom_kills_before: int, pid: int
) -> tuple[str, str]:
    """Find the most likely cause of a process's death.

    Args:
        error: the error that Ray raised for a call to the process.
        log: traces of the process on its node.
        oom_kills_before: the kernel's count of memory kills when the process started.
        pid: process id.

    Returns:
        The cause, and a fix ("" if there is none).
    """
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]

    # What Ray itself has done or knows.
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        sizes = _RAY_OUT_OF_MEMORY.search(text)
        node = f": {sizes[1]} of the node's {sizes[2]} were in use" if sizes else ""
        process_size = re.search(rf"pid={pid}, actual memory used=([\d.]+\w+)", text)
        used = f", {process_size[1]} by this process" if process_size else ""
        return f"out of memory{node}{used}; Ray killed it to save the node", _LESS_MEMORY
    if isinstance(error, RuntimeEnvSetupError):
        return f"no environment for the process: {lines[0]}", ""
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"the process could not be set up: {lines[-1]}", ""

    # Traces that the process or the kernel has left behind, from the surest to the weakest.
    if fatal := _fatal_error(log.last_lines):
        return fatal, ""
    if "receives a SIGTERM" in text:
        return "SIGTERM", ""
    if status := re.search(r"exit code (\d+)", text):
        return f"exit status {status[1]}", ""
    cause = next((cause for words, cause in _RAY_MESSAGES.items() if words in text), None)
    # Ray does not know that the kernel killed a process for lack of memory.
    if cause in (None, _SILENT) and log.oom_kills > oom_kills_before:
        return _KERNEL
    if cause is not None:
        return cause
    # An unknown message: the line after Ray's standard sentence, or else its first line.
    details = text.partition("worker process has died.")[2].strip()
    return details.partition("\n")[0] or lines[0], ""


def _fatal_error(lines: tuple[str, ...]) -> str:
    """Find the signal and location that the fault handler reported; "" if it reported none.

    Args:
        lines: the end of the process's standard error.
    """
    text = "\n".join(lines)
    # Take the last report: "Fatal Python error: " and the problem, then the stacks of all threads.
    _, start, report = f"\n{text}".rpartition("\nFatal Python error: ")
    if not start:
        return ""
    problem = report.partition("\n")[0].strip()
    place = ""
    # Search the thread that got the signal first, then all threads.
    for line in f"{report.partition('Current thread')[2]}\n{report}".splitlines():
        frame = _FRAME.match(line)
        if frame and is_of_interest(frame[1]):
            place = f" at {frame[1]}:{frame[2]} in {frame[3]}"
            break
    return f"{_SIGNALS.get(problem, 'fatal error')} ({problem.lower()}){place}"
