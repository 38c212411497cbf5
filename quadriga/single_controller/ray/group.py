# SPDX-License-Identifier: Apache-2.0
"""Worker groups on Ray: one process per device, with one role inside or several.

    RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, config))
      WorkerProcesses   all processes are started at once, each on a bundle of the pool; rank 0's address says where
                        the ranks will meet; then every process builds its worker                 process.py
    group.update_actor(batch)
      start_all         columns go to the object store once, a message to each process            transport.py
      resolve           waits, and raises the first failure                                       calls.py

The constructor waits for nothing of this, so that several groups start side by side; the first call of each waits
for its processes. A worker that cannot be built fails in the group's first call.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import ray
from ray.actor import ActorClass
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quadriga.config.trainer import TrainerConfig
from quadriga.errors import WorkerError
from quadriga.observe.machine import num_usable_cores
from quadriga.single_controller.dispatch import Arguments
from quadriga.single_controller.ray import calls
from quadriga.single_controller.ray.calls import Call
from quadriga.single_controller.ray.cluster import await_lost_nodes, renew_own_cluster, run_on_node
from quadriga.single_controller.ray.errors import WorkerName
from quadriga.single_controller.ray.heartbeat import Heartbeat
from quadriga.single_controller.ray.pools import RayResourcePool, ResourcePoolManager
from quadriga.single_controller.ray.process import ProcessAddress, WorkerProcess
from quadriga.single_controller.ray.transport import OUTBOX
from quadriga.single_controller.resource_pool import THREADS, share_of_cores
from quadriga.single_controller.worker import Worker, WorkerPlace
from quadriga.single_controller.worker_group import (
    ClassWithInitArgs,
    W,
    WorkerGroup,
    WorkerGroups,
    describe_arguments,
)

# Options of an actor that its group decides.
_OF_THE_GROUP = frozenset(
    {
        "num_cpus",
        "num_gpus",
        "resources",
        "scheduling_strategy",
        "placement_group",
        "name",
        "lifetime",
    }
)


class RayClassWithInitArgs(ClassWithInitArgs[W]):
    """A worker class (plain, or wrapped in `ray.remote` with options), and the arguments to build it with."""

    def __init__(self, cls: type[W] | ActorClass, *args: Any, **kwargs: Any) -> None:
        self.options: dict[str, Any] = {}
        if isinstance(cls, ActorClass):
            self.options = {
                key: value for key, value in cls._default_options.items() if value is not None
            }
            # `ray.remote` derives a class of its own from the one that it is given.
            cls = cls.__ray_metadata__.modified_class.__ray_actor_class__
        taken = ", ".join(sorted(_OF_THE_GROUP & set(self.options)))
        if taken:
            where, got = "RayClassWithInitArgs", f"a class with the options {taken} of ray.remote"
            fix = "Shares of a device follow from RayResourcePool.max_colocate_count."
            raise WorkerError(
                where,
                got=got,
                expected="options that the pool and the group do not decide",
                fix=fix,
            )
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            got, fix = (
                getattr(cls, "__name__", repr(cls)),
                "Derive it from quadriga.single_controller.Worker.",
            )
            raise WorkerError(
                "RayClassWithInitArgs", got=got, expected="a class of workers", fix=fix
            )
        super().__init__(cls, *args, **kwargs)


class WorkerDict(Worker):
    """Several roles in one process per device; made by `create_colocated_worker_cls`. The registered methods of all
    roles are the group's, as `<role>_<method>`; `RayWorkerGroup.spawn` gives each a group in the same processes."""

    roles: Mapping[str, RayClassWithInitArgs[Any]] = {}


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs[Any]],
) -> RayClassWithInitArgs[WorkerDict]:
    """One class for several roles that share their processes. Options of the actors must agree."""
    if not class_dict:
        raise WorkerError("create_colocated_worker_cls", got="no roles", expected="at least one")
    roles = {str(role): entry for role, entry in class_dict.items()}
    together = RayClassWithInitArgs(
        type("WorkerDict", (WorkerDict,), {"roles": roles, "__module__": __name__})
    )
    for role, entry in roles.items():
        for key, value in entry.options.items():
            if together.options.setdefault(key, value) != value:
                where = f"create_colocated_worker_cls: option {key}"
                got = f"{value!r} of {role}, {together.options[key]!r} before it"
                raise WorkerError(
                    where, got=got, expected="one value, for the roles share their processes"
                )
    return together


