# SPDX-License-Identifier: Apache-2.0
"""Root of the configuration, and how tasks differ: in defaults, keys and spellings.

Keys of supervised tasks have a short spelling, `optim.lr` for `actor_rollout_ref.actor.optim.lr`.
Both are accepted; messages use the short one.
"""

from typing import Any, Literal

from pydantic import model_validator

from quadriga.config.actor import ActorConfig, CriticConfig, ModelConfig, ReferenceConfig
from quadriga.config.algorithm import AlgorithmConfig
from quadriga.config.async_training import CORRECTION, AsyncTrainingConfig
from quadriga.config.base import Section, fill_missing
from quadriga.config.data import DataConfig
from quadriga.config.distillation import DistillationConfig
from quadriga.config.environment import EnvironmentConfig
from quadriga.config.multi_turn import ENVIRONMENT
from quadriga.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from quadriga.config.rollout import RolloutConfig
from quadriga.config.trainer import ProfilerConfig, RayConfig, TrainerConfig
from quadriga.errors import QuadrigaError

_SUPERVISED: dict[str, Any] = {
    "data": {"train_batch_size": 256, "val_batch_size": 256, "max_length": 1024},
    "trainer": {"experiment_name": "sft"},
    "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-5}}},
}
# The two sequences of a pair have a prompt in common; conversations have not.
_WITHOUT_SHARING = {"actor_rollout_ref": {"actor": {"use_prefix_sharing": False}}}
PRESETS: dict[str, dict[str, Any]] = {
    "rl": {},
    "sft": fill_missing(_SUPERVISED, _WITHOUT_SHARING),
    "reward_model": _SUPERVISED,
}
"""Defaults of each task that differ from those of the schema."""

_SFT_DATA = (
    "format",
    "messages_key",
    "tools_key",
    "response_key",
    "chosen_key",
    "rejected_key",
    "max_length",
)
_SHARED_DATA = (
    "train_files",
    "val_files",
    "prompt_key",
    "truncation",
    "filter_overlong_prompts",
    "train_batch_size",
    "val_batch_size",
    "tokenizer",
    "apply_chat_template_kwargs",
    "shuffle",
    "seed",
    "cache_dir",
    "train_max_samples",
    "val_max_samples",
    "on_bad_row",
)
_RL_TRAINER = (
    "log_val_generations",
    "placement",
    "resource_pools",
    "balance_batch",
    "val_only",
    "critic_warmup",
    "rollout_record",
    "rollout_record_gib",
    "rollout_data_dir",
    "validation_data_dir",
)
_ACTOR = "actor_rollout_ref.actor"
# Patterns of the keys that a supervised task reads: it neither generates nor computes advantages.
_SUPERVISED_KEYS = (
    "task",
    "trainer.*",
    "ray_kwargs.*",
    *(f"data.{name}" for name in (*_SHARED_DATA, *_SFT_DATA)),
    "actor_rollout_ref.model.*",
    f"{_ACTOR}.optim.*",
    f"{_ACTOR}.checkpoint.*",
    f"{_ACTOR}.fsdp_config.*",
    f"{_ACTOR}.strategy",
    f"{_ACTOR}.megatron.*",
    f"{_ACTOR}.ppo_m*_per_gpu",
    f"{_ACTOR}.*_parallel_size",
    f"{_ACTOR}.loss_agg_mode",
    f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.max_nonfinite_steps",
    f"{_ACTOR}.profiler.ranks",
    "global_profiler.*",
)
_SUPERVISED_READ = (_SUPERVISED_KEYS, frozenset(f"trainer.{name}" for name in _RL_TRAINER))
READ: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "rl": (("*",), frozenset(f"data.{name}" for name in _SFT_DATA)),
    "sft": _SUPERVISED_READ,
    "reward_model": _SUPERVISED_READ,
}
"""Patterns of the keys that each task reads, and keys that match but are not read."""
_SHORT = {
    "task": "objective",
    "data.filter_overlong_prompts": "data.filter_overlong",
    "actor_rollout_ref.model": "model",
    f"{_ACTOR}.optim": "optim",
    f"{_ACTOR}.checkpoint": "checkpoint",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "engine.micro_batch_size_per_gpu",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "engine.max_token_len_per_gpu",
    _ACTOR: "engine",
}
"""Beginnings of keys, with their spelling in supervised tasks. The first match is used."""


