# SPDX-License-Identifier: Apache-2.0
"""The whole tree."""

from pydantic import Field

from quadriga.config.actor import ActorConfig, RefConfig
from quadriga.config.algorithm import AlgorithmConfig
from quadriga.config.base import Section
from quadriga.config.critic import CriticConfig
from quadriga.config.data import DataConfig
from quadriga.config.model import ModelConfig
from quadriga.config.profiler import ProfilerConfig
from quadriga.config.ray_kwargs import RayConfig
from quadriga.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from quadriga.config.rollout import RolloutConfig
from quadriga.config.trainer import TrainerConfig


class ActorRolloutRefConfig(Section):
    """The policy in its three parts: trained, generating, frozen."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    ref: RefConfig = Field(default_factory=RefConfig)


class Config(Section):
    """Everything that a run is told."""

    data: DataConfig = Field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = Field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    custom_reward_function: CustomRewardFunctionConfig = Field(default_factory=CustomRewardFunctionConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    global_profiler: ProfilerConfig = Field(default_factory=ProfilerConfig)
    ray_kwargs: RayConfig = Field(default_factory=RayConfig)
