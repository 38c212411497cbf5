# SPDX-License-Identifier: Apache-2.0
"""The configuration: a typed schema, its loader, the checks between keys, and their explanation in words.

Importing it loads neither torch nor ray.
"""

from quadriga.config.actor import (
    ActorConfig,
    BatchingConfig,
    CriticConfig,
    LogProbConfig,
    ModelConfig,
    OptimConfig,
)
from quadriga.config.checks import training_findings
from quadriga.config.data import DataConfig
from quadriga.config.distillation import DistillationConfig
from quadriga.config.explain import (
    BatchPlan,
    explain,
    learns_from_rewards,
    needs_old_log_prob_pass,
    needs_reference,
    saves_by_time,
    show,
    writes_checkpoints,
)
from quadriga.config.keys import keys_text, leaf_keys
from quadriga.config.layout import Layout, ModelShape, check_model
from quadriga.config.loader import Loaded, load_config
from quadriga.config.placement import Placement, place_roles, profiled_ranks
from quadriga.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from quadriga.config.rollout import RolloutConfig, problem_of_several_engines
from quadriga.config.rollout_checks import with_groups
from quadriga.config.root import Config
from quadriga.config.trainer import TrainerConfig
