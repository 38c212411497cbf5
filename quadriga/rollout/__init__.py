# SPDX-License-Identifier: Apache-2.0
"""Generation engines: tokens in, tokens out.

Names load on first use, so that a scripted rollout does not pay for the engines that have a model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.rollout.balancer import Balancer
    from quadriga.rollout.hf import HFEngine
    from quadriga.rollout.interface import Completion, Images, RolloutEngine, SamplingParams
    from quadriga.rollout.native import NativeEngine
    from quadriga.rollout.scripted import ScriptedEngine
    from quadriga.rollout.sequences import generate_sequences

_HOMES = {
    "Balancer": "balancer",
    "Completion": "interface",
    "HFEngine": "hf",
    "Images": "interface",
    "NativeEngine": "native",
    "RolloutEngine": "interface",
    "SamplingParams": "interface",
    "ScriptedEngine": "scripted",
    "generate_sequences": "sequences",
}

__all__ = [
    "Balancer",
    "Completion",
    "HFEngine",
    "Images",
    "NativeEngine",
    "RolloutEngine",
    "SamplingParams",
    "ScriptedEngine",
    "generate_sequences",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
