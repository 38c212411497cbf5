# SPDX-License-Identifier: Apache-2.0
"""Chooses how OpenMP's threads wait for each other: spinning or sleeping.

Spinning is faster if no other program computes on the machine. If one does, the thread that shares
its core is late, and all others spin until it arrives. OpenMP reads the choice from the environment
only once, when torch is loaded.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_POLICY = "OMP_WAIT_POLICY"
_CHOICES = (WAIT_POLICY, "GOMP_SPINCOUNT")
"""Variables by which a user decides how threads wait. If one of them is set, nothing is chosen."""
_LOAD = Path("/proc/loadavg")
_NUM_SAMPLES = 20
_SAMPLE_S = 0.01
_BUSY_SHARE = 0.25
"""Threads sleep if other programs compute on at least this share of the cores."""

_reason = ""
"""Why `threads_for_load` has chosen sleeping threads; "" if it has not."""


@contextmanager
def sleeping_threads() -> Iterator[None]:
    """Context manager: if torch is loaded in the block, its threads will sleep while they wait.

    Does nothing if the environment already says how threads wait. Processes that are started after
    the block do not inherit the choice.
    """
    is_chosen = any(name in os.environ for name in _CHOICES)
    if not is_chosen:
        os.environ[WAIT_POLICY] = "PASSIVE"
    try:
        yield
    finally:
        if not is_chosen:
            del os.environ[WAIT_POLICY]


@contextmanager
def threads_for_load() -> Iterator[None]:
    """Context manager: choose how torch's threads wait by the load of this machine.

    They sleep, as with `sleeping_threads`, only if other programs compute on this machine.
    """
    global _reason
    if "torch" in sys.modules or any(name in os.environ for name in _CHOICES):
        yield
        return
    num_others = _num_other_threads()
    num_cores = os.cpu_count() or 1
    if num_others < _BUSY_SHARE * num_cores:
        yield
        return
    with sleeping_threads():
        yield
    if "torch" in sys.modules:
        _reason = f"{num_others} other threads compute on {num_cores} cores"


def notice() -> str:
    """Message about `threads_for_load` having chosen sleeping threads; "" if it has not."""
    return _reason and f"waiting threads sleep, since {_reason}"


def _num_other_threads() -> int:
    """Smallest number of other runnable threads in samples over 0.2 s.

    Returns 0 on a system without /proc/loadavg.
    """
    fewest = sys.maxsize
    for _ in range(_NUM_SAMPLES):
        try:
            # Such as "0.20 0.18 0.12 1/80 11206", with 1 runnable thread of 80.
            num_running, _, _ = _LOAD.read_text(encoding="ascii").split()[3].partition("/")
        except OSError:
            return 0
        # The thread that reads the file is one of the runnable ones, so it is subtracted.
        fewest = min(fewest, int(num_running) - 1)
        if fewest <= 0:
            break
        time.sleep(_SAMPLE_S)
    return fewest
