# SPDX-License-Identifier: Apache-2.0
"""What the actor and the critic share: optimizer, compute dtype, contents of a checkpoint."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from quadriga.config.base import (
    Count,
    Dtype,
    MinusOneOrMore,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    Share,
    follow,
    refuse,
)


def _not_zero(value: int) -> int:
    if value == 0 or value < -1:
        raise refuse("-1, or 1 and more", "-1 lets all processes share one copy of the weights; 1 gives each its own.")
    return value


Beta = Annotated[float, Field(ge=0, lt=1)]
CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, per unit of learning rate."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """Decay of the running mean and of the running square of the gradient, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the running square."""
    lr_warmup_steps: MinusOneOrMore = -1
    """Training steps over which the learning rate rises from zero. -1: `lr_warmup_steps_ratio` of the run."""
    lr_warmup_steps_ratio: Share = 0.0
    """Share of the run's training steps spent in warm-up when `lr_warmup_steps` is -1, in [0, 1]."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the schedule after warm-up."""
    min_lr_ratio: Share = 0.0
    """Where cosine and linear schedules end, as a share of `lr`, in [0, 1]."""
    num_cycles: PositiveFloat = 0.5
    """Waves of the cosine schedule; 0.5 falls once from top to bottom."""


class CriticOptimConfig(OptimConfig):
    """AdamW and its schedule, for the critic."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""


class FSDPConfig(Section):
    """The training engine of one role."""

    model_dtype: Dtype = "auto"
    """Dtype of the weights that compute; the master weights are always float32. auto: what the machine is fast at."""
    fsdp_size: Annotated[int, AfterValidator(_not_zero)] = -1
    """Processes that share one copy of the weights, of those with the same layers and heads. -1: all; 1: none."""
    reshard_after_forward: bool = True
    """Whether a layer's gathered weights are dropped before its backward pass gathers them again."""
    offload_policy: bool = False
    """Whether shared weights and optimizer rest, and step, in the memory of the CPU; with CUDA."""


class CheckpointConfig(Section):
    """What a checkpoint holds."""

    save_contents: list[CheckpointPart] = Field(default_factory=lambda: ["model", "optimizer", "extra"])
    """Parts to write; `extra` (random states) counts in the actor's list, `hf_model` is a Hugging Face folder."""
    load_contents: list[CheckpointPart] = Field(default_factory=lambda: ["model", "optimizer", "extra"])
    """Parts to read on resume. Left out: the parts that are written, without `hf_model`."""

    @model_validator(mode="before")
    @classmethod
    def _load_what_is_saved(cls, given: Any) -> Any:
        saved = given.get("save_contents") if isinstance(given, dict) else None
        if not isinstance(saved, list):
            return given
        return follow(given, {"load_contents": [part for part in saved if part != "hf_model"]})


class ParallelConfig(Section):
    """How the processes of a role share the rows of a data-parallel rank; the numbers do not depend on it."""

    ulysses_sequence_parallel_size: Count = 1
    """Processes that share the tokens of a batch; it divides the heads."""
    tensor_model_parallel_size: Count = 1
    """Processes that share each layer; it divides the heads and the key-value heads."""
    pipeline_model_parallel_size: Count = 1
    """Processes that have some of the layers each."""


class BatchingConfig(ParallelConfig):
    """How a mini-batch is cut into the pieces that fit in memory; the gradient does not depend on it."""

    ppo_mini_batch_size: Count = 256
    """Prompts an optimizer step takes (each with its `rollout.n` responses)."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward and backward pass. null: as many as `ppo_max_token_len_per_gpu` allows."""
    use_dynamic_bsz: bool = False
    """Whether micro-batches are cut by tokens even when a number of sequences is given."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Tokens in one forward and backward pass, where micro-batches are cut by tokens."""
    ppo_epochs: Count = 1
    """Passes over the batch of a step."""
    shuffle: bool = False
    """Whether the sequences are shuffled before they are cut into mini-batches."""
    data_loader_seed: int = 1
    """Seed of that shuffle."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it."""
    max_nonfinite_steps: Count = 3
    """Optimizer steps in a row with a gradient that is not finite (each is skipped) after which the run stops."""
