# SPDX-License-Identifier: Apache-2.0
"""Programs on the driver: training, validation, checkpoints, and the construction of a run.

Names load on first use.
"""

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.trainer.launch import run_ppo
    from quadriga.trainer.ray_trainer import RayPPOTrainer
    from quadriga.trainer.roles import Role
    from quadriga.trainer.task_runner import TaskRunner

__all__, __getattr__ = lazy_names(__name__)
