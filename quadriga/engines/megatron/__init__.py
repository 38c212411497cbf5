# SPDX-License-Identifier: Apache-2.0
"""Megatron-core as a training engine. The only package that imports `megatron`, when the engine is first named."""

import warnings
from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.engines.megatron.engine import MegatronEngine

# Five of its modules say on import that Apex or Transformer Engine is missing; a run says itself what computes.
warnings.filterwarnings(
    "ignore", r"(Transformer Engine and )?Apex|full scope is deprecated", module=r"megatron\.core"
)

__all__, __getattr__ = lazy_names(__name__)
