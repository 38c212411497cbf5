# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a worker process, as the driver's error: a method that raised, or a process that is gone.

A method that raises returns a `Failure`, an ordinary value of strings: Ray sees a call that worked, so no wrapper of
Ray's stands around the error, and an exception that cannot be pickled travels like any other.

Of a process that is gone Ray reports that it has ended and, if it exited by itself, its exit status. It does not report
signals: those that Python's fault handler reports stand at the end of the process's standard error; a SIGKILL leaves
nothing there, but the kernel counts the processes that it kills for lack of memory.
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

NUM_LAST_LINES = 20  # how much of a dead process's standard error is shown
_PACKAGE = Path(errors.__file__).parent
_PLUMBING = (str(Path(__file__).parent), dispatch.__file__)
# ---- a method that raised -----------------------------------------------------------------------
_LEFT_ALONE = re.compile(
    r"gloo/transport|Connection (closed|reset) by|ncclRemoteError|communicator was aborted"
)
"""What the back ends of collectives, which raise a bare RuntimeError, say where another process left one."""


@dataclass(frozen=True)
class WorkerName:
    """Which worker in which process; prints as in `actor[rank 3/8 on 10.0.0.2]`."""

    role: str  # the group's name
    # The worker's number in its group.
    rank: int
    world_size: int
    node: str = ""  # address of its node; "": not known yet
    pid: int = 0  # its process there

    def __str__(self) -> str:
        node = f" on {self.node}" if self.node else ""
        return f"{self.role}[rank {self.rank}/{self.world_size}{node}]"


@dataclass(frozen=True)
class Failure:
    """What a worker returns instead of an output if its method raised."""

    worker: WorkerName  # what was called
    method: str
    arguments: str  # with what, data by shape
    summary: str  # type and message of the exception
    location: str  # file, line and function of the innermost frame that is no library's
    trace: (
        str  # the formatted traceback, without the frames that only brought the call to the worker
    )
    time_s: float  # wall clock time of the exception, in seconds
    running_s: float  # for how long the method ran
    # The exception, if it is one of Quadriga's own or a PeerLostError by what caused it; its `worker` is the one that
    # it came from, if the method met the failure of another one.
    error: QuadrigaError | None = None

    @classmethod
    def of(
        cls, error: BaseException, worker: WorkerName, method: str, arguments: str, running_s: float
    ) -> "Failure":
        """The failure that an exception is."""
        first = error.__traceback__
        while first is not None and not is_of_interest(first.tb_frame.f_code.co_filename):
            first = first.tb_next
        frames = first or error.__traceback__
        ours = None
        if isinstance(error, QuadrigaError):
            # A subclass from elsewhere goes by the name of its nearest base here, which the driver certainly has.
            kind = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
            kind = PeerLostError if _is_left_alone(error) else kind
            got, expected, fix = str(error.got), str(error.expected), str(error.fix)
            ours = kind(str(error.where), got=got, expected=expected, fix=fix)
            ours.worker = error.worker
        elif _is_left_alone(error):
            ours = PeerLostError(
                "a collective", got=str(error).partition("\n")[0], expected="all ranks to take part"
            )
        return cls(
            worker,
            method,
            arguments,
            "".join(traceback.format_exception_only(error)).strip(),
            location_of(reversed([frame for frame, _ in traceback.walk_tb(frames)])),
            "".join(traceback.format_exception(type(error), error, frames)),
            time.time(),
            running_s,
            ours,
        )

    def as_error(self) -> QuadrigaError:
        """The error to raise on the driver: of the worker's own type if that is one of ours, else a WorkerError."""
        where = f"{self.worker} failed in {self.method}"
        if self.error is None:
            got = f"{self.summary} (at {self.location}; after {self.running_s:.1f} s, called with {self.arguments})"
            error: QuadrigaError = WorkerError(where, got=got)
        elif self.error.worker:
            # It names the worker that it came from; the ranks between are in the traceback.
            error = self.error
        else:
            found = self.error
            error = type(found)(
                f"{where}: {found.where}", got=found.got, expected=found.expected, fix=found.fix
            )
        error.worker = error.worker or str(self.worker)
        error.add_note(
            f"\n{self.worker}, process {self.worker.pid}, called with {self.arguments}:\n{self.trace}"
        )
        return error

    def __str__(self) -> str:
        return f"{self.worker} failed in {self.method}: {self.summary} (at {self.location})"


def _is_left_alone(error: BaseException | None) -> bool:
    """Whether an exception, or one that caused it, is a collective's that another process left."""
    while error is not None:
        if isinstance(error, dist.DistNetworkError) or (
            isinstance(error, RuntimeError) and _LEFT_ALONE.search(str(error))
        ):
            return True
        error = error.__cause__
    return False


def is_of_interest(filename: str) -> bool:
    """Whether a file is the user's or Quadriga's, and not what merely brings a call to a worker."""
    if filename.startswith(f"{_PACKAGE}/"):
        return not filename.startswith(_PLUMBING)
    return not filename.startswith((*LIBRARIES, "<frozen "))


