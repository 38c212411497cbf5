# SPDX-License-Identifier: Apache-2.0
"""The tree of `quadriga sft`: learning from answers that are given, and reward models from answers that are compared.

It is a tree of its own beside that of `quadriga train`; sections that mean the same are the same classes. `as_run` says
the same run in the words of the other tree, which is what workers, engines and checkpoints read.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from quadriga.config.actor import ActorConfig
from quadriga.config.base import (
    Count,
    LossAggMode,
    MinusOneOrCount,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PathTexts,
    PositiveFloat,
    Section,
)
from quadriga.config.data import DataConfig
from quadriga.config.model import ModelConfig
from quadriga.config.optimizer import CheckpointConfig, FSDPConfig, OptimConfig, ParallelConfig
from quadriga.config.ray_kwargs import RayConfig
from quadriga.config.root import ActorRolloutRefConfig, Config
from quadriga.config.trainer import RunConfig, TrainerConfig, known_places

WORDS = {
    "data.max_prompt_length + data.max_response_length": "data.max_length",
    "actor_rollout_ref.model.": "model.",
    "actor_rollout_ref.actor.optim.": "optim.",
    "actor_rollout_ref.actor.checkpoint.": "checkpoint.",
    "actor_rollout_ref.actor.ppo_": "engine.",
    "actor_rollout_ref.actor.": "engine.",
    "actor_rollout_ref.actor": "engine",
}
"""What keys of the other tree are called in this one: beginnings, the longer first."""


class SFTDataConfig(Section):
    """The rows, and how they become tokens."""

    train_files: PathTexts = ""
    """Training data: a path, a glob, a URL that fsspec opens, or a list of these (parquet, json, jsonl)."""
    val_files: PathTexts = ""
    """Validation data, in the forms of `data.train_files`. Empty: none."""
    format: Literal["messages", "prompt_response"] = "messages"
    """Of rows for `objective=sft`. messages: a chat in one column; prompt_response: two columns, one turn each."""
    messages_key: Name = "messages"
    """Column with the chat, where `data.format=messages`; every turn of the assistant in it is learned."""
    tools_key: Name = "tools"
    """Column with the tools that the chat template is told of, in rows that have it."""
    prompt_key: Name = "prompt"
    """Column with the prompt, text or chat messages, where rows have one."""
    response_key: Name = "response"
    """Column with the answer, text, where `data.format=prompt_response`."""
    chosen_key: Name = "chosen"
    """Column with the better answer of a pair, text, for `objective=reward_model`."""
    rejected_key: Name = "rejected"
    """Column with the worse answer of a pair, text, for `objective=reward_model`."""
    max_length: Count = 1024
    """Longest sequence, in tokens, prompt and answers together."""
    truncation: Literal["error", "left", "right"] = "error"
    """What happens to a longer one: the run stops, or tokens go from that side."""
    filter_overlong: bool = False
    """Whether longer ones are left out before training, and counted."""
    train_batch_size: Count = 256
    """Rows an optimizer step takes, of all processes together; a pair is one row."""
    val_batch_size: Count = 256
    """Rows of a validation batch."""
    tokenizer: PathText | None = None
    """Path or hub name of the tokenizer. null: the model's own."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: arguments for the chat template, such as `enable_thinking: false`."""
    shuffle: bool = True
    """Whether training rows are shuffled in each epoch, from `data.seed`."""
    seed: NonNegativeInt = 1
    """Seed of the order of the data."""
    cache_dir: PathText = "~/.cache/quadriga"
    """Directory for copies of remote files."""


class SFTOptimConfig(OptimConfig):
    """AdamW and its schedule."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""


class SFTEngineConfig(ParallelConfig):
    """The engine: how a batch is cut into pieces that fit in memory. The gradient does not depend on it."""

    micro_batch_size_per_gpu: Count | None = None
    """Rows in one forward and backward pass. null: as many as `engine.max_token_len_per_gpu` allows."""
    max_token_len_per_gpu: Count = 16384
    """Tokens that are packed into one forward and backward pass; a longer row goes alone."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses of a batch become one number, for `objective=sft`."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it."""
    max_nonfinite_steps: Count = 3
    """Optimizer steps in a row with a gradient that is not finite (each is skipped) after which the run stops."""
    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig)


class SFTTrainerConfig(RunConfig):
    """The run."""

    experiment_name: Name = "sft"
    """Name of the run, for trackers and for the run's directory."""
    test_freq: MinusOneOrCount = -1
    """Training steps between validations; the last step has one too. -1: only before and after training."""
    default_local_dir: Annotated[PathText, AfterValidator(known_places)] = "outputs/{project_name}/{experiment_name}"
    """Directory of the run: checkpoints, metrics, the resolved configuration, and at its end `model`."""


class SFTConfig(Section):
    """Everything that a run of `quadriga sft` is told."""

    objective: Literal["sft", "reward_model"] = "sft"
    """sft: the model learns to give the answers; reward_model: to score the better answer of a pair higher."""
    data: SFTDataConfig = Field(default_factory=SFTDataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: SFTOptimConfig = Field(default_factory=SFTOptimConfig)
    engine: SFTEngineConfig = Field(default_factory=SFTEngineConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    trainer: SFTTrainerConfig = Field(default_factory=SFTTrainerConfig)
    ray_kwargs: RayConfig = Field(default_factory=RayConfig)

    def as_run(self) -> Config:
        """The same run in the words of `quadriga train`; what only that command has, keeps its default."""
        engine, data, trainer = self.engine, self.data, self.trainer
        actor = ActorConfig(
            ppo_micro_batch_size_per_gpu=engine.micro_batch_size_per_gpu,
            ppo_max_token_len_per_gpu=engine.max_token_len_per_gpu,
            ppo_mini_batch_size=data.train_batch_size,
            loss_agg_mode=engine.loss_agg_mode,
            loss_scale_factor=float(data.max_length),
            # Pairs share their prompt; conversations are packed as they are.
            use_prefix_sharing=self.objective == "reward_model",
            grad_clip=engine.grad_clip,
            max_nonfinite_steps=engine.max_nonfinite_steps,
            optim=self.optim,
            fsdp_config=engine.fsdp_config,
            checkpoint=self.checkpoint,
            **{name: getattr(engine, name) for name in ParallelConfig.model_fields},
        )
        facts = {name: getattr(trainer, name) for name in RunConfig.model_fields}
        return Config(
            data=DataConfig(
                train_files=data.train_files,
                val_files=data.val_files,
                max_prompt_length=1,
                max_response_length=max(1, data.max_length - 1),
                tokenizer=data.tokenizer,
                seed=data.seed,
                cache_dir=data.cache_dir,
            ),
            actor_rollout_ref=ActorRolloutRefConfig(model=self.model, actor=actor),
            trainer=TrainerConfig(**facts | {"val_before_train": bool(data.val_files) and trainer.val_before_train}),
            ray_kwargs=self.ray_kwargs,
        )


def in_sft_words(text: str) -> str:
    """A text with the keys of `quadriga train` in it, with those of `quadriga sft`."""
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    return text
