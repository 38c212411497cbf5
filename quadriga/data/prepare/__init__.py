# SPDX-License-Identifier: Apache-2.0
"""Makes data and models ready for training, once.

Names load on first use: `prepare_model` and `prepare_playground` need torch and transformers, `prepare_data` neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.data.prepare.model import PACKAGED_MODELS, prepare_model
    from quadriga.data.prepare.playground import prepare_playground
    from quadriga.data.prepare.tasks import DATA_NAMES, prepare_data

_HOMES = {
    "DATA_NAMES": "tasks",
    "PACKAGED_MODELS": "model",
    "prepare_data": "tasks",
    "prepare_model": "model",
    "prepare_playground": "playground",
}

__all__ = ["DATA_NAMES", "PACKAGED_MODELS", "prepare_data", "prepare_model", "prepare_playground"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