class WorkerProcesses:
    """Processes, one on each bundle of the pool, and the roles that are built in them; waits for none of them.
    `name`: stands before the rank in messages.
    `entries`: class and arguments of the worker of each role, built as soon as all processes have started."""

    def __init__(
        self,
        name: str,
        pool: RayResourcePool,
        options: Mapping[str, Any],
        entries: Mapping[str, ClassWithInitArgs[Any]],
    ) -> None:
        self.name, self.entries = name, dict(entries)
        self.bundles, share = pool.take_share(name)
        counts = Counter(bundle.node_id for bundle in self.bundles)
        threads = {
            node: share_of_cores(
                run_on_node(node, num_usable_cores), count, pool.neighbours.get(node, count)
            )
            for node, count in counts.items()
        }
        self.threads = "; ".join(dict.fromkeys(share.reason for share in threads.values()))
        chosen: dict[str, str] = {}
        if wish := os.environ.get(THREADS):
            # A user who says how many threads a process has means each process, as in a run without Ray.
            chosen = {THREADS: wish, "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS", wish)}
            self.threads = f"{THREADS}={wish} in each process, as here"
        runtime_env = dict(options.get("runtime_env") or {})
        chosen |= runtime_env.pop("env_vars", {})
        # In order even if the arguments of the first call are the last to be there: ranks meet in their collectives.
        fixed: dict[str, Any] = {
            "concurrency_groups": {"control": 1, "beside": 1},
            "allow_out_of_order_execution": False,
        }
        given = {key: value for key, value in options.items() if key != "runtime_env"}
        process = ray.remote(**share, **fixed, **given)(WorkerProcess)
        self._processes = [
            process.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    bundle.placement_group, bundle.index
                ),
                runtime_env={
                    **runtime_env,
                    "env_vars": {**threads[bundle.node_id].environment(), **chosen},
                },
            )
            for bundle in self.bundles
        ]
        self.is_ended = False
        self.actors = [process.remote(name, rank) for rank, process in enumerate(self._processes)]
        self.address_refs = [actor.address.remote() for actor in self.actors]
        self.load_refs = [self._load(actor) for actor in self.actors]

    @cached_property
    def addresses(self) -> list[ProcessAddress]:
        """Where the processes run; waits until all have started, and has their workers built."""
        addresses: list[ProcessAddress] = calls.resolve(self.starts())
        self._build(range(len(addresses)), addresses)
        return addresses

    def starts(self) -> list[Call]:
        """The start of each process that there is, whose output is its address."""
        return [self._start_of(rank) for rank in range(len(self.actors))]

    def restart(self, rank: int) -> None:
        """End the process of a rank, start another on its bundle, and have its workers built there. Waits until the
        process has started: as long as the cluster lacks the resources."""
        calls.end_processes([self.actors[rank]], [self.address_refs[rank]])
        if self.is_ended:
            raise WorkerError(
                f"{self.name}[rank {rank}]",
                got="a restart",
                expected="a group that is not shut down",
            )
        self.actors[rank] = self._processes[rank].remote(self.name, rank)
        self.address_refs[rank] = self.actors[rank].address.remote()
        self.load_refs[rank] = self._load(self.actors[rank])
        [self.addresses[rank]] = calls.resolve([self._start_of(rank)])
        self._build([rank], self.addresses)

    def _start_of(self, rank: int) -> Call:
        name = WorkerName(self.name, rank, len(self.actors))
        return Call(self.address_refs[rank], self.actors[rank], None, name, "start", str)

    def loads(self) -> list[Call]:
        """The imports of each process that has started."""
        pairs = zip(self.starts(), self.addresses, self.load_refs, strict=True)
        return [
            replace(start, ref=ref, address=address, method="load") for start, address, ref in pairs
        ]

    def _load(self, actor: Any) -> Any:
        """Have a process import the modules of its workers while this one still prepares what these are built of. What
        a user has written comes with the workers themselves."""
        bases = [base for entry in self.entries.values() for base in entry.cls.__mro__]
        modules = [base.__module__ for base in bases if base.__module__.startswith("quadriga.")]
        return actor.load.remote(list(dict.fromkeys(modules)))

    def _build(self, ranks: Sequence[int], addresses: Sequence[ProcessAddress]) -> None:
        nodes, master = [address.node_id for address in addresses], addresses[0]
        for role, entry in self.entries.items():
            # Arguments may be large (a tokenizer): one object for all processes.
            shared = ray.put(ClassWithInitArgs(entry.cls, *entry.args, **entry.kwargs))
            for rank in ranks:
                local, count = nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])
                place = WorkerPlace(rank, len(nodes), local, count, master.node, master.port)
                self.actors[rank].build.remote(role, shared, place)


