# SPDX-License-Identifier: Apache-2.0
"""How many threads a worker process computes with, and what they do while there is nothing to compute.

    cores of the node: 8      pool of 4 processes     2 threads each: they compute at the same time
                              pool of 2, same node    4 threads each: it computes when the other pool does not

The share is by pool: the loop calls one role after the other, so pools take turns. It follows that a role computes with
the same number of threads whether it shares its pool with others or has one of its own, and sums of floating-point
numbers, whose order goes with the threads, come out the same bits on every placement.

Threads that find no work spin for a while, which is quick on a core of their own and ruinous on a shared one: two torch
processes that spin on two cores are 5 to 10 times slower than with sleeping threads. So where several processes share a
node, waiting threads sleep.
"""

from dataclasses import dataclass

from quadriga.errors import WorkerError

THREADS = "OMP_NUM_THREADS"
"""The variable that says how many threads a process computes with."""


@dataclass(frozen=True)
class ThreadShare:
    """The threads of one worker process.

    Attributes:
        num_threads: threads that compute.
        is_passive: whether a thread that waits gives its core away instead of spinning on it.
        reason: why, fit to be printed.
    """

    num_threads: int
    is_passive: bool
    reason: str

    def environment(self) -> dict[str, str]:
        """The variables that say so to OpenMP and MKL, which read them when torch is loaded and never again."""
        threads = str(self.num_threads)
        policy = {"OMP_WAIT_POLICY": "PASSIVE"} if self.is_passive else {}
        return {THREADS: threads, "MKL_NUM_THREADS": threads, **policy}


def share_of_cores(cores: int, processes_of_pool_on_node: int, processes_on_node: int = 0) -> ThreadShare:
    """The threads of each process of a pool on one node.

    Args:
        cores: that a process may use on the node.
        processes_of_pool_on_node: how many of the pool's processes are there; they compute at the same time.
        processes_on_node: those of all pools there, if that is known; they take turns.

    Raises:
        WorkerError: one of the numbers makes no sense.
    """
    total = max(processes_on_node, processes_of_pool_on_node)
    if cores < 1 or processes_of_pool_on_node < 1:
        raise WorkerError(
            "share of cores", got=f"{cores} cores for {processes_of_pool_on_node} processes", expected="at least 1 each"
        )
    num_threads = max(1, cores // processes_of_pool_on_node)
    return ThreadShare(num_threads, total > 1, _reason(num_threads, cores, processes_of_pool_on_node, total))


def _reason(num_threads: int, cores: int, processes: int, total: int) -> str:
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''} a process"
    of_cores = f"{cores} core{'s' if cores > 1 else ''}"
    if total == 1:
        return f"{threads}: alone on {of_cores}"
    if processes == 1:
        share = f"its pool has {of_cores} to itself while it computes"
    elif processes > cores:
        share = f"{processes} processes of the pool share {of_cores}, which is more than there are"
    else:
        share = f"{processes} processes of the pool share {of_cores}"
    return f"{threads}: {share}; waiting threads sleep, since {total} processes are on the node"
