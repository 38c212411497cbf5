# SPDX-License-Identifier: Apache-2.0
"""The models of the roles: whether they fit the ranks and the sequences, and how they are loaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from quadriga.config import Config, ModelShape, check_model
from quadriga.config.actor import VISION_TYPES
from quadriga.config.placement import ACTOR, CRITIC, arranged_roles, rollout_group_size
from quadriga.config.rollout import ROLLOUT
from quadriga.engines.fsdp.sharded import ReadWeight
from quadriga.engines.parallel.processes import Processes
from quadriga.errors import ConfigError, EngineError
from quadriga.models.adapter_files import base_name, is_factor, open_model
from quadriga.models.load import load_causal_lm, load_config, model_folder, skeleton_causal_lm
from quadriga.models.lora import add_adapter
from quadriga.models.reward_model import load_reward_model, require_judge
from quadriga.models.scorers import PolicyScorer, RewardScorer, Scorer
from quadriga.models.vision import is_vision, parameter_name, vision_encoder
from quadriga.models.weight_files import RenamedFiles

_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class LoadedModel:
    """A scorer, and where its parameters' values come from: None where it has them."""

    scorer: Scorer
    read: ReadWeight | None


def load_policy(config: Config, dtype: torch.dtype, processes: Processes, *, has_adapter: bool = False) -> LoadedModel:
    """The model of `actor_rollout_ref.model` as a policy; a vision encoder that the configuration freezes is frozen.

    Args:
        dtype: of replicated weights; sharded ones are read when they are cut.
        processes: the ranks that will hold it.
        has_adapter: whether it gets the adapter of the configuration, in float32.
    """
    section = config.actor_rollout_ref.model
    loaded = load_model(config, section.path, PolicyScorer, dtype, processes)
    if config.actor_rollout_ref.actor.freeze_vision_tower:
        vision_encoder(loaded.scorer.model).requires_grad_(False)
    if not has_adapter:
        return loaded
    read_factor, read_base = add_adapter(loaded.scorer.model, section, config.trainer.seed), loaded.read
    if read_base is None:
        return loaded
    return LoadedModel(loaded.scorer, lambda name: read_factor(name) if is_factor(name) else read_base(base_name(name)))


def load_model(
    config: Config, path: str, scorer: type[Scorer], dtype: torch.dtype, processes: Processes
) -> LoadedModel:
    """The model at `path` with a head, and the options of `actor_rollout_ref.model`; a value head that the files do not
    have is zero. `dtype` is that of replicated weights; sharded ones are read when they are cut.

    Raises EngineError: the files lack a weight.
    """
    model = config.actor_rollout_ref.model
    options = {"trust_remote_code": model.trust_remote_code, "override_config": model.override_config}
    folder = None if processes.layout.is_whole else model_folder(path)
    if folder is None:
        return LoadedModel(scorer(load_causal_lm(path, dtype=dtype, device=processes.world.device, **options)), None)
    loaded, missing = _read_when_cut(scorer(skeleton_causal_lm(folder, **options)), folder)
    missing = [name for name in missing if not name.startswith("value_head.")]
    if missing:
        got = f"no weights for {len(missing)} parameters, first {missing[0]}"
        expected = "all weights of the model, under the names that transformers gives them"
        fix = "Load and save it once with transformers, or set fsdp_config.fsdp_size=1."
        raise EngineError(f"model {path}", got=got, expected=expected, fix=fix)
    return loaded


def load_judge(path: str, dtype: torch.dtype, processes: Processes, *, trust_remote_code: bool) -> LoadedModel:
    """The reward model at `path`. `dtype` is that of replicated weights; sharded ones are read when they are cut.

    Raises EngineError: as `load_reward_model`.
    """
    folder = None if processes.layout.is_whole else model_folder(path)
    if folder is None:
        how = {"device": processes.world.device, "trust_remote_code": trust_remote_code}
        return LoadedModel(RewardScorer(load_reward_model(path, dtype=dtype, **how)), None)
    kind = AutoModelForSequenceClassification
    skeleton = skeleton_causal_lm(folder, trust_remote_code=trust_remote_code, auto_class=kind)
    require_judge(path, skeleton, [])
    loaded, missing = _read_when_cut(RewardScorer(skeleton), folder)
    require_judge(path, skeleton, missing)
    return loaded


def _read_when_cut(skeleton: Scorer, folder: Path) -> tuple[LoadedModel, list[str]]:
    """A model whose weights are read from the files of a folder, and the names that these lack: they are zero."""
    files = RenamedFiles(open_model(folder), partial(parameter_name, skeleton.model.config))
    names, shapes = files.shapes, {name: one.shape for name, one in skeleton.model.named_parameters()}
    loaded = LoadedModel(skeleton, lambda name: files.read(name) if name in names else torch.zeros(shapes[name]))
    return loaded, [name for name in shapes if name not in names]


