# SPDX-License-Identifier: Apache-2.0
"""The classes of the rollout engines that the configuration names (`ENGINES` of `config/rollout.py`)."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config import Config, problem_of_several_engines
from quadriga.config.placement import ACTOR
from quadriga.config.rollout import ROLLOUT
from quadriga.errors import ConfigError
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.hf import HFEngine
from quadriga.rollout.http import HTTPEngine
from quadriga.rollout.interface import RolloutEngine
from quadriga.rollout.native import NativeEngine
from quadriga.rollout.scripted import ScriptedEngine
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.sglang.engine import SGLangEngine
from quadriga.rollout.vllm.engine import VLLMEngine

ROUTER_REPLAY = f"{ACTOR}.router_replay"
ENGINES: dict[str, type[RolloutEngine]] = {
    engine.name: engine for engine in (NativeEngine, VLLMEngine, SGLangEngine, HFEngine, HTTPEngine, ScriptedEngine)
}


def rollout_engine_class(config: Config) -> type[RolloutEngine]:
    """The class of the engine that the configuration names.
    Raises ConfigError: there cannot be as many as `rollout.data_parallel_size` says, or it cannot report the choices of
    experts that are to be repeated."""
    rollout = config.actor_rollout_ref.rollout
    if problem := problem_of_several_engines(rollout):
        raise problem
    engine = ENGINES[rollout.name]
    if config.actor_rollout_ref.actor.router_replay == "rollout" and not engine.reports_routes:
        able = " or ".join(name for name, one in ENGINES.items() if one.reports_routes)
        got, expected = f"rollout, with rollout.name={rollout.name}", f"an engine that reports its choices: {able}"
        fix = f"Set {ROLLOUT}.name={able}, or {ROUTER_REPLAY}=old_log_prob."
        raise ConfigError(ROUTER_REPLAY, got=got, expected=expected, fix=fix)
    return engine


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
    options = {name: value for name, value in given.items() if name not in ENGINES} | dict(given.get(engine.name) or {})
    return engine.from_config(EngineSetup(config, tokenizer, options, device, dtype, actor, group))
