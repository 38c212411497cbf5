# SPDX-License-Identifier: Apache-2.0
"""The Ray backend: the only package that imports ray. `docs/controller.md` describes its files."""

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.single_controller.ray.group import (
        RayClassWithInitArgs,
        RayWorkerGroup,
        RayWorkerGroups,
        WorkerDict,
        create_colocated_worker_cls,
    )
    from quadriga.single_controller.ray.pools import RayResourcePool, ResourcePoolManager

__all__, __getattr__ = lazy_names(__name__)