class RayWorkerGroup(WorkerGroup[W]):
    """Workers in Ray's processes, one for each process of the pool.
    Raises WorkerError: the cluster has not the resources, or a pool has no place for another group. From a call, what
    went wrong in a worker.
    `ray_cls_with_init`: what to build; of `create_colocated_worker_cls`: several roles in each process (`spawn`).
    `processes`: of another group, in which this class's workers have been built; None: they are started."""

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs[W],
        name: str = "",
        processes: WorkerProcesses | None = None,
    ) -> None:
        entry = ray_cls_with_init
        roles = entry.cls.roles if issubclass(entry.cls, WorkerDict) else {}
        super().__init__(entry.cls, resource_pool.world_size, name or "+".join(roles))
        self.processes = processes or WorkerProcesses(
            self.name, resource_pool, entry.options, roles or {self.name: entry}
        )
        self._roles = {
            role: RayWorkerGroup(resource_pool, part, role, self.processes)
            for role, part in roles.items()
        }
        if roles:
            self.methods = {
                f"{role}_{method}": registration
                for role, group in self._roles.items()
                for method, registration in group.methods.items()
            }

    def start_all(self, method_name: str, per_rank: Sequence[Arguments]) -> list[Call]:
        """Start a method on the group's ranks; what they share goes into the object store once."""
        group, method = self._group_of(method_name)
        addresses, started = self.processes.addresses, []
        is_beside = method in group.methods and group.methods[method].is_beside
        for number, message in enumerate(OUTBOX.pack(per_rank)):
            rank = self.ranks[number]
            address, actor = addresses[rank], self.processes.actors[rank]
            worker = WorkerName(group.name, rank, len(addresses), address.node, address.pid)
            # One argument in place of three: Ray takes time for each.
            header: Any = group.name, method, message.body
            if isinstance(message.body, bytes):
                header = f"{group.name}\n{method}\n".encode() + message.body
            ref = (actor.call_beside if is_beside else actor.call).remote(header, *message.refs)
            started.append(
                Call(
                    ref,
                    actor,
                    address,
                    worker,
                    method,
                    partial(describe_arguments, *per_rank[number]),
                )
            )
        return started

    resolve = staticmethod(calls.resolve)
    first_outcomes = staticmethod(calls.first_outcomes)

    @property
    def shares_processes(self) -> bool:
        return len(self.processes.entries) > 1

    def restart(self, rank: int) -> None:
        self.processes.restart(rank)

    def method(self, name: str) -> Callable[..., Any]:
        """The registered method `name`, bound to the group; of several roles: `<role>_<method>`."""
        group, method = self._group_of(name)
        return super().method(name) if group is self else group.method(method)

    def _group_of(self, name: str) -> "tuple[RayWorkerGroup[Any], str]":
        """The group of a role and its method, of `<role>_<method>`; else this one."""
        for role in sorted(self._roles, key=len, reverse=True):
            if name.startswith(f"{role}_"):
                return self._roles[role], name.removeprefix(f"{role}_")
        return self, name

    def spawn(self, prefix_set: Collection[str]) -> "dict[str, RayWorkerGroup[Any]]":
        """A group for each of the roles, in the same processes."""
        unknown = sorted(role for role in prefix_set if role not in self._roles)
        if unknown:
            where = f"{self.name}.spawn"
            raise WorkerError(
                where,
                got=f"{unknown}",
                expected=f"roles among {list(self._roles) or 'none: one role'}",
            )
        return {role: group for role, group in self._roles.items() if role in prefix_set}

    def shutdown(self) -> None:
        """End the processes, with all roles in them, and wait until they are gone."""
        self.processes.is_ended = True
        for bundle in self.processes.bundles:
            if self.processes.name in bundle.groups:
                bundle.groups.remove(self.processes.name)
        calls.end_processes(self.processes.actors, self.processes.address_refs)


