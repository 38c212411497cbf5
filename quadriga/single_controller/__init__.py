# SPDX-License-Identifier: Apache-2.0
"""One driver, many workers: how a call on a group becomes calls on its workers.

The backends are modules of their own: `quadriga.single_controller.local` runs workers in this process.
"""

from quadriga.single_controller.dispatch import (
    Dispatch,
    DispatchFunctions,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from quadriga.single_controller.local import LocalWorkerGroup
from quadriga.single_controller.registration import Execute, register
from quadriga.single_controller.resource_pool import ResourcePool
from quadriga.single_controller.worker import Worker, WorkerPlace, placed
from quadriga.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchFunctions",
    "Execute",
    "LocalWorkerGroup",
    "ResourcePool",
    "Worker",
    "WorkerGroup",
    "WorkerPlace",
    "make_nd_compute_dataproto_dispatch_fn",
    "placed",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]
