# SPDX-License-Identifier: Apache-2.0
"""Resource pools on Ray: one placement group per node, one bundle per process.

A pool takes its resources when `bundles` is first called, and keeps them until `close`. Each worker
group on the pool takes a share of each bundle, so that several groups can take turns there.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from quadriga.errors import WorkerError
from quadriga.single_controller.ray.cluster import is_cluster_lost, wait_until_ray_drops_lost_nodes
from quadriga.single_controller.resource_pool import (
    NodeResources,
    ResourcePool,
    address_order,
    choose_nodes,
)

# Time to wait for resources. Processes that have just ended free them at once, but Ray reports that
# with some delay.
RELEASE_S = 3.0
# Time limit for placement groups. On free resources, they are created in milliseconds, unless
# another driver was faster.
PLACEMENT_S = 10.0


@dataclass(frozen=True)
class Bundle:
    """The resources of one process: bundle `index` of a node's placement group."""

    placement_group: Any
    index: int
    node_id: str


def cluster_nodes() -> list[NodeResources]:
    """List the living nodes of the connected cluster. A node without a report counts as free."""
    free = ray._private.state.available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            node_id = node["NodeID"]
            total = node["Resources"]
            address = node["NodeManagerAddress"]
            nodes.append(NodeResources(node_id, address, total, free.get(node_id, total)))
    return nodes


def choose_free_nodes(
    pools: Mapping[str, Sequence[int]], each: Mapping[str, float]
) -> dict[str, list[NodeResources]]:
    """Choose nodes with `choose_nodes`. Waits a moment if the resources are in use.

    Args:
        pools: number of processes on each node, by name of the pool.
        each: resources of one process.

    Returns:
        The chosen nodes of each pool.

    Raises:
        WorkerError: resources are still in use after the wait; or the cluster would be too small
            even if it were idle; or a lost node still counts as alive (see
            `wait_until_ray_drops_lost_nodes`).
    """
    wait_until_ray_drops_lost_nodes()
    deadline = time.monotonic() + RELEASE_S
    while True:
        nodes = cluster_nodes()
        try:
            return choose_nodes(pools, each, nodes)
        except WorkerError as error:
            if time.monotonic() > deadline:
                raise
            # Do not wait if the pools would not fit on idle nodes either.
            idle = [replace(node, free=node.total) for node in nodes]
            try:
                choose_nodes(pools, each, idle)
            except WorkerError:
                raise error from None
        time.sleep(0.05)