def location_of(frames: Iterator[FrameType]) -> str:
    """File, line and function of the first of `frames` (innermost first) that is no library's, and what it waits in."""
    innermost = next(frames, None)
    frame = innermost
    while frame is not None and not is_of_interest(frame.f_code.co_filename):
        frame = next(frames, None)
    if innermost is None or frame is None or frame is innermost:
        return _shown(frame or innermost)
    return f"{_shown(frame)}, inside {_shown(innermost)}"


def _shown(frame: FrameType | None) -> str:
    if frame is None:
        return "an unknown place"
    path = frame.f_code.co_filename
    # The shortest form that still says which file: from site-packages on, which may lie in the checkout, or from there.
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
    "Give the node more memory, put fewer processes on it, or lower the micro-batches; `RAY_memory_usage_threshold`, "
    "set where Ray is started, is the share of the memory that it allows."
)
# What stands in Ray's message, the reason in few words, and what to do about it.
_KERNEL = ("killed by the kernel while the node was out of memory", _LESS_MEMORY)
_SILENT = (
    "it ended without a word, as after SIGKILL or os._exit()",
    "If nobody killed it, `dmesg` on its node may say why.",
)
_NODE_GONE = ("its node is gone", "`ray status` lists the nodes that are there.")
_RAYS_WORDS = {
    "killed by `ray.kill`": ("killed with ray.kill, as when its group is closed", ""),
    "owner has died": ("ended because the driver, or the worker that started it, is gone", ""),
    "node has died": _NODE_GONE,
    "node was terminated": _NODE_GONE,
    "End of file": _SILENT,
    "Socket closed": _SILENT,
}


@dataclass(frozen=True)
class CrashLog:
    """What is found on a dead process's node."""

    last_lines: tuple[str, ...] = ()  # the end of its standard error
    oom_kills: int = (
        0  # how many processes the kernel has killed for lack of memory since the node was booted
    )


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """How many processes this node's kernel has killed for lack of memory; 0 where it does not say."""
    if not vmstat.exists():
        return 0
    counts = dict(line.split() for line in vmstat.read_text(encoding="ascii").splitlines())
    return int(counts.get("oom_kill", 0))


def crash_log(log: str) -> CrashLog:
    """What a dead process left on this node. `log`: the file that took its standard error."""
    path = Path(log)
    if not path.is_file():
        return CrashLog(oom_kills=oom_kills())
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    # Ray's marks for its log monitor, and the fault handler's list of C extensions, are of no use to a reader.
    told = [
        line for line in lines if line.strip() and not line.startswith((":", "Extension modules: "))
    ]
    reports = [number for number, line in enumerate(told) if line.startswith("Fatal Python error")]
    num_lines = max(NUM_LAST_LINES, len(told) - reports[-1]) if reports else NUM_LAST_LINES
    return CrashLog(tuple(told[-num_lines:]), oom_kills())


def cause_of_death(
    error: RayError, log: CrashLog, oom_kills_before: int, pid: int
) -> tuple[str, str]:
    """The best explanation of a process's end, and what to do about it ("": nothing to be said).
    `oom_kills_before`: the kernel's count of such kills when the process started."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        sizes = _RAY_OUT_OF_MEMORY.search(text)
        node = f": {sizes[1]} of the node's {sizes[2]} were in use" if sizes else ""
        own = re.search(rf"pid={pid}, actual memory used=([\d.]+\w+)", text)
        used = f", {own[1]} by this process" if own else ""
        return f"out of memory{node}{used}; Ray killed it to save the node", _LESS_MEMORY
    if isinstance(error, RuntimeEnvSetupError):
        return f"no environment for the process: {lines[0]}", ""
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"the process could not be set up: {lines[-1]}", ""
    if fatal := _fatal_error(log.last_lines):
        return fatal, ""
    if "receives a SIGTERM" in text:
        return "SIGTERM", ""
    if status := re.search(r"exit code (\d+)", text):
        return f"exit status {status[1]}", ""
    told = next((cause for words, cause in _RAYS_WORDS.items() if words in text), None)
    if told in (None, _SILENT) and log.oom_kills > oom_kills_before:
        return _KERNEL
    rest = text.partition("worker process has died.")[2].strip()
    return told or (rest.partition("\n")[0] or lines[0], "")


def _fatal_error(lines: tuple[str, ...]) -> str:
    """The signal that the fault handler reports at the end of standard error, and where; "" if it reports none."""
    starts = [
        number for number, line in enumerate(lines) if line.startswith("Fatal Python error: ")
    ]
    if not starts:
        return ""
    report = lines[starts[-1] :]
    what = report[0].removeprefix("Fatal Python error: ").strip()
    # Where the process stood: in the thread that met the signal, else in one that runs code of ours or the user's.
    current = [number for number, line in enumerate(report) if line.startswith("Current thread")]
    frames = [_FRAME.match(line) for line in (*(report[current[0] :] if current else ()), *report)]
    told = [frame for frame in frames if frame and is_of_interest(frame[1])]
    place = f" at {told[0][1]}:{told[0][2]} in {told[0][3]}" if told else ""
    return f"{_SIGNALS.get(what, 'fatal error')} ({what.lower()}){place}"
