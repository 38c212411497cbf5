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
    "balancer": ("Balancer",),
    "hf": ("HFEngine",),
    "interface": ("Completion", "Images", "RolloutEngine", "SamplingParams"),
    "native": ("NativeEngine",),
    "scripted": ("ScriptedEngine",),
    "sequences": ("generate_sequences",),
}
__all__ = [
    "Balancer", "Completion", "HFEngine", "Images", "NativeEngine", "RolloutEngine", "SamplingParams",
    "ScriptedEngine", "generate_sequences",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