class RayResourcePool(ResourcePool):
    """Processes per node, with the resources of a Ray cluster.

    Args:
        process_on_nodes: number of processes on each node. When they have been placed, the
            attribute of this name has the numbers on the nodes that were really chosen, in the
            order of the nodes' addresses.
        use_gpu: whether a device is a GPU with one of Ray's logical CPUs, instead of a logical CPU
            alone.
        name_prefix: prefix of the placement groups' names, also used in error messages.
        max_colocate_count: number of groups that may run on the pool. Each takes this fraction of
            the resources. With several GPUs per process it must be 1, because Ray gives a process
            a part of one GPU or whole ones.
        num_devices: devices per process. A process with several starts others that use them.

    Raises:
        WorkerError: `max_colocate_count` is less than 1, or greater with several GPUs per process.
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
        where = "RayResourcePool.max_colocate_count"
        if max_colocate_count < 1:
            raise WorkerError(where, str(max_colocate_count), "at least 1 group")
        if use_gpu and num_devices > 1 and max_colocate_count > 1:
            raise WorkerError(
                where,
                got=f"{max_colocate_count}, with {num_devices} GPUs per process",
                expected="1: Ray gives a process a part of one GPU, but not parts of several",
                fix="Set max_colocate_count=1, and put roles that share the GPUs into one process"
                " with create_colocated_worker_cls.",
            )
        self.device_resources = {"GPU": 1.0, "CPU": 1.0} if use_gpu else {"CPU": 1.0}
        self.num_devices = num_devices
        self.device_on_nodes = [count * num_devices for count in process_on_nodes]
        self.use_gpu = use_gpu
        self.name = name_prefix or "pool"
        self.max_colocate_count = max_colocate_count
        self._prefix = name_prefix
        # By node id, the number of processes of all pools on the node, including this pool.
        self.neighbours: Mapping[str, int] = {}
        self._bundles: list[Bundle] = []
        self.groups: list[str] = []  # names of the worker groups that run on the pool

    def bundles(self) -> list[Bundle]:
        """Return the bundle of each rank. The first call takes the resources from the cluster.

        The first call also prints a notice if the pool got fewer nodes than were wanted.

        Raises:
            WorkerError: the cluster lacks the resources.
        """
        if self._bundles:
            return self._bundles
        # Resources of a process.
        each = {name: amount * self.num_devices for name, amount in self.device_resources.items()}
        shape = {self.name: self.device_on_nodes}
        nodes = choose_free_nodes(shape, self.device_resources)[self.name]
        # Pairs of a node and its number of processes, sorted so that ranks follow the addresses.
        parts = sorted(
            zip(nodes, self.process_on_nodes, strict=True),
            key=lambda part: (address_order(part[0].address), part[0].node_id),
        )
        groups = []
        bundles = []
        for number, (node, count) in enumerate(parts):
            group = placement_group(
                [each] * count,
                strategy="STRICT_PACK",
                name=f"{self._prefix}:{number}" if self._prefix else "",
                bundle_label_selector=[{"ray.io/node-id": node.node_id}] * count,
            )
            groups.append(group)
            bundles += [Bundle(group, index, node.node_id) for index in range(count)]
        self._await_placement(groups, each)
        self._bundles = bundles
        # Processes on each node. There are fewer nodes than wanted if several parts share one.
        counts = list(Counter(bundle.node_id for bundle in bundles).values())
        num_wanted = len(self.process_on_nodes)
        if len(counts) < num_wanted:
            pool = f"resource pool {self.name} {self.device_on_nodes}"
            print(
                f"notice: {pool}: {num_wanted} nodes wanted (trainer.nnodes), {len(counts)} used, "
                f"with {counts} processes: the cluster has no more nodes with room for it."
            )
        self.process_on_nodes = counts
        return self._bundles

    def _await_placement(self, groups: Sequence[Any], each: Mapping[str, float]) -> None:
        """Wait until placement groups are created. Removes all of them if one is late.

        Args:
            groups: the placement groups.
            each: resources of one process, for the message.

        Raises:
            WorkerError: a placement group was not created within `PLACEMENT_S`.
        """
        deadline = time.monotonic() + PLACEMENT_S
        late = [group for group in groups if not group.wait(max(0.0, deadline - time.monotonic()))]
        if not late:
            return
        states = [placement_group_table(group).get("state", "unknown") for group in late]
        available = "; ".join(node.describe(list(each)) for node in cluster_nodes())
        for group in groups:
            remove_placement_group(group)
        raise WorkerError(
            f"resource pool {self.name} {self.device_on_nodes}",
            got=f"{len(late)} of {len(groups)} placement groups after {PLACEMENT_S:.0f} s "
            f"still {states}; {available}",
            expected="the resources that were free before",
            fix="Another program took them in the meantime: see `ray list placement-groups`.",
        )

    def take_share(self, group: str) -> tuple[list[Bundle], dict[str, float]]:
        """Take a share of the resources for one more worker group.

        Args:
            group: name of the worker group.

        Returns:
            The bundle of each rank, and the share of a bundle that an actor takes, as options of
            Ray.

        Raises:
            WorkerError: the cluster lacks the resources, or the pool has no room for another group.
        """
        bundles = self.bundles()
        if len(self.groups) >= self.max_colocate_count:
            raise WorkerError(
                f"resource pool {self.name}",
                got=f"{group} as one more group with {', '.join(self.groups)}",
                expected=f"at most {self.max_colocate_count} groups",
                fix="Raise max_colocate_count, or put the roles into one process with "
                "create_colocated_worker_cls.",
            )
        self.groups.append(group)
        # Rounded down to Ray's precision, so that seven shares of 1/7 do not exceed 1.
        share = self.num_devices * math.floor(10_000 / self.max_colocate_count) / 10_000
        return bundles, {"num_cpus": share, "num_gpus": share if self.use_gpu else 0}

    @property
    def placement_groups(self) -> list[Any]:
        """The placement groups, in the order of the nodes' addresses. Empty before `bundles`."""
        # The bundles of a node have the same placement group, which is listed once.
        groups = {bundle.placement_group.id: bundle.placement_group for bundle in self._bundles}
        return list(groups.values())

    def close(self) -> None:
        """Release the resources. Ray ends processes that still use them."""
        groups = self.placement_groups
        self._bundles = []
        self.groups = []
        # If the head is lost, Ray would try for a minute, and then end this process.
        if groups and ray.is_initialized() and not is_cluster_lost():
            for group in groups:
                remove_placement_group(group)


