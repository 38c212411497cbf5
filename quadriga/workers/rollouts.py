# SPDX-License-Identifier: Apache-2.0
"""Generation engines beside an actor: how each is made, and how the actor's weights reach it."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.engines.base import TrainEngine
from quadriga.errors import ConfigError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.load import load_causal_lm, stop_token_ids
from quadriga.rollout import HFEngine, NativeEngine, RolloutEngine, ScriptedEngine
from quadriga.weight_sync import InProcessWeights, SharedWeights, WeightSync


@dataclass(frozen=True)
class Rollout:
    """An engine, the way its weights come, and a sentence about both for people to read.

    Attributes:
        engine, weights, description: see above.
        is_shared: whether the engine computes with the actor's own modules, an adapter among them.
    """

    engine: RolloutEngine
    weights: WeightSync
    description: str
    is_shared: bool = False


def native(config: Config, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Our engine, on the actor's own parameters where each process has them whole."""
    _no_options(config, "native")
    is_whole = actor.has_whole_weights
    model = actor.model if is_whole else _copy(config, actor, ATTENTION_NAME)
    engine = NativeEngine(
        model,
        eos_token_ids=stop_token_ids(model, tokenizer.eos_token_id),
        max_num_seqs=config.actor_rollout_ref.rollout.max_num_seqs,
    )
    if is_whole:
        return Rollout(engine, SharedWeights(), "native, on the actor's own weights: nothing is copied", is_shared=True)
    return Rollout(engine, InProcessWeights(), "native, on a copy of the weights that the actor's processes share")


def hf(config: Config, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Transformers' generate on a copy of the model."""
    _no_options(config, "hf")
    copy = _copy(config, actor, "sdpa")
    engine = HFEngine(
        copy,
        eos_token_ids=stop_token_ids(copy, tokenizer.eos_token_id),
        max_num_seqs=config.actor_rollout_ref.rollout.max_num_seqs,
    )
    return Rollout(engine, InProcessWeights(), "hf, transformers' generate on a copy of the weights")


def _copy(config: Config, actor: TrainEngine, attention: str) -> PreTrainedModel:
    """The model that the actor started from, whole."""
    section = config.actor_rollout_ref.model
    return load_causal_lm(
        section.path,
        dtype=actor.dtype,
        device=actor.device,
        attention=attention,
        trust_remote_code=section.trust_remote_code,
        override_config=section.override_config,
    )


def scripted(config: Config, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Canned answers from a file."""
    options = dict(config.actor_rollout_ref.rollout.engine_kwargs)
    responses = options.pop("responses_file", None)
    if responses is None or options:
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs",
            got=f"{config.actor_rollout_ref.rollout.engine_kwargs}",
            expected="responses_file and nothing else, with rollout.name=scripted",
            fix="Set +actor_rollout_ref.rollout.engine_kwargs.responses_file=answers.jsonl.",
        )
    engine = ScriptedEngine(responses, tokenizer=tokenizer)
    return Rollout(engine, InProcessWeights(), f"scripted, answers from {responses}")


def _no_options(config: Config, name: str) -> None:
    options: dict[str, Any] = config.actor_rollout_ref.rollout.engine_kwargs
    if options:
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs",
            got=f"{options}",
            expected=f"nothing: the engine {name} has no options of its own",
            fix="Leave it out.",
        )
