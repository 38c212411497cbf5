# SPDX-License-Identifier: Apache-2.0
"""Megatron-core as a training engine. The only package that imports `megatron`, when the engine is first named."""

import warnings

from quadriga.lazy import lazy_names

# Five of its modules say on import that Apex or Transformer Engine is missing; a run says itself what computes.
warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex|full scope is deprecated", module=r"megatron\.core")

__getattr__ = lazy_names(__name__, {"engine": "MegatronEngine"})