class ResourcePoolManager:
    """The pools of a run, and the pool of each role.

    Args:
        resource_pool_spec: number of processes on each node, by name of the pool.
        mapping: name of the pool, by role. Roles on one pool take turns on its devices.
        use_gpu: see `RayResourcePool`.
        max_colocate_count: see `RayResourcePool`.
        devices: devices per process, by name of the pool. 1 by default.

    Raises:
        WorkerError: a role on a pool that does not exist, or a pool without roles.
    """

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
        # Every role must have a pool, and every pool a role.
        known_pools = ", ".join(self.resource_pool_spec)
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise WorkerError(
                    f"pool of the role {role}",
                    got=repr(pool),
                    expected=f"one of the pools {known_pools or '(there are none)'}",
                    fix="Name the pool in trainer.resource_pools, or choose another for the role.",
                )
        self.pools: dict[str, RayResourcePool] = {}
        for name, counts in self.resource_pool_spec.items():
            if name not in self.mapping.values():
                raise WorkerError(
                    f"resource pool {name}",
                    got=f"no role on it; roles: {self._roles}",
                    expected="at least one",
                    fix="Remove the pool, or map a role to it.",
                )
            num_devices = (devices or {}).get(name, 1)
            pool = RayResourcePool(counts, use_gpu, name, max_colocate_count, num_devices)
            self.pools[name] = pool

    def create_resource_pool(self) -> dict[str, RayResourcePool]:
        """Take the resources of all pools.

        Returns:
            The pools, by name.

        Raises:
            WorkerError: the cluster lacks resources for all pools together. Nothing is taken then.
        """
        pools = list(self.pools.values())
        # Check all pools together before any of them takes resources.
        if pools and not any(pool.placement_groups for pool in pools):
            shapes = {pool.name: pool.device_on_nodes for pool in pools}
            choose_free_nodes(shapes, pools[0].device_resources)
        # The first call of `bundles` takes the resources of a pool.
        neighbours = Counter(bundle.node_id for pool in pools for bundle in pool.bundles())
        for pool in pools:
            pool.neighbours = neighbours
        return self.pools

    def get_resource_pool(self, role: str) -> RayResourcePool:
        """Return the pool of a role.

        Raises:
            WorkerError: the role has no pool.
        """
        if role not in self.mapping:
            raise WorkerError(
                f"role {role}",
                got="no pool",
                expected=f"one of the roles with a pool: {self._roles}",
                fix=f"Map it to one of the pools {', '.join(self.pools)}.",
            )
        return self.pools[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Total number of devices of all pools; GPUs if they use GPUs."""
        return sum(sum(pool.device_on_nodes) for pool in self.pools.values())

    def close(self) -> None:
        """Release the resources of all pools."""
        for pool in self.pools.values():
            pool.close()
