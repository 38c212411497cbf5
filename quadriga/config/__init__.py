# SPDX-License-Identifier: Apache-2.0
"""The configuration: a typed schema, its loader, the checks between keys, and their explanation in words.

Importing it loads neither torch nor ray.
"""

from quadriga.config.actor import (
    ActorConfig,
    BatchingConfig,
    CheckpointConfig,
    CriticConfig,
    CriticModelConfig,
    CriticOptimConfig,
    FSDPConfig,
    LogProbConfig,
    OptimConfig,
    ParallelConfig,
    PolicyLossConfig,
    RefConfig,
)
from quadriga.config.algorithm import AlgorithmConfig, KLControlConfig
from quadriga.config.checks import check_training, training_findings
from quadriga.config.data import CustomDatasetConfig, DataConfig, SamplerConfig
from quadriga.config.explain import BatchPlan, batch_plan, explain, needs_old_log_prob_pass, needs_reference, show
from quadriga.config.keys import KeyInfo, keys_text, leaf_keys
from quadriga.config.layout import Layout, ModelShape, RankPlace, check_model
from quadriga.config.loader import Loaded, load_config
from quadriga.config.model import ModelConfig
from quadriga.config.placement import Placement, place_roles
from quadriga.config.reward import CustomRewardFunctionConfig, RewardClassifierConfig, RewardModelConfig
from quadriga.config.rollout import RolloutConfig, SamplingConfig, problem_of_several_engines
from quadriga.config.root import ActorRolloutRefConfig, Config
from quadriga.config.trainer import ProfilerConfig, RayConfig, TrainerConfig

__all__ = [
    "ActorConfig", "ActorRolloutRefConfig", "AlgorithmConfig", "BatchPlan", "BatchingConfig",
    "CheckpointConfig", "Config", "CriticConfig", "CriticModelConfig", "CriticOptimConfig",
    "CustomDatasetConfig", "CustomRewardFunctionConfig", "DataConfig", "FSDPConfig", "KLControlConfig",
    "KeyInfo", "Layout", "Loaded", "LogProbConfig", "ModelConfig", "ModelShape", "OptimConfig",
    "ParallelConfig", "Placement", "PolicyLossConfig", "ProfilerConfig", "RankPlace", "RayConfig", "RefConfig",
    "RewardClassifierConfig", "RewardModelConfig", "RolloutConfig", "SamplerConfig", "SamplingConfig",
    "TrainerConfig", "batch_plan", "check_model", "check_training", "explain", "keys_text", "leaf_keys",
    "load_config", "needs_old_log_prob_pass", "needs_reference", "place_roles", "problem_of_several_engines",
    "show", "training_findings",
]  # fmt: skip
