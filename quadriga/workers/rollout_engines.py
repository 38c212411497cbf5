# SPDX-License-Identifier: Apache-2.0
"""Classes of the rollout engines, by their names in the configuration, and users' own."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config import Config, problem_of_several_engines
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
from quadriga.user_file import load_reference

ENGINES: dict[str, type[RolloutEngine]] = {
    engine.name: engine
    for engine in (NativeEngine, VLLMEngine, SGLangEngine, HFEngine, HTTPEngine, ScriptedEngine)
}
"""Classes of our engines. `quadriga.engine_traits` has their traits."""


def rollout_engine_class(config: Config) -> type[RolloutEngine]:
    """Find the class of the configured engine, which may be in a user's file.

    Raises:
        ConfigError: the engine does not support `rollout.data_parallel_size`, or a user's class is
            no rollout engine.
    """
    rollout = config.actor_rollout_ref.rollout
    problem = problem_of_several_engines(rollout)
    if problem:
        raise problem
    if rollout.name in ENGINES:
        return ENGINES[rollout.name]

    # A reference to a user's class.
    where = f"{ROLLOUT}.name"
    engine: type[RolloutEngine] = load_reference(rollout.name, where, base=RolloutEngine)
    missing_methods = sorted(engine.__abstractmethods__)
    # `from_config` is not abstract, but the inherited one only raises.
    if engine.from_config.__qualname__ == RolloutEngine.from_config.__qualname__:
        missing_methods.append("from_config")
    if missing_methods:
        raise ConfigError(
            where,
            got=f"{rollout.name}, without {' and '.join(missing_methods)}",
            expected="all methods of a rollout engine",
            fix=f"Write them in the class {engine.__name__}, as in examples/custom/engine.py.",
        )
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
    """Build the configured engine. For the arguments see `EngineSetup`."""
    engine = rollout_engine_class(config)
    engine_kwargs = config.actor_rollout_ref.rollout.engine_kwargs
    # `engine_kwargs` has options at its top level and, below the name of an engine, options for
    # that engine alone.
    section_names = {*ENGINES, engine.name}
    options = {name: value for name, value in engine_kwargs.items() if name not in section_names}
    options.update(engine_kwargs.get(engine.name) or {})
    return engine.from_config(EngineSetup(config, tokenizer, options, device, dtype, actor, group))
