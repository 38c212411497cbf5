# SPDX-License-Identifier: Apache-2.0
"""Resource pools: the nodes on which processes of a pool run, and the threads of each process.

    cores of the node: 8      pool of 4 processes     2 threads each: they compute at the same time
                              pool of 2, same node    4 threads each: pools take turns

Cores are divided among the processes of each pool, because pools take turns: the trainer calls one
role after the other. A role thus computes with the same number of threads whether it shares its
pool or not. The order of floating-point sums depends on the number of threads, so results are
bit-identical on every placement.

By default, idle threads spin for a while: two torch processes that spin on two cores are 5 to 10
times slower than with sleeping threads. Where several processes share a node, waiting threads
therefore sleep.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quadriga.errors import NoRoomError, WorkerError


class ResourcePool:
    """Numbers of processes on each node: [4, 4] is eight processes (`world_size`) on two nodes."""

    def __init__(self, process_on_nodes: Sequence[int]) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise WorkerError(
                "ResourcePool.process_on_nodes",
                got=str(list(process_on_nodes)),
                expected="at least 1 process per node",
            )
        self.process_on_nodes = list(process_on_nodes)
        self.world_size = sum(process_on_nodes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process_on_nodes={self.process_on_nodes})"


@dataclass(frozen=True)
class NodeResources:
    """A node of a cluster, with its resources as {"CPU": 8, "GPU": 4}."""

    node_id: str
    address: str  # IP address
    total: Mapping[str, float]
    free: Mapping[str, float]

    def describe(self, resources: Sequence[str]) -> str:
        """Describe free and total amounts of some resources: `10.0.0.2 has 2 of 8 CPU free`."""
        amounts = [
            f"{self.free.get(name, 0):g} of {self.total.get(name, 0):g} {name}"
            for name in resources
        ]
        return f"{self.address} has {', '.join(amounts)} free"


def address_order(address: str) -> tuple[int, int, str]:
    """Sort key that orders addresses as numbers (10.0.0.9 before 10.0.0.10), host names last."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 9, 0, address  # 9 is above the versions of IP, 4 and 6
    return parsed.version, int(parsed), ""


def choose_nodes(
    pools: Mapping[str, Sequence[int]], each: Mapping[str, float], nodes: Sequence[NodeResources]
) -> dict[str, list[NodeResources]]:
    """Choose a node of the cluster for each part of each pool.

    A part is the processes of a pool that the configuration puts on one node. The parts of a pool
    go to different nodes of the cluster as long as there are enough; further parts share a node.

    Args:
        pools: number of processes in each part, by name of the pool.
        each: resources of one process.
        nodes: the nodes of the cluster.

    Returns:
        By name of the pool, the node of each part, in the order of the parts.

    Raises:
        NoRoomError: the cluster lacks resources. The message lists what each node has, and what is
            missing.
    """
    free = {node.node_id: dict(node.free) for node in nodes}
    # For each part: number of processes, name of the pool, and number of the part in the pool.
    parts = []
    for name, counts in pools.items():
        parts += [(count, name, index) for index, count in enumerate(counts)]
    # The largest parts first: they fit on the fewest nodes.
    parts.sort(key=lambda part: -part[0])

    # By name of the pool and number of the part.
    chosen = {name: {} for name in pools}
    for count, name, index in parts:
        needed = {resource: amount * count for resource, amount in each.items()}
        used_ids = {node.node_id for node in chosen[name].values()}
        fitting = [node for node in nodes if not _missing_resources(needed, free[node.node_id])]
        if not fitting:
            raise _no_room_error(name, pools, needed, nodes, free)
        # Prefer a node that the pool does not use yet, then the node with the least free resources,
        # so that large parts of other pools still fit, then the lowest address.
        node = min(
            fitting,
            key=lambda node: (
                node.node_id in used_ids,
                [free[node.node_id][resource] for resource in each],
                address_order(node.address),
            ),
        )
        chosen[name][index] = node
        for resource, amount in needed.items():
            free[node.node_id][resource] -= amount
    return {
        name: [node_of_part[index] for index in sorted(node_of_part)]
        for name, node_of_part in chosen.items()
    }