class RayWorkerGroups(WorkerGroups):
    """All worker groups of a run on Ray: roles on one pool share its processes; the first call waits for them. With the
    device `auto`, each process takes a GPU where the cluster has any."""

    is_remote = True

    def __init__(
        self,
        classes: Mapping[str, ClassWithInitArgs[Any]],
        roles: Mapping[str, str],
        pools: Mapping[str, Sequence[int]],
        settings: TrainerConfig,
        runtime_env: Mapping[str, Any] | None = None,
        devices: Mapping[str, int] | None = None,
    ) -> None:
        # First of all: a cluster without its head answers no call, and Ray then ends this process.
        renew_own_cluster()
        # Ray would still place processes on a node that has just been lost.
        await_lost_nodes()
        has_gpus = settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
        use_gpu = settings.device == "cuda" or has_gpus
        self.groups: dict[str, RayWorkerGroup[Any]] = {}
        self._of_pools: dict[str, RayWorkerGroup[Any]] = {}
        self._heartbeat: Heartbeat | None = None
        # One group to a pool: each process has its whole share of the machine.
        self._manager = ResourcePoolManager(
            pools, roles, use_gpu, max_colocate_count=1, devices=devices
        )
        try:
            for name, pool in self._manager.create_resource_pool().items():
                inside = {
                    role: RayClassWithInitArgs(entry.cls, *entry.args, **entry.kwargs)
                    for role, entry in classes.items()
                    if roles[role] == name
                }
                together = create_colocated_worker_cls(inside)
                together.options["runtime_env"] = dict(runtime_env or {})
                self._of_pools[name] = RayWorkerGroup(pool, together)
                self.groups |= self._of_pools[name].spawn(inside)
            self._heartbeat = Heartbeat(
                [group.processes.starts for group in self._of_pools.values()], settings
            )
        except BaseException:
            self.end()
            raise

    def await_start(self) -> None:
        calls.resolve(
            [load for group in self._of_pools.values() for load in group.processes.loads()]
        )

    def describe(self) -> dict[str, str]:
        chosen = {}
        for pool, group in self._of_pools.items():
            roles = ", ".join(role for role in self.groups if self._manager.mapping[role] == pool)
            nodes = Counter(address.node for address in group.processes.addresses)
            where = ", ".join(f"{count} on {node}" for node, count in nodes.items())
            chosen[f"pool {pool}"] = f"{where}: {roles}; {group.processes.threads}"
        return chosen

    def end(self) -> None:
        """Kill the processes of all groups, give their resources back, and wait until both have happened."""
        if self._heartbeat:
            self._heartbeat.close()
        # Each of them, whatever comes of the others.
        with ExitStack() as stack:
            stack.callback(self._manager.close)
            for group in self._of_pools.values():
                stack.callback(group.shutdown)
