# SPDX-License-Identifier: Apache-2.0
"""The programs on the driver: training, validation, checkpoints, and how a run is built. Names load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.trainer.launch import run_ppo
    from quadriga.trainer.ray_trainer import RayPPOTrainer
    from quadriga.trainer.roles import Role
    from quadriga.trainer.task_runner import TaskRunner

_HOMES = {"RayPPOTrainer": "ray_trainer", "Role": "roles", "TaskRunner": "task_runner", "run_ppo": "launch"}

__all__ = ["RayPPOTrainer", "Role", "TaskRunner", "run_ppo"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
