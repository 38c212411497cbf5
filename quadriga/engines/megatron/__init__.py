# SPDX-License-Identifier: Apache-2.0
"""Megatron-core as a training engine: the only package that imports `megatron`, at first use."""

import warnings
from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.engines.megatron.engine import MegatronEngine

# On import, five Megatron modules warn that Apex or Transformer Engine is missing. The engine's
# description says which modules compute, so the warnings add nothing.
warnings.filterwarnings(
    "ignore",
    r"(Transformer Engine and )?Apex|full scope is deprecated",
    module=r"megatron\.core",
)

__all__, __getattr__ = lazy_names(__name__)
