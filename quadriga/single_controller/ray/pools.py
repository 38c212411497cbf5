# SPDX-License-Identifier: Apache-2.0
"""Resource pools on Ray: one placement group per node, one bundle per process.

A pool takes its resources when they are first needed (`bundles`), and keeps them until `close`. Each worker group
that runs on it takes a share of each bundle, so that several groups, or several roles in one process, use it in turn.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from quadriga.errors import WorkerError
from quadriga.single_controller.ray.cluster import await_lost_nodes, is_cluster_lost
from quadriga.single_controller.resource_pool import (
    NodeResources,
    ResourcePool,
    address_order,
    choose_nodes,
)

# The resources of what has just ended come back within a fraction of a second; Ray reports them with some delay.
RELEASE_S = 3.0
# A placement group that was planned on free resources is there in milliseconds, unless another driver was faster.
PLACEMENT_S = 10.0


@dataclass(frozen=True)
class Bundle:
    """The resources of one process: bundle `index` of a node's placement group, and the groups that run on it."""

    placement_group: Any
    index: int
    node_id: str
    groups: list[str] = field(default_factory=list, compare=False)


def cluster_nodes() -> list[NodeResources]:
    """The living nodes of the cluster that this process is connected to."""
    free = ray._private.state.available_resources_per_node()
    return [
        NodeResources(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"],
            free.get(node["NodeID"], node["Resources"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def check_resources(
    pools: Mapping[str, Sequence[int]], each: Mapping[str, float]
) -> dict[str, list[NodeResources]]:
    """A node of the cluster for each node of each pool, chosen by `choose_nodes`.
    Raises WorkerError: the cluster has not enough. What would suffice if nothing else ran is waited for a moment."""
    await_lost_nodes()
    deadline = time.monotonic() + RELEASE_S
    while True:
        nodes = cluster_nodes()
        try:
            return choose_nodes(pools, each, nodes)
        except WorkerError as error:
            if time.monotonic() > deadline:
                raise
            idle = [
                NodeResources(node.node_id, node.address, node.total, node.total) for node in nodes
            ]
            try:
                choose_nodes(pools, each, idle)
            except WorkerError:
                raise error from None
        time.sleep(0.05)


class RayResourcePool(ResourcePool):
    """Processes by node, with the resources of a Ray cluster.

    Args:
        process_on_nodes: one number per node; once placed, those of the nodes in the order of their addresses.
        use_gpu: a device is a GPU and a CPU, else a CPU. CPUs are Ray's logical ones.
        name_prefix: of the placement groups' names; it stands in error messages too.
        max_colocate_count: how many groups may run on the pool; each takes this part of the resources.
        num_devices: of each process; several, where it starts others that compute on them.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        name_prefix: str = "",
        max_colocate_count: int = 10,
        num_devices: int = 1,
    ) -> None:
        super().__init__(process_on_nodes)
        if max_colocate_count < 1:
            raise WorkerError(
                "RayResourcePool.max_colocate_count", str(max_colocate_count), "at least 1 group"
            )
        self.device_resources = {"GPU": 1.0, "CPU": 1.0} if use_gpu else {"CPU": 1.0}
        self.num_devices, self.device_on_nodes = (
            num_devices,
            [count * num_devices for count in process_on_nodes],
        )
        self.use_gpu, self.name, self.max_colocate_count = (
            use_gpu,
            name_prefix or "pool",
            max_colocate_count,
        )
        self._prefix = name_prefix
        # Processes of all pools that take turns with this one, its own included, by the id of their node.
        self.neighbours: Mapping[str, int] = {}
        self._bundles: list[Bundle] = []

    def bundles(self) -> list[Bundle]:
        """The resources of each rank, taken now unless they are already; an error if the cluster has not enough."""
        if self._bundles:
            return self._bundles
        each = {name: amount * self.num_devices for name, amount in self.device_resources.items()}
        nodes = check_resources({self.name: self.device_on_nodes}, self.device_resources)[self.name]
        parts = sorted(
            zip(nodes, self.process_on_nodes, strict=True),
            key=lambda part: (address_order(part[0].address), part[0].node_id),
        )
        groups = [
            placement_group(
                [each] * count,
                strategy="STRICT_PACK",
                name=f"{self._prefix}:{number}" if self._prefix else "",
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
            where = f"resource pool {self.name} {self.device_on_nodes}"
            got = f"{len(late)} of {len(groups)} placement groups after {PLACEMENT_S:.0f} s still {states}; {found}"
            fix = "Another program took them at the same moment: `ray list placement-groups` shows it."
            raise WorkerError(
                where, got=got, expected="the resources that were free before", fix=fix
            )
        self._bundles = [
            Bundle(group, index, node.node_id)
            for group, (node, count) in zip(groups, parts, strict=True)
            for index in range(count)
        ]
        counts = list(Counter(bundle.node_id for bundle in self._bundles).values())
        if len(counts) < len(self.process_on_nodes):
            wanted = f"resource pool {self.name} {self.device_on_nodes}: {len(self.process_on_nodes)} nodes wanted"
            print(
                f"notice: {wanted} (trainer.nnodes), {len(counts)} used, with {counts} processes: the cluster has no "
                "more nodes with room for it."
            )
        self.process_on_nodes = counts
        return self._bundles

    def take_share(self, group: str) -> tuple[list[Bundle], dict[str, float]]:
        """The resources of each rank for one more group, and what its actors take of them: options of a Ray actor.
        Raises WorkerError: the cluster has not enough, or as many groups as may share the pool are there already."""
        bundles = self.bundles()
        full = next(
            (bundle for bundle in bundles if len(bundle.groups) >= self.max_colocate_count), None
        )
        if full:
            where, got = (
                f"resource pool {self.name}",
                f"{group} as one more group with {', '.join(full.groups)}",
            )
            fix = "Raise max_colocate_count, or put the roles into one process with create_colocated_worker_cls."
            raise WorkerError(
                where, got=got, expected=f"at most {self.max_colocate_count} groups", fix=fix
            )
        for bundle in bundles:
            bundle.groups.append(group)
        # Rounded down to Ray's precision: seven sevenths must not be more than one.
        share = self.num_devices * math.floor(10_000 / self.max_colocate_count) / 10_000
        return bundles, {"num_cpus": share, "num_gpus": share if self.use_gpu else 0}

    @property
    def placement_groups(self) -> list[Any]:
        """The placement groups, in the order of their nodes' addresses; none before the resources are taken."""
        return list(
            {bundle.placement_group.id: bundle.placement_group for bundle in self._bundles}.values()
        )

    def close(self) -> None:
        """Give the resources back; Ray ends the processes that still use them."""
        groups, self._bundles = self.placement_groups, []
        # Without its head Ray would try for a minute, and then end this process.
        if groups and ray.is_initialized() and not is_cluster_lost():
            for group in groups:
                remove_placement_group(group)


class ResourcePoolManager:
    """The pools of a run: which role runs on which, and whether the cluster has what all together need.
    Raises WorkerError: a role on a pool that does not exist, or a pool that no role uses.
    `resource_pool_spec`: processes on each node, by name of the pool.
    `mapping`: name of the pool, by role. Roles on one pool take turns on its devices.
    `devices`: of each process, by name of the pool, where it has several."""

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[str, str],
        use_gpu: bool = False,
        max_colocate_count: int = 10,
        devices: Mapping[str, int] | None = None,
    ) -> None:
        self.resource_pool_spec = {
            name: list(counts) for name, counts in resource_pool_spec.items()
        }
        self.mapping = dict(mapping)
        self._roles = ", ".join(map(str, mapping)) or "none"
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                expected = f"one of {', '.join(self.resource_pool_spec) or 'the pools, of which there are none'}"
                fix = (
                    "Name the pool in trainer.resource_pools, or map the role to one that is there."
                )
                raise WorkerError(
                    f"pool of the role {role}", got=repr(pool), expected=expected, fix=fix
                )
        unused = [name for name in self.resource_pool_spec if name not in self.mapping.values()]
        if unused:
            where, got = f"resource pool {unused[0]}", f"no role on it; roles: {self._roles}"
            raise WorkerError(
                where,
                got=got,
                expected="at least one",
                fix="Leave the pool out, or map a role to it.",
            )
        self.pools = {
            name: RayResourcePool(
                counts, use_gpu, name, max_colocate_count, (devices or {}).get(name, 1)
            )
            for name, counts in self.resource_pool_spec.items()
        }

    def create_resource_pool(self) -> dict[str, RayResourcePool]:
        """Take the resources of all pools. Returns the pools by name.
        Raises WorkerError: the cluster has not enough for all of them together; nothing is taken then."""
        pools = list(self.pools.values())
        if pools and not any(pool.placement_groups for pool in pools):
            check_resources(
                {pool.name: pool.device_on_nodes for pool in pools}, pools[0].device_resources
            )
        neighbours = Counter(bundle.node_id for pool in pools for bundle in pool.bundles())
        for pool in pools:
            pool.neighbours = neighbours
        return self.pools

    def get_resource_pool(self, role: str) -> RayResourcePool:
        if role not in self.mapping:
            where, fix = f"role {role}", f"Map it to one of the pools {', '.join(self.pools)}."
            raise WorkerError(
                where,
                got="no pool",
                expected=f"one of the roles with a pool: {self._roles}",
                fix=fix,
            )
        return self.pools[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Devices of all pools together: GPUs, if they use GPUs."""
        return sum(sum(pool.device_on_nodes) for pool in self.pools.values())

    def close(self) -> None:
        """Give the resources of all pools back."""
        for pool in self.pools.values():
            pool.close()
