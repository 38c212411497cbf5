# SPDX-License-Identifier: Apache-2.0
"""Which role runs on which pool, and whether the cluster has what all pools together ask for."""

from collections import Counter
from collections.abc import Mapping, Sequence

from quadriga.errors import WorkerError
from quadriga.single_controller.ray.pools import RayResourcePool, check_resources


class ResourcePoolManager:
    """The pools of a run.

    Args:
        resource_pool_spec: processes on each node, by name of the pool.
        mapping: name of the pool, by role. Roles on one pool take turns on its devices.
        use_gpu: whether a process takes a GPU.
        max_colocate_count: how many groups may run on each pool.

    Raises:
        WorkerError: a role on a pool that does not exist, or a pool that no role uses.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[str, str],
        use_gpu: bool = False,
        max_colocate_count: int = 10,
    ) -> None:
        self.resource_pool_spec = {name: list(counts) for name, counts in resource_pool_spec.items()}
        self.mapping = dict(mapping)
        homeless = {str(role): pool for role, pool in self.mapping.items() if pool not in self.resource_pool_spec}
        if homeless:
            raise WorkerError(
                f"pool of the role {next(iter(homeless))}",
                got=f"{next(iter(homeless.values()))!r}",
                expected=f"one of {', '.join(self.resource_pool_spec) or 'the pools, of which there are none'}",
                fix="Name the pool in trainer.resource_pools, or map the role to one that is there.",
            )
        unused = [name for name in self.resource_pool_spec if name not in self.mapping.values()]
        if unused:
            raise WorkerError(
                f"resource pool {unused[0]}",
                got=f"no role on it; roles: {self._roles()}",
                expected="at least one",
                fix="Leave the pool out, or map a role to it.",
            )
        self.pools = {
            name: RayResourcePool(counts, use_gpu, name, max_colocate_count)
            for name, counts in self.resource_pool_spec.items()
        }

    def check(self) -> None:
        """Compare what all pools ask for with what the cluster has; starts nothing.

        Raises:
            WorkerError: it has not enough; says what is there and what is missing.
        """
        waiting = {name: pool for name, pool in self.pools.items() if not pool.is_placed}
        if waiting:
            each = next(iter(waiting.values())).process_resources()
            check_resources({name: pool.process_on_nodes for name, pool in waiting.items()}, each)

    def create_resource_pool(self) -> dict[str, RayResourcePool]:
        """Take the resources of all pools, after `check`. Returns the pools by name."""
        self.check()
        neighbours = Counter(bundle.node_id for pool in self.pools.values() for bundle in pool.bundles())
        for pool in self.pools.values():
            pool.neighbours = neighbours
        return self.pools

    def get_resource_pool(self, role: str) -> RayResourcePool:
        """The pool of a role."""
        if role not in self.mapping:
            raise WorkerError(
                f"role {role}",
                got="no pool",
                expected=f"one of the roles with a pool: {self._roles()}",
                fix=f"Map it to one of the pools {', '.join(self.pools)}.",
            )
        return self.pools[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Processes of all pools together; one GPU each, if they use GPUs."""
        return sum(pool.world_size for pool in self.pools.values())

    def close(self) -> None:
        """Give the resources of all pools back."""
        for pool in self.pools.values():
            pool.close()

    def _roles(self) -> str:
        return ", ".join(str(role) for role in self.mapping) or "none"
