# SPDX-License-Identifier: Apache-2.0
"""The processes in which a worker group lives, alone or with the groups of other roles."""

import functools
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quadriga.errors import WorkerError
from quadriga.observe.machine import num_usable_cores
from quadriga.single_controller.ray import waiting
from quadriga.single_controller.ray.classes import RayClassWithInitArgs
from quadriga.single_controller.ray.closing import addresses_so_far, end_processes
from quadriga.single_controller.ray.nodes import run_on_node
from quadriga.single_controller.ray.pools import Bundle, RayResourcePool
from quadriga.single_controller.ray.process import Call, ProcessAddress, RemoteProcess, worker_actor
from quadriga.single_controller.threads import ThreadShare, share_of_cores
from quadriga.single_controller.worker import WorkerPlace
from quadriga.single_controller.worker_group import ClassWithInitArgs

# Where the names of processes live: drivers without a namespace of their own find them all the same.
NAMESPACE = "quadriga"


@functools.cache
def cores_of(node_id: str) -> int:
    """Cores that a process may use on a node: asked there, once."""
    return run_on_node(node_id, num_usable_cores)


def thread_shares(bundles: Sequence[Bundle], neighbours: Mapping[str, int]) -> dict[str, ThreadShare]:
    """The threads of each process of a pool, by the id of its node.

    Args:
        bundles: of the pool.
        neighbours: processes of all pools that take turns with it, by the id of their node.
    """
    processes = Counter(bundle.node_id for bundle in bundles)
    return {
        node_id: share_of_cores(cores_of(node_id), count, neighbours.get(node_id, count))
        for node_id, count in processes.items()
    }


class Crew:
    """Processes, one per rank, and the roles that are built in them.

    Args:
        name: stands before the rank in messages.
        actors: Ray's handles, in rank order; they may still be starting.
        worker_names: by which another driver finds them.
        bundles: the resources of each.
        threads: of each process, by the id of its node.
        pool: to be closed with the processes; None: it is somebody else's.
    """

    def __init__(
        self,
        name: str,
        actors: Sequence[Any],
        worker_names: Sequence[str],
        bundles: Sequence[Bundle] = (),
        threads: Mapping[str, ThreadShare] | None = None,
        pool: RayResourcePool | None = None,
    ) -> None:
        self.name, self.actors, self.worker_names = name, list(actors), list(worker_names)
        self.threads = dict(threads or {})
        self._bundles, self._pool = bundles, pool
        self._addresses = [actor.address.remote() for actor in self.actors]
        self._to_build: dict[str, ClassWithInitArgs[Any]] = {}
        self._builds: list[Call] = []

    @classmethod
    def start(
        cls,
        name: str,
        entry: RayClassWithInitArgs[Any],
        pool: RayResourcePool | None,
        name_prefix: str | None,
        detached: bool,
    ) -> "Crew":
        """Start a process on each bundle of a pool, all at once; waits for none of them.

        Args:
            pool: None: one process, with a pool of its own.
        """
        prefix = name_prefix if name_prefix is not None else secrets.token_hex(4)
        own = RayResourcePool([1], name_prefix=f"{prefix}.{name}", detached=detached) if pool is None else None
        pool = own or pool
        assert pool is not None
        bundles = pool.take_share(name, entry.additional_resource)
        threads = thread_shares(bundles, pool.neighbours)
        names = [f"{prefix}.{name}:{rank}" for rank in range(pool.world_size)]
        options = entry.options
        runtime_env = dict(options.get("runtime_env") or {})
        chosen = runtime_env.pop("env_vars", {})
        actors = [
            worker_actor(
                **pool.group_share(),
                **{key: value for key, value in options.items() if key != "runtime_env"},
                resources=entry.additional_resource or None,
                name=worker_name,
                namespace=NAMESPACE,
                lifetime="detached" if detached else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.placement_group, bundle.index),
                runtime_env={**runtime_env, "env_vars": {**threads[bundle.node_id].environment(), **chosen}},
            ).remote(name, rank)
            for rank, (bundle, worker_name) in enumerate(zip(bundles, names, strict=True))
        ]
        return cls(name, actors, names, bundles, threads, own)

    @classmethod
    def find(cls, name: str, worker_names: Sequence[str]) -> "Crew":
        """Processes that another driver started, by their names in rank order."""
        actors = []
        for worker_name in worker_names:
            try:
                actors.append(ray.get_actor(worker_name, NAMESPACE))
            except ValueError as error:
                known = sorted(
                    entry["name"]
                    for entry in ray.util.list_named_actors(all_namespaces=True)
                    if entry["namespace"] == NAMESPACE
                )
                raise WorkerError(
                    f"worker process {worker_name!r}",
                    got="no such name in the cluster",
                    expected=f"one of {', '.join(known) or 'none: there is no named process'}",
                    fix="Only processes started with detached=True outlive their driver.",
                ) from error
        return cls(name, actors, worker_names)

    @functools.cached_property
    def addresses(self) -> list[ProcessAddress]:
        """Where the processes run; waits until all have started."""
        return waiting.addresses(self.actors, self._addresses, self.name)

    @functools.cached_property
    def processes(self) -> list[RemoteProcess]:
        """The processes in rank order; waits until all have started, and has their workers built."""
        size = len(self.actors)
        processes = [
            RemoteProcess(actor, address, rank, size)
            for rank, (actor, address) in enumerate(zip(self.actors, self.addresses, strict=True))
        ]
        places = self._places()
        for role, entry in self._to_build.items():
            # Arguments may be large (a tokenizer): one object for all processes.
            shared = ray.put(entry)
            self._builds += [
                process.build(role, shared, place) for process, place in zip(processes, places, strict=True)
            ]
        return processes

    def build(self, role: str, entry: ClassWithInitArgs[Any]) -> None:
        """Have a worker built in each process as soon as all have started."""
        self._to_build[role] = entry

    def builds(self) -> list[Call]:
        """The builds of all workers; started with the processes, resolved by `waiting.resolve`."""
        assert self.processes
        return self._builds

    def end(self) -> None:
        """End the processes, and give the resources back if they are the crew's own."""
        groups = self._pool.placement_groups if self._pool else []
        for bundle in self._bundles:
            if self.name in bundle.groups:
                bundle.groups.remove(self.name)
        end_processes(self.actors, addresses_so_far(self._addresses), groups)

    def _places(self) -> list[WorkerPlace]:
        nodes = [address.node_id for address in self.addresses]
        first = self.addresses[0]
        return [
            WorkerPlace(rank, len(nodes), nodes[:rank].count(node), nodes.count(node), first.node, first.port)
            for rank, node in enumerate(nodes)
        ]
