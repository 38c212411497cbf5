# SPDX-License-Identifier: Apache-2.0
"""The Ray backend: the only place that imports ray.

pools.py, manager.py       resources of the cluster, by node, and which role has which
classes.py                 what runs in a process: one role, or several side by side
crew.py, group.py          processes, and calls on all of them at once
transport.py               how arguments and outputs travel: in the store (columns.py, objects.py) or as letters.py
process.py                 the other end: the actor of one device
failures.py, waiting.py    what goes wrong there, and how the driver waits; deaths.py says what a process died of
closing.py, nodes.py       the end of processes, and nodes that may be lost
team.py                    all groups of a run
cluster.py, remote.py      the cluster, and the trainer as an actor in it, whose output relay.py brings to the terminal
"""

from quadriga.single_controller.ray.classes import RayClassWithInitArgs, WorkerDict, create_colocated_worker_cls
from quadriga.single_controller.ray.group import RayWorkerGroup
from quadriga.single_controller.ray.manager import ResourcePoolManager
from quadriga.single_controller.ray.pools import RayResourcePool, merge_resource_pool, split_resource_pool

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "WorkerDict",
    "create_colocated_worker_cls",
    "merge_resource_pool",
    "split_resource_pool",
]
