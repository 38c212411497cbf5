# SPDX-License-Identifier: Apache-2.0
"""Worker groups on Ray: one process per device, with one role inside or several.

    RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, config))
      actors       all processes are started at once, each on a bundle of the pool     crew.py
      addresses    rank 0's says where the ranks will meet                             process.py
      builds       every process builds its worker, all at the same time               process.py
    group.update_actor(batch)
      start_all    columns go to the object store once, a message to each process      transport.py
      resolve      waits, and raises the first failure                                 waiting.py

The constructor waits for nothing of this, so that several groups start side by side; the first call of each waits
for its processes. A worker that cannot be built fails in `wait_until_built`, else in the group's first call.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from quadriga.errors import WorkerError
from quadriga.single_controller.local import describe_arguments
from quadriga.single_controller.ray import waiting
from quadriga.single_controller.ray.classes import RayClassWithInitArgs, WorkerDict
from quadriga.single_controller.ray.crew import NAMESPACE, Crew
from quadriga.single_controller.ray.pools import RayResourcePool
from quadriga.single_controller.ray.process import Call
from quadriga.single_controller.ray.transport import OUTBOX
from quadriga.single_controller.worker_group import W, WorkerGroup


class RayWorkerGroup(WorkerGroup[W]):
    """Workers in Ray's processes.

    Args:
        resource_pool: one worker for each of its processes; None: a single worker, on resources of its own.
        ray_cls_with_init: what to build; of `create_colocated_worker_cls`: several roles in each process (`spawn`).
        bin_pack: the processes of each of the pool's nodes share a node; otherwise each may run anywhere.
        name_prefix: of the processes' names; None: one that nobody else has.
        detached: the processes outlive the driver, and another finds them with `from_detached`.
        worker_names: attach to these processes, in rank order, and start none.
        name: the role, for messages; "": the name of the class.

    Raises:
        WorkerError: the cluster has not the resources, or a pool has no place for another group. From a call, what
            went wrong in a worker.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs[W] | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        name: str = "",
    ) -> None:
        if ray_cls_with_init is None:
            raise WorkerError("RayWorkerGroup.ray_cls_with_init", got="None", expected="a RayClassWithInitArgs")
        entry = ray_cls_with_init
        roles = entry.cls.roles if issubclass(entry.cls, WorkerDict) else {}
        name = name or "+".join(roles) or entry.cls.__name__
        _check_names(name, name_prefix or "")
        if worker_names is not None:
            crew = Crew.find(name, worker_names)
        else:
            if resource_pool is not None and not bin_pack:
                resource_pool.spread()
            crew = Crew.start(name, entry, resource_pool, name_prefix, detached)
            for role, part in (roles or {name: entry}).items():
                crew.build(role, part.plain())
        self._join(crew, entry.cls, name)
        self._roles = {role: RayWorkerGroup._view(crew, part.cls, role) for role, part in roles.items()}
        if roles:
            self.methods = entry.cls.methods()

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        ray_cls_with_init: RayClassWithInitArgs[Any] | None = None,
    ) -> "RayWorkerGroup[Any]":
        """The group whose processes another driver started with `detached=True`.

        Args:
            name_prefix: with which it was started; not needed with `worker_names`.
            worker_names: of the group, in rank order; None: all with that prefix.
            ray_cls_with_init: the class of its workers; nothing is built.
        """
        if worker_names is None:
            worker_names = _names_with_prefix(name_prefix)
        role = worker_names[0].rpartition(":")[0].rpartition(".")[2]
        return cls(worker_names=worker_names, ray_cls_with_init=ray_cls_with_init, name=role)

    @classmethod
    def _view(cls, crew: Crew, worker_class: type[W], role: str) -> "RayWorkerGroup[W]":
        group = cls.__new__(cls)
        group._join(crew, worker_class, role)
        group._roles = {}
        return group

    def _join(self, crew: Crew, worker_class: type[W], name: str) -> None:
        super().__init__(worker_class, len(crew.actors), name)
        self.crew = crew

    # ---- calls --------------------------------------------------------------------------------------

    def start(self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Start a method on one rank."""
        role, method = self._role_and_method(method_name)
        process, message = self.crew.processes[rank], OUTBOX.pack([(args, kwargs)])[0]
        return process.call(role, method, message, partial(describe_arguments, args, kwargs))

    def start_all(self, method_name: str, per_rank: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Call]:
        """Start a method on the ranks 0, 1, ...; what they share goes into the object store once."""
        role, method = self._role_and_method(method_name)
        messages = OUTBOX.pack(per_rank)
        return [
            process.call(role, method, message, partial(describe_arguments, *arguments))
            for process, message, arguments in zip(self.crew.processes, messages, per_rank, strict=False)
        ]

    @staticmethod
    def resolve(handles: Sequence[Call]) -> list[Any]:
        """Wait for calls and return their outputs; the first failure is raised, whichever rank it is on."""
        return waiting.resolve(handles)

    @staticmethod
    def resolve_lent(handles: Sequence[Call]) -> list[Any]:
        """The same; tensors may lie in the read-only memory of the object store."""
        return waiting.resolve(handles, borrow=True)

    def method(self, name: str) -> Callable[..., Any]:
        """The registered method `name`, bound to the group."""
        if self._roles and name in self.methods:
            role, method = self._role_and_method(name)
            return self._roles[role].method(method)
        return super().method(name)

    def _role_and_method(self, method_name: str) -> tuple[str, str]:
        return self.worker_class.split(method_name) if self._roles else (self.name, method_name)

    # ---- processes ----------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Any]:
        """Ray's handles of the processes, in rank order."""
        return self.crew.actors

    @property
    def worker_names(self) -> list[str]:
        """Names of the processes, in rank order; `from_detached` finds them."""
        return self.crew.worker_names

    @property
    def master_address(self) -> str:
        """Address of rank 0's node, where the ranks meet."""
        return self.crew.addresses[0].node

    @property
    def master_port(self) -> int:
        """Port on it."""
        return self.crew.addresses[0].port

    @property
    def threads(self) -> str:
        """How many threads each process computes with, and why."""
        return "; ".join(dict.fromkeys(share.reason for share in self.crew.threads.values()))

    def spawn(self, prefix_set: Collection[str]) -> "dict[str, RayWorkerGroup[Any]]":
        """A group for each of the roles, in the same processes.

        Args:
            prefix_set: roles that `create_colocated_worker_cls` was given.
        """
        unknown = sorted(role for role in prefix_set if role not in self._roles)
        if unknown:
            raise WorkerError(
                f"{self.name}.spawn", got=f"{unknown}", expected=f"roles among {list(self._roles) or 'none: one role'}"
            )
        return {role: group for role, group in self._roles.items() if role in prefix_set}

    def wait_until_built(self) -> None:
        """Wait until every worker is built.

        Raises:
            WorkerError: one could not be.
        """
        waiting.resolve(self.crew.builds())

    def shutdown(self) -> None:
        """End the processes, with all roles in them, and wait until they are gone."""
        self.crew.end()


def _check_names(name: str, prefix: str) -> None:
    if ":" in prefix or set(":.") & set(name):
        raise WorkerError(
            "RayWorkerGroup",
            got=f"name {name!r}, name_prefix {prefix!r}",
            expected="no colon in either, and no dot in the name",
        )


def _names_with_prefix(prefix: str | None) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [entry["name"] for entry in named if entry["namespace"] == NAMESPACE]
    found = [name for name in names if name.rpartition(":")[0].rpartition(".")[0] == prefix]
    if not found:
        raise WorkerError(
            f"from_detached(name_prefix={prefix!r})", got="no process with it", expected=f"one of {sorted(names)}"
        )
    groups = {name.rpartition(":")[0] for name in found}
    if len(groups) > 1:
        raise WorkerError(
            f"from_detached(name_prefix={prefix!r})",
            got=f"several groups: {sorted(groups)}",
            expected="one",
            fix="Pass the names of its processes: worker_names=group.worker_names.",
        )
    return sorted(found, key=lambda name: int(name.rpartition(":")[2]))
