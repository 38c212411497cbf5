# SPDX-License-Identifier: Apache-2.0
"""Duration of each rank's calls, and how long the rank waited for other ranks in them.

    each rank                                   driver, at the end of a step
      engine    `count_waits` in a pass
      process   a `CallTime` after a call  ──>    `take_call_times` of the worker groups
                                                  `step_calls`: for the record of the step

Calls of ranks that meet in collectives end together. The slow rank is the one that did not wait, so
the time of a call alone does not show it.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_NS = 1e-9
_DIGITS = 4  # tenths of a millisecond


@dataclass(frozen=True, slots=True)
class CallTime:
    """A call of a worker's method that has ended.

    Attributes:
        role: role of the worker.
        rank: rank of the worker.
        method: name of the method.
        begin_s: start by the clock of the worker's machine, in seconds since 1970.
        seconds: duration.
        waited_s: part of the duration in which the worker waited for other ranks, as far as
            `count_waits` measures that.
    """

    role: str
    rank: int
    method: str
    begin_s: float
    seconds: float
    waited_s: float


class _RankWaits(threading.local):
    """Seconds that the calling thread has waited for other ranks, since the thread began."""

    seconds = 0.0


RANK_WAITS = _RankWaits()
"""Counter of each thread, to which `count_waits` adds."""


def _awake_ns() -> int | None:
    """Nanoseconds in which this thread ran or was ready to run; None if the kernel hides them."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            running, ready, _ = file.read().split()
    except (OSError, ValueError):
        return None
    # A ready thread waits for a core that other programs use. That makes its own rank slow, so it
    # does not count as waiting for another rank.
    return int(running) + int(ready)


@contextmanager
def count_waits(num_ranks: int, device_type: str) -> Iterator[None]:
    """Context manager: count the time that this thread sleeps as waiting for other ranks.

    On a CPU a thread sleeps only where a collective needs another rank. With an accelerator nothing
    is counted: the thread also sleeps while kernels run, and ranks wait for each other inside them.

    Args:
        num_ranks: ranks that meet in collectives of the block.
        device_type: type of the device that computes.
    """
    is_counted = num_ranks > 1 and device_type == "cpu"
    awake_before = _awake_ns() if is_counted else None
    begin = time.perf_counter()
    try:
        yield
    finally:
        awake_after = None if awake_before is None else _awake_ns()
        if awake_before is not None and awake_after is not None:
            # The thread slept in the time in which it was not awake. The two clocks differ
            # slightly, so the difference may be negative.
            awake_s = (awake_after - awake_before) * _NS
            RANK_WAITS.seconds += max(0.0, time.perf_counter() - begin - awake_s)


def step_calls(calls: Sequence[CallTime], step_s: float, end_s: float) -> dict[str, Any]:
    """Group the calls of a step by method, in the form that the record of the step stores.

    Args:
        calls: calls that have ended since the calls of the previous step were taken.
        step_s: duration of the step.
        end_s: end of the step, in seconds since 1970.

    Returns:
        For each `role.method` a list of calls `[rank, begin_s, seconds, waited_s]`, where `begin_s`
        is in seconds since the step began. Calls that ended before the step began are left out.
    """
    begin_s = end_s - step_s
    rows = {}
    for call in calls:
        if call.begin_s + call.seconds <= begin_s:
            continue
        row = [
            call.rank,
            round(call.begin_s - begin_s, _DIGITS),
            round(call.seconds, _DIGITS),
            round(call.waited_s, _DIGITS),
        ]
        rows.setdefault(f"{call.role}.{call.method}", []).append(row)
    return rows
