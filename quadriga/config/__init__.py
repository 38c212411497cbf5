# SPDX-License-Identifier: Apache-2.0
"""The configuration: a typed schema, its loader, the checks between keys, and their explanation in words.

Importing it loads neither torch nor ray.
"""

from quadriga.config.actor import ActorConfig, LogProbConfig, PolicyLossConfig, RefConfig
from quadriga.config.algorithm import AlgorithmConfig, KLControlConfig
from quadriga.config.arithmetic import BatchPlan, batch_plan, needs_old_log_prob_pass, needs_reference
from quadriga.config.check import check_training, training_findings
from quadriga.config.check_rollout import problem_of_several_engines
from quadriga.config.critic import CriticConfig, CriticModelConfig
from quadriga.config.data import CustomDatasetConfig, DataConfig, SamplerConfig
from quadriga.config.explain import explain, keys_text, show
from quadriga.config.layout import Layout, ModelShape, RankPlace, Sizes, check_model
from quadriga.config.loader import Loaded, load_config
from quadriga.config.model import ModelConfig
from quadriga.config.optimizer import (
    BatchingConfig,
    CheckpointConfig,
    CriticOptimConfig,
    FSDPConfig,
    OptimConfig,
    ParallelConfig,
)
from quadriga.config.placement import Placement, place_roles
from quadriga.config.profiler import ProfilerConfig
from quadriga.config.ray_kwargs import RayConfig
from quadriga.config.reward import CustomRewardFunctionConfig, RewardClassifierConfig, RewardModelConfig
from quadriga.config.rollout import RolloutConfig, SamplingConfig
from quadriga.config.root import ActorRolloutRefConfig, Config
from quadriga.config.trainer import TrainerConfig
from quadriga.config.tree import KeyInfo, leaf_keys

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "BatchPlan",
    "BatchingConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "CriticModelConfig",
    "CriticOptimConfig",
    "CustomDatasetConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "FSDPConfig",
    "KLControlConfig",
    "KeyInfo",
    "Layout",
    "Loaded",
    "LogProbConfig",
    "ModelConfig",
    "ModelShape",
    "OptimConfig",
    "ParallelConfig",
    "Placement",
    "PolicyLossConfig",
    "ProfilerConfig",
    "RankPlace",
    "RayConfig",
    "RefConfig",
    "RewardClassifierConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SamplerConfig",
    "SamplingConfig",
    "Sizes",
    "TrainerConfig",
    "batch_plan",
    "check_model",
    "check_training",
    "explain",
    "keys_text",
    "leaf_keys",
    "load_config",
    "needs_old_log_prob_pass",
    "needs_reference",
    "place_roles",
    "problem_of_several_engines",
    "show",
    "training_findings",
]
