# SPDX-License-Identifier: Apache-2.0
"""Worker groups on Ray: one process per device, for one role or several.

    RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, config))
      WorkerProcesses   starts all processes at once, each on a bundle of the pool. The ranks meet
                        at the address of rank 0. Then each process builds its worker.  process.py
    group.update_actor(batch)
      start_all         puts columns into the object store once, and sends a message to each process
                                                                                       transport.py
      resolve           waits, and raises the first failure                            calls.py

The constructor does not wait, so that several groups start at the same time. The first call on a
group waits for its processes, and fails if a worker cannot be built.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import ray
from ray.actor import ActorClass
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quadriga.config.trainer import TrainerConfig
from quadriga.errors import WorkerError, WorkerLostError, first_line
from quadriga.observe.call_times import CallTime
from quadriga.observe.machine import num_usable_cores
from quadriga.single_controller.dispatch import Arguments
from quadriga.single_controller.ray import calls
from quadriga.single_controller.ray.calls import RemoteCall
from quadriga.single_controller.ray.cluster import (
    renew_own_cluster,
    run_on_node,
    wait_until_ray_drops_lost_nodes,
)
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

# Time for the first process on a node. It imports Ray and torch, from a network file system perhaps.
FIRST_PROCESS_LIMIT_S = 600.0
CALL_TIMES_LIMIT_S = 5.0  # time for processes to send the times of their calls
# Options of an actor that the pool and the group decide.
_GROUP_OPTIONS = frozenset(
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
    """A worker class and the arguments to build it with.

    Args:
        cls: the class, plain or wrapped in `ray.remote` with options.
        args: positional arguments of the class.
        kwargs: named arguments of the class.

    Raises:
        WorkerError: the class is not a `Worker`, or has options that the pool and the group decide.
    """

    def __init__(self, cls: type[W] | ActorClass, *args: Any, **kwargs: Any) -> None:
        self.options: dict[str, Any] = {}
        if isinstance(cls, ActorClass):
            defaults = cls._default_options.items()
            self.options = {key: value for key, value in defaults if value is not None}
            # `ray.remote` has derived a class from the user's, which is the one to build.
            cls = cls.__ray_metadata__.modified_class.__ray_actor_class__
        forbidden = ", ".join(sorted(_GROUP_OPTIONS & set(self.options)))
        if forbidden:
            raise WorkerError(
                "RayClassWithInitArgs",
                got=f"a class with the options {forbidden} of ray.remote",
                expected="options that the pool and the group do not decide",
                fix="Shares of a device follow from RayResourcePool.max_colocate_count.",
            )
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise WorkerError(
                "RayClassWithInitArgs",
                got=getattr(cls, "__name__", repr(cls)),
                expected="a class of workers",
                fix="Derive it from quadriga.single_controller.Worker.",
            )
        super().__init__(cls, *args, **kwargs)


class WorkerDict(Worker):
    """Several roles in one process per device, made by `create_colocated_worker_cls`.

    The group has the registered methods of all roles, as `<role>_<method>`. `RayWorkerGroup.spawn`
    gives each role a group in the same processes.
    """

    roles: Mapping[str, RayClassWithInitArgs[Any]] = {}


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs[Any]],
) -> RayClassWithInitArgs[WorkerDict]:
    """Combine several roles into one class, so that they share processes.

    Args:
        class_dict: class and arguments of each role.

    Returns:
        A new subclass of `WorkerDict` with these roles.

    Raises:
        WorkerError: there are no roles, or their actor options differ.
    """
    if not class_dict:
        raise WorkerError("create_colocated_worker_cls", got="no roles", expected="at least one")
    roles = {str(role): entry for role, entry in class_dict.items()}
    attributes = {"roles": roles, "__module__": __name__}
    colocated = RayClassWithInitArgs(type("WorkerDict", (WorkerDict,), attributes))
    # The options are those of the common processes.
    for role, entry in roles.items():
        for key, value in entry.options.items():
            earlier = colocated.options.setdefault(key, value)
            if earlier != value:
                raise WorkerError(
                    f"create_colocated_worker_cls: option {key}",
                    got=f"{value!r} for {role}, {earlier!r} before it",
                    expected="the same value, because the roles share their processes",
                )
    return colocated


def _num_cores_of(node_id: str) -> int:
    """Ask a node for the number of cores that processes there may use.

    Starts a process on the node, which takes long if it is the first one.

    Raises:
        WorkerLostError: the node is lost, or starts no process.
    """
    try:
        return run_on_node(node_id, num_usable_cores, limit_s=FIRST_PROCESS_LIMIT_S)
    except RayError as error:
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}[node_id]
        raise WorkerLostError(
            f"the first process on node {address}",
            got=f"{type(error).__name__}: {first_line(error)}",
            expected=f"that it starts within {FIRST_PROCESS_LIMIT_S:g} s",
            fix="`ray status` lists the nodes that are there; the node's logs say why it starts "
            "nothing (/tmp/ray/session_latest/logs/raylet.out).",
        ) from error


class WorkerProcesses:
    """Processes on the bundles of a pool, and the workers of one or several roles in them.

    The constructor waits for the number of cores of each node, but not for the processes.

    Args:
        name: name of the group, for messages.
        pool: provides one bundle per process.
        options: options of `ray.remote`.
        entries: class and arguments of the worker of each role. Workers are built as soon as all
            processes have started.

    Attributes:
        threads: the choice of threads with its reason, to be printed.
        actors: handles of the processes, by rank.
        address_refs: references of the outputs of `WorkerProcess.address`, by rank.
        load_refs: references of the outputs of `WorkerProcess.load`, by rank.
        is_ended: whether the group is shut down, so that processes must not be restarted.
    """

    def __init__(
        self,
        name: str,
        pool: RayResourcePool,
        options: Mapping[str, Any],
        entries: Mapping[str, ClassWithInitArgs[Any]],
    ) -> None:
        self.name = name
        self.entries = dict(entries)
        self.pool = pool
        bundles, share = pool.take_share(name)

        # For each node: number of its processes, and threads of each of them.
        counts = Counter(bundle.node_id for bundle in bundles)
        threads = {}
        for node, count in counts.items():
            cores = _num_cores_of(node)
            threads[node] = share_of_cores(cores, count, pool.neighbours.get(node, count))
        self.threads = "; ".join(dict.fromkeys(share.reason for share in threads.values()))
        variables = {}
        if num_threads := os.environ.get(THREADS):
            # A number of threads that the user has set applies to each process, as without Ray.
            mkl_threads = os.environ.get("MKL_NUM_THREADS", num_threads)
            variables = {THREADS: num_threads, "MKL_NUM_THREADS": mkl_threads}
            self.threads = f"{THREADS}={num_threads} in each process, as on the driver"

        actor_options = {
            **options,
            # Ray's type stubs know neither of these options, so they are not named arguments.
            "concurrency_groups": {"control": 1, "beside": 2},
            # Run calls in the order of submission, even if their arguments arrive in another
            # order: all ranks must enter their collectives in the same order.
            "allow_out_of_order_execution": False,
        }
        runtime_env = dict(options.get("runtime_env") or {})
        variables |= runtime_env.pop("env_vars", {})
        actor_class = ray.remote(**share, **actor_options)(WorkerProcess)
        self._factories: list[Any] = []
        for bundle in bundles:
            environment = threads[bundle.node_id].environment() | variables
            factory = actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    bundle.placement_group, bundle.index
                ),
                runtime_env={**runtime_env, "env_vars": environment},
            )
            self._factories.append(factory)

        self.is_ended = False
        self.actors = [factory.remote(name, rank) for rank, factory in enumerate(self._factories)]
        self.address_refs = [actor.address.remote() for actor in self.actors]
        self.load_refs = [self._load(actor) for actor in self.actors]

    @cached_property
    def addresses(self) -> list[ProcessAddress]:
        """Addresses of the processes. The first access waits for them, and builds the workers."""
        addresses: list[ProcessAddress] = calls.resolve(self.starts())
        self._build(range(len(addresses)), addresses)
        return addresses

    def starts(self) -> list[RemoteCall]:
        """The starts of all processes, as calls that return the address of each process."""
        return [self._start_of(rank) for rank in range(len(self.actors))]

    def restart(self, rank: int) -> None:
        """End the process of a rank, start another on its bundle, and build its workers there.

        Waits until the process has started: without a time limit, if the cluster lacks resources.

        Raises:
            WorkerError: the group is shut down.
        """
        calls.end_processes([self.actors[rank]], [self.address_refs[rank]])
        # Checked after the end of the process, because `shutdown` may be called meanwhile.
        if self.is_ended:
            raise WorkerError(
                f"{self.name}[rank {rank}]",
                got="a restart",
                expected="a group that is not shut down",
            )
        self.actors[rank] = self._factories[rank].remote(self.name, rank)
        self.address_refs[rank] = self.actors[rank].address.remote()
        self.load_refs[rank] = self._load(self.actors[rank])
        # `addresses` is cached, so the address of the former process is replaced in its list.
        [self.addresses[rank]] = calls.resolve([self._start_of(rank)])
        self._build([rank], self.addresses)

    def _start_of(self, rank: int) -> RemoteCall:
        """The start of a process, as a call that returns the address of the process."""
        name = WorkerName(self.name, rank, len(self.actors))
        return RemoteCall(self.address_refs[rank], self.actors[rank], None, name, "start", str)

    def loads(self) -> list[RemoteCall]:
        """The imports of modules in all processes, as calls. Waits until all have started."""
        by_rank = zip(self.starts(), self.load_refs, self.addresses, strict=True)
        return [
            replace(start, ref=ref, address=address, method="load")
            for start, ref, address in by_rank
        ]

    def _load(self, actor: Any) -> Any:
        """Start to import the modules of the workers, while the driver prepares their arguments.

        Modules of the user are not imported here: they are sent later, with the workers.

        Args:
            actor: handle of the process.

        Returns:
            Reference of the output.
        """
        # Including the modules of base classes.
        bases = [base for entry in self.entries.values() for base in entry.cls.__mro__]
        modules = [base.__module__ for base in bases if base.__module__.startswith("quadriga.")]
        return actor.load.remote(list(dict.fromkeys(modules)))

    def _build(self, ranks: Sequence[int], addresses: Sequence[ProcessAddress]) -> None:
        """Start to build the workers of some ranks.

        Does not wait. If a worker cannot be built, every later call to it returns the failure.

        Args:
            ranks: the ranks.
            addresses: addresses of the processes of all ranks.
        """
        nodes = [address.node_id for address in addresses]
        master = addresses[0]
        for role, entry in self.entries.items():
            # Arguments may be large, such as a tokenizer: store them once for all processes.
            shared = ray.put(ClassWithInitArgs(entry.cls, *entry.args, **entry.kwargs))
            for rank in ranks:
                place = WorkerPlace(
                    rank,
                    world_size=len(nodes),
                    local_rank=nodes[:rank].count(nodes[rank]),
                    local_world_size=nodes.count(nodes[rank]),
                    master_addr=master.node,
                    master_port=master.port,
                )
                self.actors[rank].build.remote(role, shared, place)


class RayWorkerGroup(WorkerGroup[W]):
    """Workers in processes of Ray, one for each process of the pool.

    Args:
        resource_pool: the processes and their resources.
        ray_cls_with_init: class and arguments of the workers. A class of
            `create_colocated_worker_cls` has several roles in each process; see `spawn`.
        name: name of the group, for messages.
        processes: processes of another group, which builds the workers in them. By default,
            processes are started.

    Raises:
        WorkerError: the cluster lacks the resources, or the pool has no room for another group.
            From a call: the error of a worker.
    """

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
        if processes is None:
            entries = roles or {self.name: entry}
            processes = WorkerProcesses(self.name, resource_pool, entry.options, entries)
        self.processes = processes
        self._roles: dict[str, RayWorkerGroup[Any]] = {}
        # A group of a `WorkerDict` has the methods of its roles, and none of `WorkerDict` itself.
        if roles:
            self.methods = {}
        for role, role_entry in roles.items():
            group = RayWorkerGroup(resource_pool, role_entry, role, processes)
            self._roles[role] = group
            for method, registration in group.methods.items():
                self.methods[f"{role}_{method}"] = registration

    def start_all(self, method_name: str, per_rank: Sequence[Arguments]) -> list[RemoteCall]:
        """Start a method without waiting; see `WorkerGroup.start_all`.

        The first call waits for the processes. Columns that several ranks share go into the object
        store once.
        """
        group, method = self._group_of(method_name)
        addresses = self.processes.addresses
        is_beside = method in group.methods and group.methods[method].is_beside
        started = []
        for number, message in enumerate(OUTBOX.pack(per_rank)):
            rank = self.ranks[number]
            address = addresses[rank]
            actor = self.processes.actors[rank]
            # Send a single argument instead of three, because each argument costs Ray time.
            # `WorkerProcess.call` splits it.
            header: Any = (group.name, method, message.body)
            if isinstance(message.body, bytes):
                header = f"{group.name}\n{method}\n".encode() + message.body
            call_method = actor.call_beside if is_beside else actor.call
            ref = call_method.remote(header, *message.refs)
            worker = WorkerName(group.name, rank, len(addresses), address.node, address.pid)
            describe = partial(describe_arguments, *per_rank[number])
            started.append(RemoteCall(ref, actor, address, worker, method, describe))
        return started

    resolve = staticmethod(calls.resolve)
    first_outcomes = staticmethod(calls.first_outcomes)

    @property
    def shares_processes(self) -> bool:
        """Whether other roles run in the workers' processes."""
        return len(self.processes.entries) > 1

    @property
    def workers(self) -> "list[RayWorkerGroup[W]]":
        """Groups of one worker each, for methods without collectives."""
        return [copy(self).use_ranks([rank]) for rank in self.ranks]

    def restart(self, rank: int) -> None:
        """End the process of a rank, and start another; see `WorkerProcesses.restart`."""
        self.processes.restart(rank)

    def method(self, name: str) -> Callable[..., Any]:
        """Return a registered method, bound to the group; see `WorkerGroup.method`.

        Args:
            name: name of the method; `<role>_<method>` if the group has several roles.
        """
        group, method = self._group_of(name)
        return super().method(name) if group is self else group.method(method)

    def _group_of(self, name: str) -> "tuple[RayWorkerGroup[Any], str]":
        """Split `<role>_<method>` into the group of the role, and the method.

        Without such a role: this group, and the name unchanged.
        """
        # Try the longest role first: the name of a role may be the beginning of another name.
        for role in sorted(self._roles, key=len, reverse=True):
            if name.startswith(f"{role}_"):
                return self._roles[role], name.removeprefix(f"{role}_")
        return self, name

    def spawn(self, prefix_set: Collection[str]) -> "dict[str, RayWorkerGroup[Any]]":
        """Return groups of single roles, in the same processes.

        Args:
            prefix_set: names of the roles.

        Returns:
            The group of each role, by name.

        Raises:
            WorkerError: a role is unknown.
        """
        unknown_roles = sorted(role for role in prefix_set if role not in self._roles)
        if unknown_roles:
            raise WorkerError(
                f"{self.name}.spawn",
                got=f"{unknown_roles}",
                expected=f"roles among {list(self._roles) or 'none: the group has a single role'}",
            )
        return {role: group for role, group in self._roles.items() if role in prefix_set}

    def shutdown(self) -> None:
        """End the processes, with the workers of all roles in them, and wait until they are gone.

        Gives the share of the resources back to the pool.
        """
        processes = self.processes
        processes.is_ended = True
        if processes.name in processes.pool.groups:
            processes.pool.groups.remove(processes.name)
        calls.end_processes(processes.actors, processes.address_refs)