def _missing_resources(needed: Mapping[str, float], free: Mapping[str, float]) -> dict[str, float]:
    """Amounts of the resources that are missing, by resource; {} if all are there."""
    gaps = {name: amount - free.get(name, 0) for name, amount in needed.items()}
    # Shares of a device do not add up exactly.
    return {name: gap for name, gap in gaps.items() if gap > 1e-6}


def _no_room_error(
    name: str,
    pools: Mapping[str, Sequence[int]],
    needed: Mapping[str, float],
    nodes: Sequence[NodeResources],
    free: Mapping[str, Mapping[str, float]],
) -> NoRoomError:
    """Make the error for a part of a pool that fits on no node.

    Args:
        name: name of the pool.
        pools: number of processes in each part, by name of the pool.
        needed: resources of the part.
        nodes: the nodes of the cluster.
        free: free resources by id of the node, after other parts were placed.
    """
    # Resources that each node lacks. If the part would not fit even on idle nodes, compare with
    # idle nodes, so that the message does not blame other users of the cluster.
    gaps = [_missing_resources(needed, node.total) for node in nodes]
    is_too_small = all(gaps)
    if not is_too_small:
        gaps = [_missing_resources(needed, free[node.node_id]) for node in nodes]
    smallest_gap = min(gaps, key=lambda gap: sum(gap.values()), default=needed)
    where = f"resource pool {name} {list(pools[name])}"
    other_pools = [f"{other} {list(pools[other])}" for other in pools if other != name]
    if other_pools:
        where += f" beside {', '.join(other_pools)}"
    available = "; ".join(node.describe(list(needed)) for node in nodes)
    state = "" if is_too_small else " free"
    return NoRoomError(
        where,
        got=available or "a cluster without nodes",
        expected=f"{_amounts_text(needed)}{state} on one node: {_amounts_text(smallest_gap)} missing",
        fix="Ask for fewer processes (trainer.n_gpus_per_node, trainer.nnodes, "
        "trainer.resource_pools), put roles on a common pool, or start Ray with more resources: "
        "ray_kwargs.ray_init.num_cpus, ray start --num-cpus/--num-gpus.",
    )


def _amounts_text(resources: Mapping[str, float]) -> str:
    """Amounts of resources as text: `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


THREADS = "OMP_NUM_THREADS"  # environment variable: the number of threads of a process


@dataclass(frozen=True)
class ThreadShare:
    """Number of threads of a worker process, and why."""

    num_threads: int
    is_passive: bool  # whether threads sleep while they wait, instead of spinning
    reason: str

    def environment(self) -> dict[str, str]:
        """Environment variables for OpenMP and MKL, which read them once, when torch is loaded."""
        threads = str(self.num_threads)
        variables = {THREADS: threads, "MKL_NUM_THREADS": threads}
        if self.is_passive:
            variables["OMP_WAIT_POLICY"] = "PASSIVE"
        return variables


def share_of_cores(cores: int, processes: int, processes_on_node: int = 0) -> ThreadShare:
    """Divide the cores of a node among the processes of a pool.

    Args:
        cores: number of usable cores of the node.
        processes: number of processes of the pool on the node. They compute at the same time.
        processes_on_node: number of processes of all pools on the node; pools take turns. 0:
            unknown.

    Returns:
        The threads of each process, with the reason.

    Raises:
        WorkerError: there are no cores or no processes.
    """
    if cores < 1 or processes < 1:
        raise WorkerError(
            "share of cores",
            got=f"{cores} cores for {processes} processes",
            expected="at least 1 each",
        )
    # If the number for all pools is unknown, it is at least that of this pool.
    num_on_node = max(processes_on_node, processes)
    # Pools take turns, so only the processes of the same pool share the cores.
    num_threads = max(1, cores // processes)
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''} a process"
    of_cores = f"{cores} core{'s' if cores > 1 else ''}"
    if num_on_node == 1:
        return ThreadShare(num_threads, False, f"{threads}: alone on {of_cores}")

    share = f"{processes} processes of the pool share {of_cores}"
    if processes == 1:
        share = f"its pool has {of_cores} to itself while it computes"
    elif processes > cores:
        share += ", which is more than there are"
    sleeping = f"waiting threads sleep, since {num_on_node} processes are on the node"
    return ThreadShare(num_threads, True, f"{threads}: {share}; {sleeping}")
