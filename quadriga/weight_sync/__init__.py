# SPDX-License-Identifier: Apache-2.0
"""How weights get from an engine to a rollout, and how it is known that they did."""

from quadriga.weight_sync.base import WeightSync, WeightTarget
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint, tensor_fingerprint
from quadriga.weight_sync.inprocess import InProcessWeights
from quadriga.weight_sync.shared import SharedWeights

__all__ = [
    "Fingerprint",
    "InProcessWeights",
    "SharedWeights",
    "WeightSync",
    "WeightTarget",
    "fingerprint",
    "tensor_fingerprint",
]