class RayWorkerGroups(WorkerGroups):
    """All worker groups of a run on Ray. Roles on one pool share its processes.

    The first call waits for the processes. With the device `auto`, each process takes a GPU if the
    cluster has any. For arguments see `WorkerGroups`.
    """

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
        # Before any other call to Ray: without a head, calls block until Ray ends this process.
        renew_own_cluster()
        # Ray would still place processes on a node that has just been lost.
        wait_until_ray_drops_lost_nodes()
        auto_finds_gpus = settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
        use_gpu = settings.device == "cuda" or auto_finds_gpus
        self.groups: dict[str, RayWorkerGroup[Any]] = {}
        self._pool_groups: dict[str, RayWorkerGroup[Any]] = {}
        self._heartbeat: Heartbeat | None = None
        # All roles of a pool are in one group, so that each process gets its bundle undivided.
        self._manager = ResourcePoolManager(
            pools, roles, use_gpu, max_colocate_count=1, devices=devices
        )
        try:
            for name, pool in self._manager.create_resource_pool().items():
                entries = {}
                for role, entry in classes.items():
                    if roles[role] == name:
                        entries[role] = RayClassWithInitArgs(entry.cls, *entry.args, **entry.kwargs)
                colocated = create_colocated_worker_cls(entries)
                colocated.options["runtime_env"] = dict(runtime_env or {})
                self._pool_groups[name] = RayWorkerGroup(pool, colocated)
                self.groups |= self._pool_groups[name].spawn(entries)
            starts = [group.processes.starts for group in self._pool_groups.values()]
            self._heartbeat = Heartbeat(starts, settings)
        except BaseException:
            self.end()
            raise

    def await_start(self) -> None:
        """Wait until all processes have started and have imported the modules of their workers."""
        groups = self._pool_groups.values()
        calls.resolve([load for group in groups for load in group.processes.loads()])

    def describe(self) -> dict[str, str]:
        """Nodes, roles and threads of each pool, to be printed."""
        choices = {}
        for pool, group in self._pool_groups.items():
            roles = ", ".join(role for role in self.groups if self._manager.mapping[role] == pool)
            nodes = Counter(address.node for address in group.processes.addresses)
            places = ", ".join(f"{count} on {node}" for node, count in nodes.items())
            choices[f"pool {pool}"] = f"{places}: {roles}; {group.processes.threads}"
        return choices

    def take_call_times(self) -> list[CallTime]:
        """Times of the calls of all processes since the last request; [] with a single process.

        Waits at most `CALL_TIMES_LIMIT_S`, and leaves out processes that have not answered by then.
        """
        actors = [actor for group in self._pool_groups.values() for actor in group.processes.actors]
        if len(actors) == 1:
            return []
        refs = [actor.take_call_times.remote() for actor in actors]
        # A wait for late processes would delay the step.
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=CALL_TIMES_LIMIT_S)
        times = []
        for ref in ready:
            # If the process has died, the call that waits for it raises the reason.
            with suppress(RayError):
                times += ray.get(ref)
        return times

    def end(self) -> None:
        """Kill the processes of all groups, release their resources, and wait for both."""
        if self._heartbeat:
            self._heartbeat.close()
        # The stack runs every callback, even if another one fails; the manager's comes last.
        with ExitStack() as stack:
            stack.callback(self._manager.close)
            for group in self._pool_groups.values():
                stack.callback(group.shutdown)
