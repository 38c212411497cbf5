# SPDX-License-Identifier: Apache-2.0
"""Quadriga: post-training of large language models by reinforcement learning.

Importing the package is fast: its names, and torch with them, load on first use.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from quadriga import moved
from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.api import Run, Trainer, evaluate, generate, sft, train
    from quadriga.protocol import DataProto

__version__ = "0.2.0"
__all__, __getattr__ = lazy_names(__name__)
__all__ += ["__version__"]


def __dir__() -> list[str]:
    """The public names, for tab completion, and the module's own attributes such as `__file__`."""
    return [*__all__, *(name for name in globals() if name[:2] == "__" and name not in __all__)]


moved.install()
if os.environ.get("QUADRIGA_VERL", "0") not in ("", "0"):
    import_module("quadriga_verl.shim")
