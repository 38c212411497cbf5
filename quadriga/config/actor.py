# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.actor`: the policy's loss and its update."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from quadriga.config.base import (
    Count,
    KLKind,
    LossAggMode,
    Name,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    follow,
    refuse,
)
from quadriga.config.optimizer import BatchingConfig, CheckpointConfig, FSDPConfig, OptimConfig


def _known_strategy(value: Any) -> Any:
    if value in ("megatron", "veomni", "torchtitan", "automodel", "mindspeed"):
        raise refuse("fsdp or fsdp2", "Set actor_rollout_ref.actor.strategy=fsdp: it trains any Hugging Face model.")
    return value


class PolicyLossConfig(Section):
    """Which policy loss."""

    loss_mode: Name = "vanilla"
    """Name of a registered policy loss, or `path/to/file.py:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: options of that loss under the names that it gives them; they may stand beside loss_mode too."""

    @model_validator(mode="before")
    @classmethod
    def _others_are_options(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        others = {name: value for name, value in given.items() if name not in ("loss_mode", "options")}
        if not others or not isinstance(given.get("options", {}), dict):
            return given
        own = {name: value for name, value in given.items() if name == "loss_mode"}
        return {**own, "options": {**others, **given.get("options", {})}}


class ActorConfig(BatchingConfig):
    """The update of the policy."""

    strategy: Annotated[Literal["fsdp", "fsdp2"], BeforeValidator(_known_strategy)] = "fsdp"
    """Training engine; both names mean the same one."""
    clip_ratio: NonNegativeFloat = 0.2
    """Shorthand: sets `clip_ratio_low` and `clip_ratio_high` where these are not given."""
    clip_ratio_low: NonNegativeFloat = 0.2
    """How far the probability ratio counts below 1."""
    clip_ratio_high: NonNegativeFloat = 0.2
    """How far the probability ratio counts above 1."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual clip: largest ratio that counts for a negative advantage, above 1."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses of a mini-batch become one number."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of `seq-mean-token-sum-norm`, in tokens. null: `data.max_response_length`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus, per nat."""
    use_kl_loss: bool = False
    """Whether the divergence from the reference model is added to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that divergence, per nat."""
    kl_loss_type: KLKind = "low_var_kl"
    """Estimator of the divergence; a trailing + gives the straight-through gradient."""
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)
    use_prefix_sharing: bool = True
    """Whether samples of one prompt share the computation of the prompt; the gradient is the same."""
    freeze_vision_tower: bool = False
    """Whether the vision tower of a model that sees keeps its weights, in the compute dtype."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)

    @model_validator(mode="before")
    @classmethod
    def _both_clips_follow(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "clip_ratio" not in given:
            return given
        return follow(given, {"clip_ratio_low": given["clip_ratio"], "clip_ratio_high": given["clip_ratio"]})


class LogProbConfig(Section):
    """How the passes that only compute log-probabilities are cut; the numbers do not depend on it."""

    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one pass. null: as many as `log_prob_max_token_len_per_gpu` allows."""
    log_prob_use_dynamic_bsz: bool = False
    """Whether passes are cut by tokens even when a number of sequences is given."""
    log_prob_max_token_len_per_gpu: Count = 16384
    """Tokens in one pass, where passes are cut by tokens."""


class RefConfig(LogProbConfig):
    """The frozen reference model (it exists when a divergence from it is used)."""
