# SPDX-License-Identifier: Apache-2.0
"""Waiting of OpenMP's threads for each other. OpenMP reads how they do when torch is loaded.

Threads that spin are faster on a machine of their own. If other programs take a core, the thread on
it holds the others up, which then spin on all other cores.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_POLICY = "OMP_WAIT_POLICY"
_CHOICES = (WAIT_POLICY, "GOMP_SPINCOUNT")
_LOAD = Path("/proc/loadavg")
_NUM_SAMPLES = 20
_SAMPLE_S = 0.01
_BUSY_SHARE = 0.25
"""Share of the cores that other programs compute on, from which on threads sleep."""

_reason = ""


@contextmanager
def sleeping_threads() -> Iterator[None]:
    """Context manager: if torch is loaded in it, its waiting threads sleep.

    Does nothing if the environment says how threads wait. Processes that are started later do not
    inherit the choice.
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
    """Context manager: if torch is loaded in it while other programs compute, its waiting threads sleep."""
    global _reason
    if "torch" in sys.modules or any(name in os.environ for name in _CHOICES):
        yield
        return
    num_others = _num_other_programs()
    num_cores = os.cpu_count() or 1
    if num_others < _BUSY_SHARE * num_cores:
        yield
        return
    with sleeping_threads():
        yield
    if "torch" in sys.modules:
        _reason = f"{num_others} other threads compute on {num_cores} cores"


def notice() -> str:
    """Why waiting threads sleep, for people; "" if they spin, or if the environment says so."""
    return _reason and f"waiting threads sleep, since {_reason}"


def _num_other_programs() -> int:
    """Threads on this machine that compute all the time, without this one; 0 where Linux does not say."""
    fewest = sys.maxsize
    for _ in range(_NUM_SAMPLES):
        try:
            # Such as "0.20 0.18 0.12 1/80 11206", with 1 runnable thread of 80.
            num_running, _, _ = _LOAD.read_text(encoding="ascii").split()[3].partition("/")
        except OSError:
            return 0
        fewest = min(fewest, int(num_running) - 1)
        if fewest <= 0:
            break
        time.sleep(_SAMPLE_S)
    return fewest
