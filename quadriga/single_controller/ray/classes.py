# SPDX-License-Identifier: Apache-2.0
"""What a Ray worker group builds in its processes: one class of workers, or several roles in one process."""

from collections.abc import Mapping
from typing import Any

from ray.actor import ActorClass

from quadriga.errors import WorkerError
from quadriga.single_controller.registration import Registration, registered_methods
from quadriga.single_controller.worker import Worker
from quadriga.single_controller.worker_group import ClassWithInitArgs, W

SEPARATOR = "_"
# Options of an actor that its group decides.
_OF_THE_GROUP = frozenset(
    {"num_cpus", "num_gpus", "resources", "scheduling_strategy", "placement_group", "name", "lifetime"}
)


class RayClassWithInitArgs(ClassWithInitArgs[W]):
    """A worker class, the arguments to build it with, and options of the actors in which it runs.

    Args:
        cls: the class, plain or wrapped in `ray.remote`; the options given there are kept.
    """

    def __init__(self, cls: type[W] | ActorClass, *args: Any, **kwargs: Any) -> None:
        self.options: dict[str, Any] = {}
        self.additional_resource: dict[str, float] = {}
        if isinstance(cls, ActorClass):
            self.update_options({key: value for key, value in cls._default_options.items() if value is not None})
            cls = _plain_class(cls)
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise WorkerError(
                "RayClassWithInitArgs",
                got=getattr(cls, "__name__", repr(cls)),
                expected="a class of workers",
                fix="Derive it from quadriga.single_controller.Worker.",
            )
        super().__init__(cls, *args, **kwargs)

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Add options of Ray actors, such as `runtime_env` or `max_restarts`."""
        taken = sorted(_OF_THE_GROUP & set(options))
        if taken:
            raise WorkerError(
                "RayClassWithInitArgs.update_options",
                got=", ".join(taken),
                expected="options that the pool and the group do not decide",
                fix="Shares of a device follow from RayResourcePool.max_colocate_count; "
                "set_additional_resource asks for further resources.",
            )
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Ask for further resources of the cluster, by name, for each process."""
        self.additional_resource = dict(additional_resource)

    def plain(self) -> ClassWithInitArgs[W]:
        """Class and arguments alone: what travels to the process."""
        return ClassWithInitArgs(self.cls, *self.args, **self.kwargs)


def _plain_class(cls: ActorClass) -> type:
    # `ray.remote` derives a class of its own from the one that it is given.
    return cls.__ray_metadata__.modified_class.__ray_actor_class__


class WorkerDict(Worker):
    """Several roles in one process per device; made by `create_colocated_worker_cls`.

    The registered methods of all roles are the group's, as `<role>_<method>`; `RayWorkerGroup.spawn` gives each role a
    group of its own in the same processes.
    """

    roles: Mapping[str, RayClassWithInitArgs[Any]] = {}

    @classmethod
    def methods(cls) -> dict[str, Registration]:
        """The registered methods of all roles."""
        return {
            f"{role}{SEPARATOR}{name}": registration
            for role, entry in cls.roles.items()
            for name, registration in registered_methods(entry.cls).items()
        }

    @classmethod
    def split(cls, method_name: str) -> tuple[str, str]:
        """Role and method of `<role>_<method>`."""
        for role in sorted(cls.roles, key=len, reverse=True):
            if method_name.startswith(f"{role}{SEPARATOR}"):
                return role, method_name[len(role) + len(SEPARATOR) :]
        raise WorkerError(
            f"method {method_name}",
            got="no role in its name",
            expected=f"<role>_<method>, roles: {', '.join(cls.roles)}",
        )


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs[Any]],
) -> RayClassWithInitArgs[WorkerDict]:
    """One class for several roles that share their processes.

    Args:
        class_dict: what to build, by role. Options of the actors must agree; additional resources are added up by name.
    """
    if not class_dict:
        raise WorkerError("create_colocated_worker_cls", got="no roles", expected="at least one")
    roles = {str(role): entry for role, entry in class_dict.items()}
    together = RayClassWithInitArgs(type("WorkerDict", (WorkerDict,), {"roles": roles, "__module__": __name__}))
    for role, entry in roles.items():
        for key, value in entry.options.items():
            if together.options.setdefault(key, value) != value:
                raise WorkerError(
                    f"create_colocated_worker_cls: option {key}",
                    got=f"{value!r} of {role}, {together.options[key]!r} before it",
                    expected="one value, for the roles share their processes",
                )
        for name, amount in entry.additional_resource.items():
            together.additional_resource[name] = together.additional_resource.get(name, 0) + amount
    return together
