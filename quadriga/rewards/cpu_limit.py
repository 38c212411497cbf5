# SPDX-License-Identifier: Apache-2.0
"""Limits on the CPU time and memory of a computation, which do not depend on the machine's load.

At the time limit `CPULimitError` is raised between two instructions of the interpreter. A single
instruction may take longer, such as the call `sum(range(10**12))`. Then a grading process is killed
by SIGPROF, `GRACE_S` after the limit, and the driver recognises the reason by the signal. At the
memory limit, which only grading processes have, a MemoryError is raised.
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

GRACE_S = 1.0  # CPU time between the limit and the end of a process
MEMORY_BYTES = 400 << 20  # in addition to what the process uses when the limit begins
_TICK_S = 0.05  # CPU time between two checks

may_end_process = False
"""Whether a limit may end this process: true in processes that only run built-in graders."""


class CPULimitError(BaseException):
    """A computation took too much CPU time.

    Not an `Exception`, because libraries catch exceptions and go on.
    """


@contextmanager
def cpu_limit(limit_s: float) -> Iterator[None]:
    """Context manager: raise CPULimitError when the body takes more CPU time than `limit_s`.

    Only the main thread has a limit, because only the main thread receives signals.

    Args:
        limit_s: CPU time of the calling thread in seconds.

    Raises:
        CPULimitError: the limit is exceeded.
        MemoryError: the body takes more than `MEMORY_BYTES`, in a grading process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = time.thread_time() + limit_s

    # Called at each tick, so the error is raised again if a library has caught it.
    def check(number: int, frame: FrameType | None) -> None:
        if time.thread_time() >= end:
            raise CPULimitError(f"it took more than {limit_s:g} s of CPU time")

    previous_handler = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, _TICK_S, _TICK_S)
    previous_memory = resource.getrlimit(resource.RLIMIT_DATA)
    if may_end_process:
        # No handler: SIGPROF ends the process if a single instruction takes too long.
        signal.setitimer(signal.ITIMER_PROF, limit_s + GRACE_S)
        # The sixth field of statm has the pages of data and stack, which RLIMIT_DATA limits.
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        soft_limit = num_pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, previous_memory[1]))
    try:
        yield
    finally:
        # A signal that arrives during this cleanup must not raise the error.
        end = math.inf
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGVTALRM, previous_handler)
        resource.setrlimit(resource.RLIMIT_DATA, previous_memory)
