# SPDX-License-Identifier: Apache-2.0
"""What a run reports about itself: metrics, timings, progress, tracking, profiles, the machine.

Modules load on first use: a grading process that needs `metrics` does not pay for torch or rich, and `quadriga doctor`
reports on an environment where torch does not load.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "machine":
        return import_module("quadriga.observe.machine")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
