# SPDX-License-Identifier: Apache-2.0
"""Whether the models of a run fit its processes and sequences, by their configurations, before a worker starts."""

from collections.abc import Iterator
from typing import Any

from quadriga.config import Config, ModelShape, check_model
from quadriga.config.check_layout import ACTOR, CRITIC, arranged_roles, layout_of
from quadriga.config.model import SEEING_TYPES
from quadriga.errors import ConfigError
from quadriga.models.load import load_config
from quadriga.models.vision import is_vision


def check_models(config: Config) -> None:
    """Refuses models whose heads or layers the processes cannot share, and policies with too few positions.

    Raises:
        ConfigError: says what does not fit.
    """
    policy = _model_config(config, ACTOR)
    _check_sight(config, policy)
    positions = getattr(policy.get_text_config(), "max_position_embeddings", None)
    needed = config.data.max_prompt_length + config.data.max_response_length
    if positions is not None and needed > positions:
        raise ConfigError(
            "data.max_prompt_length + data.max_response_length",
            got=f"{needed} tokens",
            expected=f"at most {positions}, the positions of {config.actor_rollout_ref.model.path}",
            fix="Lower one of them, or give the model more with actor_rollout_ref.model.override_config.",
        )
    for where, section, size in arranged_roles(config):
        layout = layout_of(section, size, where)
        if (layout.sp, layout.tp, layout.pp) != (1, 1, 1):
            check_model(layout, shape_of(_model_config(config, where)), where)


def require_text(config: Config, what: str) -> None:
    """Refuses a model that sees where nothing is made for it.

    Raises:
        ConfigError: says so.
    """
    if is_vision(kind := _model_config(config, ACTOR)):
        raise ConfigError(
            "model.path",
            got=f"a model that sees ({kind.model_type})",
            expected=f"one for text: {what} learns from text alone",
            fix="Train it with `quadriga train`.",
        )


def _check_sight(config: Config, policy: Any) -> None:
    """What of a run is not made for models that see, or for no others."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if not is_vision(policy):
        if actor.freeze_vision_tower:
            raise ConfigError(
                f"{ACTOR}.freeze_vision_tower",
                got=f"True, with a model without a vision tower ({policy.model_type})",
                expected=f"one of {', '.join(SEEING_TYPES)}",
                fix="Leave the key out.",
            )
        return
    if model.has_adapter:
        raise ConfigError(
            "actor_rollout_ref.model.lora_rank",
            got=f"an adapter, with a model that sees ({policy.model_type})",
            expected="0: its weights are trained themselves",
            fix=f"Leave the key out; {ACTOR}.freeze_vision_tower=True trains the decoder alone.",
        )
    if config.reward_model.enable:
        raise ConfigError(
            "reward_model.enable",
            got=f"True, with a policy that sees ({policy.model_type})",
            expected="False: reward models read text alone",
            fix="Grade with a function: custom_reward_function.path.",
        )
    for where, section, size in arranged_roles(config):
        layout = layout_of(section, size, where)
        if where == CRITIC and not is_vision(_model_config(config, CRITIC)):
            raise ConfigError(
                "critic.model.path",
                got="a model for text, with a policy that sees",
                expected=f"one that sees too: {', '.join(SEEING_TYPES)}",
                fix="Leave the key out: the critic then starts from the policy's model.",
            )
        if (layout.sp, layout.tp, layout.pp) != (1, 1, 1):
            raise ConfigError(
                where,
                got=f"{layout.describe()}, for a model that sees ({policy.model_type})",
                expected="tensor_model_parallel_size, pipeline_model_parallel_size and "
                "ulysses_sequence_parallel_size of 1",
                fix="Share weights with fsdp_config.fsdp_size.",
            )


def layout_tables(config: Config) -> Iterator[str]:
    """For each role with several processes, who has which rows."""
    told = set()
    for where, section, size in arranged_roles(config):
        if size > 1 and where not in told:
            told.add(where)
            layout = layout_of(section, size, where)
            table = layout.table().replace("\n", "\n    ")
            yield f"  {where}: {layout.describe()}\n    {table}"


def shape_of(model: Any) -> ModelShape:
    """What of a model's configuration has to be divisible.

    Args:
        model: a configuration of transformers.
    """
    text = model.get_text_config()
    return ModelShape(
        name=(model.architectures or [type(model).__name__])[0],
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        tensor_plan=text.base_model_tp_plan,
    )


def _model_config(config: Config, where: str) -> Any:
    model = config.actor_rollout_ref.model
    if where == ACTOR:
        path = model.path
    elif where == CRITIC:
        path = config.critic.model.path or model.path
    else:
        path = config.reward_model.model.path or ""
    options = {"override_config": model.override_config} if path == model.path else {}
    return load_config(path, trust_remote_code=model.trust_remote_code, **options)
