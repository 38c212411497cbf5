# SPDX-License-Identifier: Apache-2.0
"""The Ray backend: the only place that imports ray.

group.py        worker groups: the classes that run in a process, the processes of a group, all groups of a run
transport.py    how arguments and outputs travel
process.py      the other end: the actor of one device
calls.py        calls on the driver's side: waiting for them, and the end of processes
errors.py       what went wrong in a process
pools.py        resources of the cluster, by node, and which role has which
cluster.py      the cluster: joined or started; its nodes
"""

from quadriga.single_controller.ray.group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    RayWorkerGroups,
    WorkerDict,
    create_colocated_worker_cls,
)
from quadriga.single_controller.ray.pools import RayResourcePool, ResourcePoolManager
