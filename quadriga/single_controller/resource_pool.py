# SPDX-License-Identifier: Apache-2.0
"""Processes by node: which node of a cluster takes which part of a pool, and how many threads each process has.

    cores of the node: 8      pool of 4 processes     2 threads each: they compute at the same time
                              pool of 2, same node    4 threads each: it computes when the other pool does not

Threads are shared out by pool, for pools take turns: the loop calls one role after the other. So a role computes with
the same number of threads whether it shares its pool or has its own, and sums of floating-point numbers, whose order
goes with the threads, come out the same bits on every placement. Threads that find no work spin for a while: two torch
processes that spin on two cores are 5 to 10 times slower than with sleeping threads. So where several processes share a
node, waiting threads sleep.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quadriga.errors import NoRoomError, WorkerError


class ResourcePool:
    """Numbers of processes on each node: [4, 4] is eight processes (`world_size`) on two nodes."""

    def __init__(self, process_on_nodes: Sequence[int]) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            where = "ResourcePool.process_on_nodes"
            raise WorkerError(
                where, got=str(list(process_on_nodes)), expected="at least 1 process per node"
            )
        self.process_on_nodes = list(process_on_nodes)
        self.world_size = sum(process_on_nodes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process_on_nodes={self.process_on_nodes})"


@dataclass(frozen=True)
class NodeResources:
    """A node of a cluster: its id and IP address, and amounts by resource, such as {"CPU": 8, "GPU": 4}."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def describe(self, resources: Sequence[str]) -> str:
        """`10.0.0.2 has 2 of 8 CPU free`."""
        amounts = (
            f"{self.free.get(name, 0):g} of {self.total.get(name, 0):g} {name}"
            for name in resources
        )
        return f"{self.address} has {', '.join(amounts)} free"


def address_order(address: str) -> tuple[int, int, str]:
    """Sorts addresses as numbers, so that 10.0.0.9 stands before 10.0.0.10; names of hosts come last."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 9, 0, address
    return parsed.version, int(parsed), ""


def choose_nodes(
    pools: Mapping[str, Sequence[int]], each: Mapping[str, float], nodes: Sequence[NodeResources]
) -> dict[str, list[NodeResources]]:
    """A node of the cluster for each node of each pool, given as processes on each node by name of the pool; `each` is
    what one process needs. Nodes of one pool are different nodes of the cluster while it has enough of them; after that
    several share one. Raises NoRoomError: the cluster has not enough; says what each node has and what is missing."""
    free = {node.node_id: dict(node.free) for node in nodes}
    chosen: dict[str, list[NodeResources | None]] = {
        name: [None] * len(counts) for name, counts in pools.items()
    }
    # The largest parts first: they fit in the fewest places.
    parts = [
        (count, name, index) for name, counts in pools.items() for index, count in enumerate(counts)
    ]
    for count, name, index in sorted(parts, key=lambda part: -part[0]):
        wanted = {resource: amount * count for resource, amount in each.items()}
        taken = {node.node_id for node in chosen[name] if node}
        fitting = [node for node in nodes if not _missing(wanted, free[node.node_id])]
        if not fitting:
            raise _not_enough(name, pools, wanted, nodes, free)
        # An unused node before a used one, a full one before an empty one, then the lowest address.
        node = min(
            fitting,
            key=lambda node: (
                node.node_id in taken,
                [free[node.node_id][resource] for resource in each],
                address_order(node.address),
            ),
        )
        chosen[name][index] = node
        for resource, amount in wanted.items():
            free[node.node_id][resource] -= amount
    return {name: [node for node in row if node] for name, row in chosen.items()}


def _missing(wanted: Mapping[str, float], free: Mapping[str, float]) -> dict[str, float]:
    gaps = {name: amount - free.get(name, 0) for name, amount in wanted.items()}
    return {name: gap for name, gap in gaps.items() if gap > 1e-6}


def _not_enough(
    name: str,
    pools: Mapping[str, Sequence[int]],
    wanted: Mapping[str, float],
    nodes: Sequence[NodeResources],
    free: Mapping[str, Mapping[str, float]],
) -> NoRoomError:
    # What an idle cluster would lack as well is not a matter of who else uses it.
    gaps = [_missing(wanted, node.total) for node in nodes]
    is_too_small = all(gaps)
    if not is_too_small:
        gaps = [_missing(wanted, free[node.node_id]) for node in nodes]
    least = min(gaps, key=lambda gap: sum(gap.values()), default=wanted)
    others = ", ".join(
        f"{other} {list(counts)}" for other, counts in pools.items() if other != name
    )
    needed, lacking = (
        ", ".join(f"{gap[each]:g} {each}" for each in gap) for gap in (wanted, least)
    )
    return NoRoomError(
        f"resource pool {name} {list(pools[name])}{f' beside {others}' if others else ''}",
        got="; ".join(node.describe(list(wanted)) for node in nodes) or "a cluster without nodes",
        expected=f"{needed}{'' if is_too_small else ' free'} on one node: {lacking} missing",
        fix="Ask for fewer processes (trainer.n_gpus_per_node, trainer.nnodes, trainer.resource_pools), put roles on a "
        "common pool, or start Ray with more of it: ray_kwargs.ray_init.num_cpus, ray start --num-cpus/--num-gpus.",
    )


THREADS = "OMP_NUM_THREADS"  # the variable that says how many threads a process computes with


@dataclass(frozen=True)
class ThreadShare:
    """The threads of one worker process; `is_passive`: a thread that waits gives its core away instead of spinning."""

    num_threads: int
    is_passive: bool
    reason: str

    def environment(self) -> dict[str, str]:
        """The variables that say so to OpenMP and MKL, which read them when torch is loaded and never again."""
        threads = str(self.num_threads)
        policy = {"OMP_WAIT_POLICY": "PASSIVE"} if self.is_passive else {}
        return {THREADS: threads, "MKL_NUM_THREADS": threads, **policy}


def share_of_cores(cores: int, processes: int, processes_on_node: int = 0) -> ThreadShare:
    """The threads of each process of a pool on one node.
    `processes`: how many of the pool's processes are there; they compute at the same time.
    `processes_on_node`: those of all pools there, if that is known; they take turns."""
    if cores < 1 or processes < 1:
        raise WorkerError(
            "share of cores",
            got=f"{cores} cores for {processes} processes",
            expected="at least 1 each",
        )
    total, num_threads = max(processes_on_node, processes), max(1, cores // processes)
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''} a process"
    of_cores = f"{cores} core{'s' if cores > 1 else ''}"
    if total == 1:
        return ThreadShare(num_threads, False, f"{threads}: alone on {of_cores}")
    share = f"{processes} processes of the pool share {of_cores}"
    if processes == 1:
        share = f"its pool has {of_cores} to itself while it computes"
    elif processes > cores:
        share += ", which is more than there are"
    sleeping = f"waiting threads sleep, since {total} processes are on the node"
    return ThreadShare(num_threads, True, f"{threads}: {share}; {sleeping}")
