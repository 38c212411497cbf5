# SPDX-License-Identifier: Apache-2.0
"""Classes of the rollout engines, by their names in the configuration."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config import Config, problem_of_several_engines
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.hf import HFEngine
from quadriga.rollout.http import HTTPEngine
from quadriga.rollout.interface import RolloutEngine
from quadriga.rollout.native import NativeEngine
from quadriga.rollout.scripted import ScriptedEngine
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.sglang.engine import SGLangEngine
from quadriga.rollout.vllm.engine import VLLMEngine

ENGINES: dict[str, type[RolloutEngine]] = {
    engine.name: engine
    for engine in (NativeEngine, VLLMEngine, SGLangEngine, HFEngine, HTTPEngine, ScriptedEngine)
}


def rollout_engine_class(config: Config) -> type[RolloutEngine]:
    """The class of the configured engine.

    Raises:
        ConfigError: the engine does not support `rollout.data_parallel_size`.
    """
    rollout = config.actor_rollout_ref.rollout
    problem = problem_of_several_engines(rollout)
    if problem:
        raise problem
    return ENGINES[rollout.name]


def make_rollout_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    dtype: torch.dtype,
    actor: PreTrainedModel | None = None,
    group: RolloutGroup | None = None,
) -> RolloutEngine:
    """Build the configured engine. For the arguments see `EngineSetup`."""
    engine = rollout_engine_class(config)
    engine_kwargs = config.actor_rollout_ref.rollout.engine_kwargs
    # Options for all engines, and those below the name of this one.
    options = {name: value for name, value in engine_kwargs.items() if name not in ENGINES}
    options.update(engine_kwargs.get(engine.name) or {})
    return engine.from_config(EngineSetup(config, tokenizer, options, device, dtype, actor, group))
