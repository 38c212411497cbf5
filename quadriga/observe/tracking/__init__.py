# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go: one file per backend, behind one protocol."""

from quadriga.observe.tracking.base import TrackingBackend
from quadriga.observe.tracking.fan_out import BACKENDS, Tracking

__all__ = ["BACKENDS", "Tracking", "TrackingBackend"]
