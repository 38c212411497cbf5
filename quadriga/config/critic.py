# SPDX-License-Identifier: Apache-2.0
"""`critic`: the value model (it exists when the advantage estimator takes values)."""

from pydantic import Field

from quadriga.config.base import Count, LossAggMode, PathText, PositiveFloat, Section
from quadriga.config.optimizer import BatchingConfig, CheckpointConfig, CriticOptimConfig, FSDPConfig


class CriticModelConfig(Section):
    """Where the critic starts from."""

    path: PathText | None = None
    """Folder or hub name of a model. null: `actor_rollout_ref.model.path`, with a new value head."""
    enable_gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward pass: less memory, about a third more time."""
    enable_activation_offload: bool = False
    """Whether what the backward pass needs rests in the memory of the CPU; with CUDA."""


class CriticConfig(BatchingConfig):
    """The update of the value model."""

    model: CriticModelConfig = Field(default_factory=CriticModelConfig)
    ppo_max_token_len_per_gpu: Count = 32768
    """Tokens in one forward and backward pass, where micro-batches are cut by tokens."""
    cliprange_value: PositiveFloat = 0.5
    """How far a value may move from the one of the rollout before the loss stops pulling it."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses of a mini-batch become one number."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of `seq-mean-token-sum-norm`, in tokens. null: `data.max_response_length`."""
    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig)
    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