def check_models(config: Config, *, has_critic: bool) -> None:
    """Refuse models whose heads or layers cannot be divided over the ranks, and policies with too few positions.
    Raises ConfigError: says what does not fit."""
    policy = _model_config(config, ACTOR)
    names, own = policy.architectures or [], getattr(policy, "auto_map", {})
    generates = not names or "AutoModelForCausalLM" in own or any(name.endswith(_GENERATING) for name in names)
    if not generates and config.task != "reward_model":
        got = f"'{config.actor_rollout_ref.model.path}', whose config.json names {', '.join(names)}"
        expected = "a causal language model, which generates text"
        fix = "Name a model whose architecture ends in ForCausalLM."
        raise ConfigError("actor_rollout_ref.model.path", got=got, expected=expected, fix=fix)
    _check_vision(config, policy, has_critic=has_critic)
    positions = getattr(policy.get_text_config(), "max_position_embeddings", None)
    needed = config.data.max_prompt_length + config.data.max_response_length
    if positions is not None and needed > positions:
        got = f"{needed} tokens"
        expected = f"at most {positions}, the positions of {config.actor_rollout_ref.model.path}"
        fix = "Lower one of them, or give the model more with actor_rollout_ref.model.override_config."
        raise ConfigError("data.max_prompt_length + data.max_response_length", got=got, expected=expected, fix=fix)
    text, size = policy.get_text_config(), rollout_group_size(config)
    keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if text.num_attention_heads % size or (keys % size and size % keys):
        where, got = f"{ROLLOUT}.tensor_model_parallel_size", f"{size}, for {text.num_attention_heads} heads"
        expected = f"a number that divides them, and that {keys} key-value heads divide or are divided by"
        raise ConfigError(where, got=f"{got} and {keys} key-value heads", expected=expected, fix="Choose another one.")
    for where, section, size in arranged_roles(config, has_critic=has_critic):
        layout = section.layout(size, where)
        if (layout.sp, layout.tp, layout.pp) != (1, 1, 1):
            model = _model_config(config, where)
            text = model.get_text_config()
            shape = ModelShape(
                name=(model.architectures or [type(model).__name__])[0],
                num_layers=text.num_hidden_layers,
                num_heads=text.num_attention_heads,
                num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
                tensor_plan=text.base_model_tp_plan,
            )
            check_model(layout, shape, where)


def require_text(config: Config, what: str) -> None:
    """Refuse a vision-language model where only text is supported. Raises ConfigError: says so."""
    if is_vision(kind := _model_config(config, ACTOR)):
        got, expected = f"a vision-language model ({kind.model_type})", f"a text model: {what} learns from text alone"
        raise ConfigError("model.path", got=got, expected=expected, fix="Train it with `quadriga train`.")


def _check_vision(config: Config, policy: Any, *, has_critic: bool) -> None:
    """What is not supported for vision-language models, or only for them."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if not is_vision(policy):
        if actor.freeze_vision_tower:
            got = f"True, with a model without a vision encoder ({policy.model_type})"
            expected = f"one of {', '.join(VISION_TYPES)}"
            raise ConfigError(f"{ACTOR}.freeze_vision_tower", got=got, expected=expected, fix="Leave the key out.")
        return
    if model.has_adapter:
        got = f"an adapter, with a vision-language model ({policy.model_type})"
        expected = "0: its weights are trained themselves"
        fix = f"Leave the key out; {ACTOR}.freeze_vision_tower=True trains the decoder alone."
        raise ConfigError("actor_rollout_ref.model.lora_rank", got=got, expected=expected, fix=fix)
    if config.reward_model.enable:
        got = f"True, with a vision-language policy ({policy.model_type})"
        fix = "Grade with a function: custom_reward_function.path."
        raise ConfigError("reward_model.enable", got=got, expected="False: reward models read text alone", fix=fix)
    for where, section, size in arranged_roles(config, has_critic=has_critic):
        layout = section.layout(size, where)
        if where == CRITIC and not is_vision(_model_config(config, CRITIC)):
            got = "a text model, with a vision-language policy"
            expected = f"a vision-language model too: {', '.join(VISION_TYPES)}"
            fix = "Leave the key out: the critic then starts from the policy's model."
            raise ConfigError("critic.model.path", got=got, expected=expected, fix=fix)
        if (layout.sp, layout.tp, layout.pp) != (1, 1, 1):
            raise ConfigError(
                where,
                got=f"{layout.describe()}, for a vision-language model ({policy.model_type})",
                expected="tensor_model_parallel_size, pipeline_model_parallel_size and "
                "ulysses_sequence_parallel_size of 1",
                fix="Shard the weights with fsdp_config.fsdp_size.",
            )


def layout_tables(config: Config, *, has_critic: bool) -> Iterator[str]:
    """For each role with several ranks, which rank has which rows."""
    warned = set()
    for where, section, size in arranged_roles(config, has_critic=has_critic):
        if size > 1 and where not in warned:
            warned.add(where)
            layout = section.layout(size, where)
            table = layout.table().replace("\n", "\n    ")
            yield f"  {where}: {layout.describe()}\n    {table}"


def _model_config(config: Config, where: str) -> Any:
    model = config.actor_rollout_ref.model
    paths = {ACTOR: model.path, CRITIC: config.critic.model.path or model.path}
    path = paths.get(where, config.reward_model.model.path or "")
    options = {"override_config": model.override_config} if path == model.path else {}
    return load_config(path, trust_remote_code=model.trust_remote_code, **options)
