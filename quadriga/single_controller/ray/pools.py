# SPDX-License-Identifier: Apache-2.0
"""Resource pools on Ray: one placement group per node, one bundle per process.

A pool takes its resources when they are first asked for (`bundles`), and keeps them until `close`. Each worker group
that runs on it takes a share of each bundle, so that several groups, or several roles in one process, use it in turn.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from quadriga.errors import WorkerError
from quadriga.single_controller.ray.nodes import await_lost_nodes
from quadriga.single_controller.resource_pool import NodeResources, ResourcePool, address_order, choose_nodes

# The resources of what has just ended come back within a fraction of a second; Ray reports them with some delay.
RELEASE_S = 3.0
# A placement group that was planned on free resources is there in milliseconds, unless another driver was faster.
PLACEMENT_S = 10.0
# Ray's way of asking for a kind of accelerator: a resource of which a process takes next to nothing.
ACCELERATOR_AMOUNT = 0.001


@dataclass(frozen=True)
class Bundle:
    """The resources of one process.

    Attributes:
        placement_group: the node's placement group.
        index: of the bundle in it.
        node_id, address: the node.
        groups: names of the groups that run on it.
    """

    placement_group: Any
    index: int
    node_id: str
    address: str
    groups: list[str] = field(default_factory=list, compare=False)


def _node_order(part: NodeResources | Bundle) -> tuple[tuple[int, int, str], str]:
    return address_order(part.address), part.node_id


def _count_by_node(bundles: Sequence[Bundle]) -> list[int]:
    return list(Counter(bundle.node_id for bundle in bundles).values())


def cluster_nodes() -> list[NodeResources]:
    """The living nodes of the cluster that this process is connected to."""
    free = ray._private.state.available_resources_per_node()
    return [
        NodeResources(
            node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], node["Resources"])
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def check_resources(pools: Mapping[str, Sequence[int]], each: Mapping[str, float]) -> dict[str, list[NodeResources]]:
    """A node of the cluster for each node of each pool; see `choose_nodes`.

    Raises:
        WorkerError: the cluster has not enough. What would suffice if nothing else ran is waited for a moment, for
            the resources of what has just ended.
    """
    await_lost_nodes()
    start = time.monotonic()
    while True:
        nodes = cluster_nodes()
        try:
            return choose_nodes(pools, each, nodes)
        except WorkerError:
            idle = [NodeResources(node.node_id, node.address, node.total, node.total) for node in nodes]
            if time.monotonic() - start > RELEASE_S or not _fits(pools, each, idle):
                raise
        time.sleep(0.05)


def _fits(pools: Mapping[str, Sequence[int]], each: Mapping[str, float], nodes: Sequence[NodeResources]) -> bool:
    try:
        choose_nodes(pools, each, nodes)
    except WorkerError:
        return False
    return True


class RayResourcePool(ResourcePool):
    """Processes by node, with the resources of a Ray cluster.

    Args:
        process_on_nodes: one number per node; once placed, those of the nodes in the order of their addresses.
        use_gpu: a process takes a GPU and a CPU, else a CPU. CPUs are Ray's logical ones.
        name_prefix: of the placement groups' names; it stands in error messages too.
        max_colocate_count: how many groups may run on the pool; each takes this part of the resources.
        detached: the resources outlive the driver.
        accelerator_type: kind of GPU, as Ray names it ("A100").

    Attributes:
        neighbours: processes of all pools that take turns with this one, its own included, by the id of their node;
            empty: it has the machine to itself.
    """

    neighbours: Mapping[str, int]

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        name_prefix: str = "",
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes)
        if max_colocate_count < 1:
            raise WorkerError(
                "RayResourcePool.max_colocate_count", got=str(max_colocate_count), expected="at least 1 group"
            )
        if detached and not name_prefix:
            raise WorkerError(
                "RayResourcePool.name_prefix", got="none for a detached pool", expected="one, to find it again"
            )
        self.use_gpu, self.name_prefix, self.detached = use_gpu, name_prefix, detached
        self.max_colocate_count, self.accelerator_type = max_colocate_count, accelerator_type
        self.neighbours = {}
        self._bundles: list[Bundle] = []
        self._extra: dict[str, float] = {}
        self._is_owner, self._is_spread = True, False

    @classmethod
    def from_detached(cls, name_prefix: str, max_colocate_count: int = 10) -> "RayResourcePool":
        """The pool that another driver took with `detached=True`, to give it back or to start groups on it.

        Args:
            name_prefix: with which it was taken.
            max_colocate_count: with which it was taken.
        """
        taken = [
            entry
            for entry in ray.util.placement_group_table().values()
            if entry["name"].rpartition(":")[0] == name_prefix and entry["state"] == "CREATED"
        ]
        if not taken:
            raise WorkerError(
                f"RayResourcePool.from_detached({name_prefix!r})",
                got="no placement group of that name",
                fix="`ray list placement-groups` shows those that are there.",
            )
        addresses = {node.node_id: node.address for node in cluster_nodes()}
        bundles = [
            Bundle(
                PlacementGroup(PlacementGroupID(bytes.fromhex(entry["placement_group_id"]))),
                index,
                node_id,
                addresses[node_id],
            )
            for entry in taken
            for index, node_id in sorted(entry["bundles_to_node_id"].items())
        ]
        bundles.sort(key=_node_order)
        use_gpu = "GPU" in taken[0]["bundles"][0]
        pool = cls(_count_by_node(bundles), use_gpu, name_prefix, max_colocate_count, detached=True)
        pool._bundles = bundles
        return pool

    @property
    def name(self) -> str:
        """For messages."""
        return self.name_prefix or "pool"

    def process_resources(self) -> dict[str, float]:
        """What a process of the pool takes."""
        kind = self.accelerator_type
        accelerator = {kind if ":" in kind else f"accelerator_type:{kind}": ACCELERATOR_AMOUNT} if kind else {}
        return {**({"GPU": 1.0} if self.use_gpu else {}), "CPU": 1.0, **accelerator, **self._extra}

    def group_share(self) -> dict[str, float]:
        """What one group's actor takes of a process's resources: options of a Ray actor."""
        # Rounded down to Ray's precision: seven sevenths must not be more than one.
        share = math.floor(10_000 / self.max_colocate_count) / 10_000
        return {"num_cpus": share, "num_gpus": share if self.use_gpu else 0}

    def bundles(self, extra: Mapping[str, float] | None = None) -> list[Bundle]:
        """The resources of each rank, taken now unless they are already.

        Args:
            extra: further resources, by name, that a process of the first group needs.

        Raises:
            WorkerError: the cluster has not enough, or the pool was taken without what is needed.
        """
        if not self._bundles:
            self._extra = dict(extra or {})
            counts = [1] * self.world_size if self._is_spread else self.process_on_nodes
            nodes = check_resources({self.name: counts}, self.process_resources())[self.name]
            self._place(sorted(zip(nodes, counts, strict=True), key=lambda part: _node_order(part[0])))
        lacking = {name: amount for name, amount in (extra or {}).items() if self._extra.get(name, 0) < amount}
        if lacking:
            raise WorkerError(
                f"resource pool {self.name}",
                got=f"taken with {self.process_resources()} for each process",
                expected=f"{lacking} as well",
                fix="Start the group that needs it first, or give it a pool of its own.",
            )
        return self._bundles

    def take_share(self, group: str, extra: Mapping[str, float] | None = None) -> list[Bundle]:
        """The resources of each rank for one more group.

        Raises:
            WorkerError: the cluster has not enough, or as many groups as may share the pool are there already.
        """
        bundles = self.bundles(extra)
        full = next((bundle for bundle in bundles if len(bundle.groups) >= self.max_colocate_count), None)
        if full:
            raise WorkerError(
                f"resource pool {self.name}",
                got=f"{group} as one more group beside {', '.join(full.groups)}",
                expected=f"at most {self.max_colocate_count} groups",
                fix="Raise max_colocate_count, or put the roles into one process with create_colocated_worker_cls.",
            )
        for bundle in bundles:
            bundle.groups.append(group)
        return bundles

    @property
    def is_placed(self) -> bool:
        """Whether the resources are taken."""
        return bool(self._bundles)

    @property
    def placement_groups(self) -> list[Any]:
        """The placement groups, in the order of their nodes' addresses."""
        groups = {bundle.placement_group.id: bundle.placement_group for bundle in self._bundles}
        return list(groups.values())

    def close(self) -> None:
        """Give the resources back; Ray ends the processes that still use them.

        A pool that was split off or merged leaves that to the pools from which it has them.
        """
        groups, self._bundles = self.placement_groups, []
        for group in groups if self._is_owner else ():
            remove_placement_group(group)

    def spread(self) -> None:
        """Take each process's resources on any node, rather on another one than those before; not once placed."""
        if self._bundles and not self._is_spread:
            raise WorkerError(
                f"resource pool {self.name}", got="bin_pack=False for a pool that is placed", expected="a new pool"
            )
        self._is_spread = True

    def _place(self, parts: Sequence[tuple[NodeResources, int]]) -> None:
        each = self.process_resources()
        groups = [
            placement_group(
                [each] * count,
                strategy="STRICT_PACK",
                name=f"{self.name_prefix}:{number}" if self.name_prefix else "",
                lifetime="detached" if self.detached else None,
                bundle_label_selector=[{"ray.io/node-id": node.node_id}] * count,
            )
            for number, (node, count) in enumerate(parts)
        ]
        deadline = time.monotonic() + PLACEMENT_S
        late = [group for group in groups if not group.wait(max(0.0, deadline - time.monotonic()))]
        if late:
            states = [placement_group_table(group).get("state", "unknown") for group in late]
            found = "; ".join(node.describe(list(each)) for node in cluster_nodes())
            for group in groups:
                remove_placement_group(group)
            raise WorkerError(
                f"resource pool {self.name} {self.process_on_nodes}",
                got=f"{len(late)} of {len(groups)} placement groups after {PLACEMENT_S:.0f} s still {states}; {found}",
                expected="the resources that were free before",
                fix="Another program took them at the same moment: `ray list placement-groups` shows it.",
            )
        self._bundles = [
            Bundle(group, index, node.node_id, node.address)
            for group, (node, count) in zip(groups, parts, strict=True)
            for index in range(count)
        ]
        self.process_on_nodes = _count_by_node(self._bundles)

    def _with(self, bundles: Sequence[Bundle], name: str) -> "RayResourcePool":
        """A pool of the same kind on bundles of others."""
        counts = _count_by_node(bundles)
        part = RayResourcePool(
            counts, self.use_gpu, name, self.max_colocate_count, self.detached, self.accelerator_type
        )
        part._bundles, part._extra, part._is_owner = list(bundles), dict(self._extra), False
        part.neighbours = self.neighbours
        return part


