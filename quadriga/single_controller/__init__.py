# SPDX-License-Identifier: Apache-2.0
"""Single controller: worker groups turn a call by the driver into calls on their workers.

Backends: `LocalWorkerGroup` runs workers in this process, `ray` in processes of a Ray cluster.
"""

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.single_controller.dispatch import (
        Dispatch,
        Execute,
        make_nd_compute_dataproto_dispatch_fn,
        register,
        register_dispatch_mode,
        update_dispatch_mode,
    )
    from quadriga.single_controller.resource_pool import ResourcePool
    from quadriga.single_controller.worker import Worker, WorkerPlace, placed
    from quadriga.single_controller.worker_group import (
        ClassWithInitArgs,
        LocalWorkerGroup,
        WorkerGroup,
        WorkerGroups,
    )

__all__, __getattr__ = lazy_names(__name__)
