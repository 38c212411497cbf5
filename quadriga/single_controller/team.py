# SPDX-License-Identifier: Apache-2.0
"""All worker groups of a run, one per role: what a backend starts, and ends.

Team(classes, roles, pools, device)
  groups["critic"]       a WorkerGroup; its workers are built, or are being built
  describe()             what there is to know about processes and threads
  close()                every worker that has a registered method `close` has been asked to; then end()
  end()                  no process is left, whatever it was doing
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quadriga.single_controller.local import LocalWorkerGroup
from quadriga.single_controller.resource_pool import ResourcePool
from quadriga.single_controller.worker_group import ClassWithInitArgs, WorkerGroup


class Team(Protocol):
    """The worker groups of a run.

    Attributes:
        groups: by role.
        is_beside: the workers work beside the driver, so that a call need not hold it up.
    """

    groups: Mapping[str, WorkerGroup[Any]]
    is_beside: bool

    def describe(self) -> dict[str, str]:
        """What was chosen, with reasons, for people to read."""
        ...

    def close(self) -> None:
        """Let the workers release what they hold, then end what was started."""
        ...

    def end(self) -> None:
        """End what was started, whatever it is doing and however far it has come. May be called again."""
        ...


def close_workers(groups: Mapping[str, WorkerGroup[Any]]) -> None:
    """Call the registered method `close` of all workers that have one."""
    for group in groups.values():
        if "close" in group.methods:
            group.method("close")()


class LocalTeam:
    """One worker per role, in this process.

    Args:
        classes: what to build, by role.
        roles: pool of each role; all are this process.
        pools: processes on each node of each pool.
        device: what computes.
    """

    is_beside = False

    def __init__(
        self,
        classes: Mapping[str, ClassWithInitArgs[Any]],
        roles: Mapping[str, str],
        pools: Mapping[str, Sequence[int]],
        device: str,
    ) -> None:
        self.groups = {role: LocalWorkerGroup(entry, ResourcePool([1]), role) for role, entry in classes.items()}

    def describe(self) -> dict[str, str]:
        """Nothing: there is one process, and the machine was described."""
        return {}

    def close(self) -> None:
        """Let the workers release what they hold."""
        close_workers(self.groups)

    def end(self) -> None:
        """Nothing: the workers end with this process."""
