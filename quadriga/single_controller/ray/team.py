# SPDX-License-Identifier: Apache-2.0
"""All worker groups of a run, in processes on the cluster: roles on one pool share its processes."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import ray

from quadriga.single_controller.ray.classes import RayClassWithInitArgs, create_colocated_worker_cls
from quadriga.single_controller.ray.group import RayWorkerGroup
from quadriga.single_controller.ray.manager import ResourcePoolManager
from quadriga.single_controller.ray.nodes import await_lost_nodes
from quadriga.single_controller.team import close_workers
from quadriga.single_controller.threads import THREADS
from quadriga.single_controller.worker_group import ClassWithInitArgs


class RayTeam:
    """Worker groups on Ray; their processes are started, and waited for by the first call.

    Args:
        classes: what to build, by role.
        roles: pool of each role.
        pools: processes on each node of each pool.
        device: what computes; auto: GPUs where the cluster has any.

    Raises:
        WorkerError: the cluster has not enough for the pools.
    """

    is_beside = True

    def __init__(
        self,
        classes: Mapping[str, ClassWithInitArgs[Any]],
        roles: Mapping[str, str],
        pools: Mapping[str, Sequence[int]],
        device: str,
    ) -> None:
        self._variables = _threads_of_the_user()
        use_gpu = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        self.groups: dict[str, RayWorkerGroup[Any]] = {}
        self._together: dict[str, RayWorkerGroup[Any]] = {}
        # One group to a pool: each process has its whole share of the machine.
        self._manager = ResourcePoolManager(pools, roles, use_gpu, max_colocate_count=1)
        try:
            # Ray would still place processes on a node that has just been lost.
            await_lost_nodes()
            resources = self._manager.create_resource_pool()
            for pool in pools:
                inside = {role: self._on_ray(entry) for role, entry in classes.items() if roles[role] == pool}
                together = RayWorkerGroup(resources[pool], create_colocated_worker_cls(inside))
                self._together[pool] = together
                self.groups |= together.spawn(inside)
        except BaseException:
            self.end()
            raise

    def describe(self) -> dict[str, str]:
        """Processes and threads of each pool."""
        chosen = {}
        for pool, group in self._together.items():
            roles = ", ".join(role for role in self.groups if self._manager.mapping[role] == pool)
            nodes = [address.node for address in group.crew.addresses]
            where = ", ".join(f"{nodes.count(node)} on {node}" for node in dict.fromkeys(nodes))
            chosen[f"pool {pool}"] = f"{where}: {roles}; {self._threads(group)}"
        return chosen

    def _threads(self, group: RayWorkerGroup[Any]) -> str:
        wish = self._variables.get(THREADS)
        return f"{THREADS}={wish} in each process, as here" if wish else group.threads

    def close(self) -> None:
        """Let the workers release what they hold, then end their processes."""
        try:
            close_workers(self.groups)
        finally:
            self.end()

    def end(self) -> None:
        """Kill the processes of all groups, give their resources back, and wait until both have happened."""
        # Each of them, whatever comes of the others.
        with ExitStack() as stack:
            stack.callback(self._manager.close)
            for group in self._together.values():
                stack.callback(group.shutdown)

    def _on_ray(self, entry: ClassWithInitArgs[Any]) -> RayClassWithInitArgs[Any]:
        on_ray = RayClassWithInitArgs(entry.cls, *entry.args, **entry.kwargs)
        on_ray.update_options({"runtime_env": {"env_vars": self._variables}})
        return on_ray


def _threads_of_the_user() -> dict[str, str]:
    """A user who says how many threads a process has means each process, as in a run without Ray."""
    if THREADS not in os.environ:
        return {}
    threads = os.environ[THREADS]
    return {THREADS: threads, "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS", threads)}
