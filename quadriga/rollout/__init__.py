# SPDX-License-Identifier: Apache-2.0
"""Generation engines: tokens in, tokens out.

Names load on first use, so that a scripted rollout does not pay for the engines that have a model.
"""

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.rollout.balancer import Balancer
    from quadriga.rollout.causal_model import CausalModelEngine
    from quadriga.rollout.hf import HFEngine
    from quadriga.rollout.interface import Completion, Images, RolloutEngine, SamplingParams
    from quadriga.rollout.native import NativeEngine
    from quadriga.rollout.scripted import ScriptedEngine
    from quadriga.rollout.sequences import generate_sequences
    from quadriga.rollout.setup import EngineSetup

__all__, __getattr__ = lazy_names(__name__)