def split_resource_pool(pool: RayResourcePool, sizes: int | Sequence[int]) -> list[RayResourcePool]:
    """Pools of consecutive ranks of a pool, on the same resources.

    Args:
        pool: its resources are taken now, if they are not yet; closing it gives them back.
        sizes: processes of each part; a single number: parts of that size.
    """
    if isinstance(sizes, int):
        sizes = [sizes] * (pool.world_size // sizes if sizes > 0 else 0)
    if not sizes or min(sizes) < 1 or sum(sizes) != pool.world_size:
        raise WorkerError(
            f"split_resource_pool({pool!r})",
            got=f"sizes {list(sizes)}",
            expected=f"positive sizes that add up to {pool.world_size}",
        )
    bundles, parts, start = pool.bundles(), [], 0
    for number, size in enumerate(sizes):
        parts.append(pool._with(bundles[start : start + size], f"{pool.name}/{number}"))
        start += size
    return parts


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """A pool of the processes of two, in the order of their nodes' addresses, on the same resources.

    Raises:
        WorkerError: their processes differ in what they take, or they have processes in common.
    """
    kinds = [(pool.use_gpu, pool.max_colocate_count, pool.accelerator_type, pool.detached) for pool in (first, second)]
    if kinds[0] != kinds[1]:
        raise WorkerError(
            f"merge_resource_pool({first.name}, {second.name})",
            got=f"(use_gpu, max_colocate_count, accelerator_type, detached) of {kinds[0]} and {kinds[1]}",
            expected="the same in both",
        )
    bundles = [*first.bundles(), *second.bundles()]
    if len({(bundle.placement_group.id, bundle.index) for bundle in bundles}) < len(bundles):
        raise WorkerError(
            f"merge_resource_pool({first.name}, {second.name})", got="processes in common", expected="different ones"
        )
    bundles.sort(key=_node_order)
    return first._with(bundles, f"{first.name}+{second.name}")
