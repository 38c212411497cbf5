# SPDX-License-Identifier: Apache-2.0
"""What a run tells about itself: metrics, timings, progress, tracking, profiles, the machine.

Names load on first use: a grader process that needs `Metric` does not pay for torch or rich.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.observe.curve import plot_curves
    from quadriga.observe.headline import step_fields
    from quadriga.observe.machine import Choice, choose_dtype, describe_machine, peak_resident_bytes, resident_bytes
    from quadriga.observe.metrics import Metric, merge_metrics, reduce_metrics
    from quadriga.observe.probe import Capability, probe_capabilities
    from quadriga.observe.profiler import Profiler
    from quadriga.observe.progress import Progress
    from quadriga.observe.timing import PhaseTimer, Timeline
    from quadriga.observe.tracking import Tracking, TrackingBackend
    from quadriga.observe.watchdog import waiting

_HOMES = {
    "Capability": "probe",
    "Choice": "machine",
    "Metric": "metrics",
    "PhaseTimer": "timing",
    "Profiler": "profiler",
    "Progress": "progress",
    "Timeline": "timing",
    "Tracking": "tracking",
    "TrackingBackend": "tracking",
    "choose_dtype": "machine",
    "describe_machine": "machine",
    "merge_metrics": "metrics",
    "peak_resident_bytes": "machine",
    "plot_curves": "curve",
    "probe_capabilities": "probe",
    "reduce_metrics": "metrics",
    "resident_bytes": "machine",
    "step_fields": "headline",
    "waiting": "watchdog",
}

__all__ = [
    "Capability",
    "Choice",
    "Metric",
    "PhaseTimer",
    "Profiler",
    "Progress",
    "Timeline",
    "Tracking",
    "TrackingBackend",
    "choose_dtype",
    "describe_machine",
    "merge_metrics",
    "peak_resident_bytes",
    "plot_curves",
    "probe_capabilities",
    "reduce_metrics",
    "resident_bytes",
    "step_fields",
    "waiting",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