class ActorRolloutRefConfig(Section):
    """The policy as the trained actor, the generating rollout and the frozen reference."""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: ReferenceConfig = ReferenceConfig()


class Config(Section):
    """All settings of a run."""

    task: Literal["rl", "sft", "reward_model"] = "rl"
    """Task. rl: train a policy by rewards; sft: train a model on responses (supervised fine-tuning);
    reward_model: train a reward model that scores the better response of a pair higher."""
    data: DataConfig = DataConfig()
    env: EnvironmentConfig = EnvironmentConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    distillation: DistillationConfig = DistillationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    trainer: TrainerConfig = TrainerConfig()
    global_profiler: ProfilerConfig = ProfilerConfig()
    ray_kwargs: RayConfig = RayConfig()

    @model_validator(mode="before")
    @classmethod
    def _add_task_defaults(cls, values: Any) -> Any:
        """Add the defaults that depend on the task, the environment and asynchronous training."""
        if not isinstance(values, dict):
            return values
        values = _add_correction(values)
        values = _add_environment_defaults(values)
        task = values.get("task")
        if task not in ("sft", "reward_model"):
            return values
        values = fill_missing(values, PRESETS[task])
        # Now the section exists, but its value may be one that validation refuses.
        data = dict(values["data"]) if isinstance(values["data"], dict | DataConfig) else {}
        batch_size = data.get("train_batch_size")
        length = data.get("max_length")
        lengths = {}
        actor = {}
        # A step of a supervised task is one optimizer step on the full batch.
        if isinstance(batch_size, int):
            actor["ppo_mini_batch_size"] = batch_size
        # These tasks have one limit, for prompt and response together. Checks add up the two keys,
        # so their sum is set to the limit.
        if isinstance(length, int):
            lengths = {"max_prompt_length": 1, "max_response_length": max(1, length - 1)}
            actor["loss_scale_factor"] = float(length)
        return fill_missing(values, {"data": lengths, "actor_rollout_ref": {"actor": actor}})


def _add_correction(tree: dict[str, Any]) -> dict[str, Any]:
    """Add the default off-policy correction if a run may learn from stale samples.

    Args:
        tree: the values before validation, in which any value may be of a wrong type.
    """
    settings = tree.get("async_training")
    if not isinstance(settings, dict) or settings.get("enable") is not True:
        return tree
    if settings.get("max_staleness") == 0:
        return tree
    algorithm = tree.get("algorithm", {})
    # If any key of the section is set, the default does not apply.
    if not isinstance(algorithm, dict) or algorithm.get("rollout_correction"):
        return tree
    return fill_missing(tree, {"algorithm": {"rollout_correction": {"preset": CORRECTION}}})


def _add_environment_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults for conversations with an environment, if the configuration names one.

    Args:
        tree: the values before validation, in which any value may be of a wrong type.
    """
    section = tree.get("env")
    if not isinstance(section, dict) or not section.get("name"):
        return tree
    agent = {"default_agent_loop": ENVIRONMENT}
    rollout = {"mode": "async", "agent": agent, "multi_turn": {"enable": True}}
    return fill_missing(
        tree, {"data": {"return_raw_chat": True}, "actor_rollout_ref": {"rollout": rollout}}
    )


def spell_key(key: str, task: str, *, in_full: bool = False) -> str:
    """Change the spelling of a dotted key.

    Args:
        key: the key, in either spelling.
        task: the task.
        in_full: whether to return the schema's spelling; else the task's.
    """
    if task == "rl":
        return key
    for full, short in _SHORT.items():
        old, new = (short, full) if in_full else (full, short)
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key  # both spellings are the same


def spell_text(text: str, task: str) -> str:
    """Replace the schema's keys in a message by the task's spellings."""
    if task == "rl":
        return text
    text = text.replace("data.max_prompt_length + data.max_response_length", "data.max_length")
    # Without the first entry, `task`, which is also an ordinary word.
    for full, short in list(_SHORT.items())[1:]:
        text = text.replace(full, short)
    # Docstrings name the keys of micro-batches alone, such as `ppo_max_token_len_per_gpu`.
    return text.replace("`ppo_m", "`m")


def respell(error: QuadrigaError, task: str) -> QuadrigaError:
    """Replace the schema's keys in an error by the task's spellings, in place; return the error."""
    for name in ("where", "got", "expected", "fix"):
        setattr(error, name, spell_text(getattr(error, name), task))
    return error
