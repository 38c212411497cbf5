# SPDX-License-Identifier: Apache-2.0
"""Limits on the CPU time and memory of a computation, which do not depend on what else the machine does.

At the limit of time `CPULimitError` is raised between two of the interpreter's instructions. A single one may take
longer than that (sum(range(10**12))): then a grading process ends by SIGPROF, `GRACE_S` after the limit, and the driver
knows by the signal what to charge it to. At the limit of memory, which only grading processes have, a MemoryError is
raised.
"""

import math
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

GRACE_S = 1.0
MEMORY_BYTES = 400 << 20  # beyond what the process has at the beginning
_TICK_S = 0.05

may_end_process = False
"""Whether this process may end at a limit: one that only grades by built-in graders may."""


class CPULimitError(BaseException):
    """A computation took too much CPU time. No `Exception`, since libraries catch these and go on."""


@contextmanager
def cpu_limit(limit_s: float) -> Iterator[None]:
    """Raise CPULimitError where the body takes more than `limit_s` of CPU time.

    In threads other than the main one, which get no signals, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = time.thread_time() + limit_s

    def check(number: int, frame: FrameType | None) -> None:
        if time.thread_time() >= end:
            raise CPULimitError(f"it took more than {limit_s:g} s of CPU time")

    previous = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, _TICK_S, _TICK_S)
    memory = resource.getrlimit(resource.RLIMIT_DATA)
    if may_end_process:
        signal.setitimer(signal.ITIMER_PROF, limit_s + GRACE_S)
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        resource.setrlimit(
            resource.RLIMIT_DATA, (num_pages * resource.getpagesize() + MEMORY_BYTES, memory[1])
        )
    try:
        yield
    finally:
        end = math.inf
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGVTALRM, previous)
        resource.setrlimit(resource.RLIMIT_DATA, memory)
