# SPDX-License-Identifier: Apache-2.0
"""Environments with reset and step: adapters, the pool of their processes, and their agent loop.

Names load on first use, so that an environment's process does not load torch.
"""

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.rollout.environments.interface import (
        Description,
        EnvironmentSpec,
        Step,
        TextEnvironment,
    )
    from quadriga.rollout.environments.pool import EnvironmentPool, Episode

__all__, __getattr__ = lazy_names(__name__)
