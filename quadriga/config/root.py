# SPDX-License-Identifier: Apache-2.0
"""The whole tree: one for reinforcement learning, SFT and reward models."""

from typing import Any

from pydantic import Field, model_validator

from quadriga.config.actor import ActorConfig, CriticConfig, RefConfig
from quadriga.config.algorithm import AlgorithmConfig
from quadriga.config.base import Section, filled
from quadriga.config.data import DataConfig
from quadriga.config.model import ModelConfig
from quadriga.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from quadriga.config.rollout import RolloutConfig
from quadriga.config.tasks import PRESETS, Task
from quadriga.config.trainer import ProfilerConfig, RayConfig, TrainerConfig


class ActorRolloutRefConfig(Section):
    """The policy in its three parts: trained, generating, frozen."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    ref: RefConfig = Field(default_factory=RefConfig)


class Config(Section):
    """Everything that a run is configured by."""

    task: Task = "rl"
    """What is trained: rl, a policy by rewards; sft, a model by given responses (supervised fine-tuning); reward_model,
    a reward model that scores the better response of a pair higher."""
    data: DataConfig = Field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = Field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    custom_reward_function: CustomRewardFunctionConfig = Field(default_factory=CustomRewardFunctionConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    global_profiler: ProfilerConfig = Field(default_factory=ProfilerConfig)
    ray_kwargs: RayConfig = Field(default_factory=RayConfig)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_task(cls, given: Any) -> Any:
        """A supervised step is one optimizer step on the whole batch, of sequences with one limit."""
        task = given.get("task") if isinstance(given, dict) else None
        if task not in ("sft", "reward_model"):
            return given
        given = filled(given, PRESETS[task])
        data = dict(given["data"]) if isinstance(given["data"], dict | DataConfig) else {}
        rows, length = data.get("train_batch_size"), data.get("max_length")
        follow: dict[str, dict[str, Any]] = {"data": {}, "actor": {}}
        if isinstance(rows, int):
            follow["actor"]["ppo_mini_batch_size"] = rows
        if isinstance(length, int):
            follow["data"] = {"max_prompt_length": 1, "max_response_length": max(1, length - 1)}
            follow["actor"]["loss_scale_factor"] = float(length)
        return filled(given, {"data": follow["data"], "actor_rollout_ref": {"actor": follow["actor"]}})
