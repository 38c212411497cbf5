# SPDX-License-Identifier: Apache-2.0
"""Why a worker's process is gone: what Ray says of it, and what can be found on its node.

Ray tells that a process has ended and, if it exited by itself, its exit status. Signals it does not tell: those that
Python's fault handler reports stand at the end of the process's standard error; a SIGKILL leaves nothing behind, but
the kernel counts the processes that it kills for lack of memory.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RuntimeEnvSetupError

from quadriga.single_controller.ray.failures import is_of_interest

NUM_LAST_LINES = 20
"""How much of a dead process's standard error is shown."""

_TAIL_BYTES = 64 * 1024
_FATAL = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_RAY_OUT_OF_MEMORY = re.compile(r"Memory on the node \(.*?\) was ([^(]*?) used / ([^(]*?) limit")
_RAY_OUT_OF_MEMORY_OLD = re.compile(r"Memory on the node \(.*?\).*? was ([\d.]+\w+) / ([\d.]+\w+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LESS_MEMORY = (
    "Give the node more memory, put fewer processes on it, or lower the micro-batches; `RAY_memory_usage_threshold`, "
    "set where Ray is started, is the share of the memory that it allows."
)


@dataclass(frozen=True)
class Remains:
    """What is found on a dead process's node.

    Attributes:
        last_lines: the end of its standard error.
        oom_kills: how many processes the kernel has killed for lack of memory since the node was booted.
    """

    last_lines: tuple[str, ...] = ()
    oom_kills: int = 0


@dataclass(frozen=True)
class Cause:
    """Why a process is gone.

    Attributes:
        got: the reason, for an error message.
        fix: what to do about it.
    """

    got: str
    fix: str = ""


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """How many processes this node's kernel has killed for lack of memory; 0 where it does not say."""
    if not vmstat.exists():
        return 0
    counts = dict(line.split() for line in vmstat.read_text().splitlines())
    return int(counts.get("oom_kill", 0))


def remains(log: str) -> Remains:
    """What a dead process left on this node.

    Args:
        log: the file that took its standard error.
    """
    path = Path(log)
    if not path.is_file():
        return Remains(oom_kills=oom_kills())
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    # Ray's marks for its log monitor, and the fault handler's list of C extensions, tell nobody anything.
    spoken = [line for line in lines if line.strip() and not line.startswith((":", "Extension modules: "))]
    return Remains(tuple(spoken[-_lines_to_show(spoken) :]), oom_kills())


def _lines_to_show(lines: list[str]) -> int:
    """The last ones; more if the fault handler's report begins earlier."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    return max(NUM_LAST_LINES, len(lines) - starts[-1]) if starts else NUM_LAST_LINES


def cause_of_death(error: RayError, remains: Remains, oom_kills_before: int, pid: int) -> Cause:
    """The best explanation of a process's end.

    Args:
        error: what Ray raised for a call to it.
        remains: what was found on its node.
        oom_kills_before: the kernel's count of such kills when the process started.
        pid: the process.
    """
    text = str(error)
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return _out_of_memory(text, pid)
    if isinstance(error, RuntimeEnvSetupError):
        return Cause(f"no environment for the process: {_lines(text)[0]}")
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return Cause(f"the process could not be set up: {_lines(text)[-1]}")
    if fatal := _fatal_error(remains.last_lines):
        return Cause(fatal)
    if "receives a SIGTERM" in text:
        return Cause("SIGTERM")
    if status := re.search(r"exit code (\d+)", text):
        return Cause(f"exit status {status[1]}")
    return _told_by_ray(text, remains, oom_kills_before)


def _told_by_ray(text: str, remains: Remains, oom_kills_before: int) -> Cause:
    if "killed by `ray.kill`" in text:
        return Cause("killed with ray.kill, as when its group is closed")
    if "owner has died" in text:
        return Cause("ended because the driver, or the worker that started it, is gone")
    if "node has died" in text or "node was terminated" in text:
        return Cause("its node is gone", "`ray status` lists the nodes that are there.")
    if remains.oom_kills > oom_kills_before:
        return Cause("killed by the kernel while the node was out of memory", _LESS_MEMORY)
    if "End of file" in text or "Socket closed" in text:
        return Cause(
            "it ended without a word, as after SIGKILL or os._exit()",
            "If nobody killed it, `dmesg` on its node may say why.",
        )
    return Cause(_lines(text.partition("worker process has died.")[2] or text)[0])


def _out_of_memory(text: str, pid: int) -> Cause:
    sizes = _RAY_OUT_OF_MEMORY.search(text) or _RAY_OUT_OF_MEMORY_OLD.search(text)
    node = f": {sizes[1].strip()} of the node's {sizes[2].strip()} were in use" if sizes else ""
    own = re.search(rf"pid={pid}, actual memory used=([\d.]+\w+)", text)
    used = f", {own[1]} by this process" if own else ""
    return Cause(f"out of memory{node}{used}; Ray killed it to save the node", _LESS_MEMORY)


def _fatal_error(lines: tuple[str, ...]) -> str:
    """The signal that the fault handler reports at the end of standard error, and where; "" if it reports none."""
    report = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not report:
        return ""
    what = lines[report[-1]].removeprefix("Fatal Python error: ").strip()
    return f"{_FATAL.get(what, 'fatal error')} ({what.lower()}){_place(lines[report[-1] :])}"


def _place(report: tuple[str, ...]) -> str:
    """Where the process stood: in the thread that met the signal, else in one that runs code of ours or the user's."""
    current = [number for number, line in enumerate(report) if line.startswith("Current thread")]
    frames = [_FRAME.match(line) for line in (*(report[current[0] :] if current else ()), *report)]
    told = [frame for frame in frames if frame and is_of_interest(frame[1])]
    return f" at {told[0][1]}:{told[0][2]} in {told[0][3]}" if told else ""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
