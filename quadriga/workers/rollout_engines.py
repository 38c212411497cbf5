# SPDX-License-Identifier: Apache-2.0
"""The classes of the rollout engines that the configuration names (`ENGINES` of `config/rollout.py`)."""

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
    """The class of the engine that the configuration names.
    Raises ConfigError: there cannot be as many as `rollout.data_parallel_size` says."""
    rollout = config.actor_rollout_ref.rollout
    if problem := problem_of_several_engines(rollout):
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
    """The engine that the configuration names; for `actor` and `group` see `EngineSetup`."""
    engine, given = rollout_engine_class(config), config.actor_rollout_ref.rollout.engine_kwargs
    options = {name: value for name, value in given.items() if name not in ENGINES} | dict(
        given.get(engine.name) or {}
    )
    return engine.from_config(EngineSetup(config, tokenizer, options, device, dtype, actor, group))
