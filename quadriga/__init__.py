# SPDX-License-Identifier: Apache-2.0
"""Quadriga: post-training of large language models by reinforcement learning.

Importing the package is free; `DataProto` (and torch with it) loads on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.protocol import DataProto

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        return import_module("quadriga.protocol").DataProto
    raise AttributeError(f"module 'quadriga' has no attribute {name!r}")
