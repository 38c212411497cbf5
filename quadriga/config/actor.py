# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.model`, `.actor` and `.ref`, `critic`: models, training and parallelism."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from quadriga.config.base import Findings, ReadIf, Section, fill_missing, notice_unused
from quadriga.config.layout import Layout
from quadriga.config.types import (
    Count,
    Dtype,
    KLKind,
    LossAggMode,
    Meaning,
    MinusOneOrCount,
    Name,
    PathText,
    Share,
)
from quadriga.errors import ConfigError

VISION_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
"""Vision-language models, as the `model_type` of their config.json names them."""
ADAPTER_DETAILS = ("lora_alpha", "target_modules", "exclude_modules")
"""Keys of a new adapter besides its rank. An adapter to start from has its own values."""
CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]
HF_FOLDER = "huggingface"
"""Folder of the part `hf_model` in a role's checkpoint."""
Beta = Annotated[float, Ge(0), Lt(1)]
_OPEN = frozenset(
    {
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "deallocate_pipeline_outputs",
        "moe_router_dtype",
    }
)
"""Fields of Megatron's TransformerConfig that users may set; the others follow from other keys."""


class ModelConfig(Section):
    """The pretrained model that actor, rollout and reference start from."""

    path: PathText = ""
    """Folder with a Hugging Face model, or its name on the hub."""
    override_config: dict[str, Any] = {}
    """Open dictionary: entries that replace those of the model's `config.json`."""
    enable_gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Gradient (activation) checkpointing: recomputes activations backward, for less memory and a third more time.
    auto: on an accelerator if the predicted peak with kept activations takes more than 90 % of its memory, or if the
    peak is not predicted for the model."""
    enable_activation_offload: bool = False
    """Whether activations are offloaded to CPU memory until the backward pass; CUDA only."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may be run."""
    custom_chat_template: str | None = None
    """Chat template: a file, or Jinja text, which has braces. null: the tokenizer's own."""
    external_lib: str | list[str] | None = None
    """File (`.py`) or module to import in each process, or a list. What they register can be chosen by name."""
    lora_rank: NonNegativeInt = 0
    """Rank of the LoRA adapter that is trained instead of the weights. 0: no adapter, all weights are trained."""
    lora_alpha: Count = 16
    """Scale of the adapter's output, times its rank: the output is multiplied by lora_alpha / lora_rank."""
    target_modules: str | list[str] = "all-linear"
    """Modules with an adapter: names or ends of names, or a regular expression. all-linear: all but the head."""
    exclude_modules: str | list[str] | None = None
    """Modules of `target_modules` without one: names or ends of names, or a regular expression."""
    lora_adapter_path: PathText | None = None
    """Folder of an adapter, as PEFT writes it, to start from; it has its own rank, alpha and modules."""
    lora_merge: bool | None = None
    """Whether a rollout engine with a copy of the weights gets the adapter merged into them. false: weight sync only
    sends the adapter's matrices, which `vllm` supports. null: false where the engine supports it, else true."""

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, and the weights are not."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    def findings(self, at: str) -> Findings:
        if not self.has_adapter:
            names = (*ADAPTER_DETAILS, "lora_merge")
            keys = [f"{at}.{name}" for name in names if name in self.model_fields_set]
            yield from notice_unused(keys, f"{at}.lora_rank is 0")
            return
        for name in ("target_modules", "exclude_modules"):
            if getattr(self, name) in ([], ""):
                yield ConfigError(
                    f"{at}.{name}", "nothing", "names of modules", "Leave the key out."
                )


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, per unit of learning rate."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the running mean and the running square of the gradient, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the running square."""
    lr_warmup_steps: Annotated[int, Meaning("-1, 0 or a larger whole number"), Ge(-1)] = -1
    """Training steps over which the learning rate rises from zero. -1: see `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Annotated[Share, ReadIf("lr_warmup_steps", (-1,))] = 0.0
    """Share of the schedule's training steps spent in warm-up when `lr_warmup_steps` is -1, in [0, 1]."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the schedule after warm-up."""
    min_lr_ratio: Annotated[Share, ReadIf("lr_scheduler_type", ("cosine", "linear"))] = 0.0
    """Learning rate at the end of cosine and linear schedules, as a share of `lr`, in [0, 1]."""
    total_training_steps: Count | None = None
    """Training step at which schedules end, whenever the run ends. null: the last step of training."""
    num_cycles: PositiveFloat = 0.5
    """Periods of the cosine schedule; with 0.5 the rate falls once."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and of AdamW's moments between steps; bfloat16 loses updates of less than a 256th."""
    zero_indexed_step: bool = False
    """Whether schedules count steps from 0: the first step of a warm-up then has a rate of 0."""


class CriticOptimConfig(OptimConfig):
    """AdamW and its learning-rate schedule, for the critic."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""


class FSDPConfig(Section):
    """FSDP2 of one role: sharding, mixed precision, offload to the CPU."""

    model_dtype: Dtype = "auto"
    """Dtype that computes (mixed precision; the master weights are float32). auto: bfloat16 where the machine is fast
    at it, else float32. In float16, which CPUs are slow at, losses are scaled: see `max_nonfinite_steps`."""
    fsdp_size: MinusOneOrCount = -1
    """Ranks that shard one copy of the weights, apart from tensor and pipeline parallelism. -1: all; 1: no sharding."""
    reshard_after_forward: bool = True
    """Whether a layer's gathered weights are dropped before its backward pass gathers them again."""
    offload_policy: bool = False
    """Whether float32 weights and optimizer state always stay, and are stepped, in the memory of the CPU; with CUDA."""
    param_offload: bool = False
    """Whether weights are offloaded to `trainer.offload_dir` while other roles work. If the rollout computes with
    the actor's own modules, only the float32 master weights are offloaded."""


class TrainingFSDPConfig(FSDPConfig):
    """FSDP2 of a role that learns."""

    optimizer_offload: bool = False
    """Whether AdamW's moments are offloaded to `trainer.offload_dir` between updates."""
    grad_offload: bool | None = None
    """Whether the float32 sums of gradients are freed between updates. null: on an accelerator."""


class ReferenceFSDPConfig(Section):
    """Memory of the reference. Its ranks are arranged like the actor's."""

    param_offload: bool | None = None
    """Whether its weights are offloaded to `trainer.offload_dir` while it is not used. null: true on an accelerator if
    it is colocated with the actor."""


class CheckpointConfig(Section):
    """Contents of a checkpoint."""

    save_contents: list[CheckpointPart] = ["model", "optimizer", "extra"]
    """Parts to write; `extra` (random states) counts in the actor's list, `hf_model` is a Hugging Face folder."""
    load_contents: list[CheckpointPart] = ["model", "optimizer", "extra"]
    """Parts to read on resume. Default: the parts of `save_contents`, without `hf_model`."""

    @model_validator(mode="before")
    @classmethod
    def _default_to_saved_parts(cls, values: Any) -> Any:
        """Default of `load_contents`: the parts that are saved, without the Hugging Face folder."""
        saved_parts = values.get("save_contents") if isinstance(values, dict) else None
        if not isinstance(saved_parts, list):
            return values
        loaded_parts = [part for part in saved_parts if part != "hf_model"]
        return fill_missing(values, {"load_contents": loaded_parts})


class RoleProfilerConfig(Section):
    """Processes of a role that `global_profiler` profiles."""

    ranks: list[NonNegativeInt] | None = None
    """Ranks of the role. null: all, []: none. Reference and rollout use the actor's ranks."""


class ParallelConfig(Section):
    """Parallelism within a data-parallel rank. The numbers do not depend on it."""

    ulysses_sequence_parallel_size: Count = 1
    """Sequence parallelism (Ulysses): ranks that share the tokens of a batch; it divides the heads."""
    tensor_model_parallel_size: Count = 1
    """Tensor parallelism: ranks that share each layer; it divides the heads and the key-value heads."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline parallelism: number of stages, each with some of the layers."""
    expert_parallel_size: Count = 1
    """Expert parallelism: of the ranks that shard one copy of the weights, those that divide the experts of each layer;
    tokens travel to them. It divides the experts. On Megatron-core any neighbours in a pipeline stage."""
    profiler: RoleProfilerConfig = RoleProfilerConfig()

    def layout(
        self, world_size: int, where: str, megatron: "MegatronConfig | None" = None
    ) -> Layout:
        """Arrange the ranks of a role.

        Args:
            world_size: number of ranks.
            where: key of this section, for errors.
            megatron: settings of Megatron-core; None if FSDP2 is the training engine.

        Raises:
            ConfigError: the sizes do not divide the ranks.
        """
        sp = self.ulysses_sequence_parallel_size
        tp = self.tensor_model_parallel_size
        pp = self.pipeline_model_parallel_size
        ep = self.expert_parallel_size
        if megatron is None:
            fsdp = self.fsdp_config.fsdp_size
            return Layout.of(world_size, where, fsdp=fsdp, sp=sp, tp=tp, pp=pp, ep=ep)
        # Megatron-core shards the optimizer state over all ranks with the distributed optimizer, else
        # only over those of sequence parallelism.
        fsdp = -1 if megatron.use_distributed_optimizer else sp
        # Megatron-core divides the experts over any neighbours in a pipeline stage. So `ep` is set
        # below, without the check that `Layout.of` makes for FSDP2.
        stage_size = world_size // pp
        if stage_size % ep:
            raise ConfigError(
                f"{where}.expert_parallel_size",
                got=f"{ep}, for stages of {stage_size} processes",
                expected="a number that divides them",
                fix="Choose another one.",
            )
        layout = Layout.of(world_size, where, fsdp=fsdp, sp=sp, tp=tp, pp=pp)
        return replace(layout, ep=ep, uses_megatron_modules=True)


class BatchingConfig(ParallelConfig):
    """Mini-batches and their micro-batches (gradient accumulation), on which no gradient depends."""

    ppo_mini_batch_size: Count = 256
    """Prompts of an optimizer step (each with its `rollout.n` responses)."""
    ppo_micro_batch_size_per_gpu: Annotated[Count | None, ReadIf("use_dynamic_bsz", (False,))] = (
        None
    )
    """Sequences of a micro-batch (a forward and backward pass). null: as `ppo_max_token_len_per_gpu` allows."""
    use_dynamic_bsz: bool = False
    """Whether micro-batches are cut by tokens even when a number of sequences is given."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Tokens packed into one micro-batch, where micro-batches are cut by tokens; a longer sequence goes alone."""
    ppo_epochs: Count = 1
    """Passes over the batch of a step."""
    shuffle: bool = False
    """Whether the sequences are shuffled before they are cut into mini-batches."""
    data_loader_seed: int = 1
    """Seed of that shuffle."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of the per-token losses of a mini-batch. rollout-mean-token-mean: the mean over rollouts of the mean
    over all tokens of a rollout, which may have several sequences."""
    loss_scale_factor: Annotated[
        PositiveFloat | None, ReadIf("loss_agg_mode", ("seq-mean-token-sum-norm",))
    ] = None
    """Divisor of `seq-mean-token-sum-norm`, in tokens. null: `data.max_response_length`."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    max_nonfinite_steps: Count = 3
    """Optimizer steps in a row with a gradient that is not finite (each is skipped) after which the run stops. In
    float16 such a step halves the loss scale, and counts once the scale is 1."""
    fsdp_config: TrainingFSDPConfig = TrainingFSDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


class MegatronConfig(Section):
    """Megatron-core, where `strategy` names it; sizes, dtype and offloading of a role are the keys that FSDP has."""

    virtual_pipeline_model_parallel_size: Count | None = None
    """Virtual pipeline stages: chunks of layers on each pipeline rank, interleaved with the others'. null: one."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks divide the tokens in parts of layers that are not sharded (norms, sums)."""
    use_distributed_optimizer: bool = True
    """Whether data-parallel ranks shard float32 master weights and AdamW's moments (ZeRO-1)."""
    override_transformer_config: dict[str, Any] = {}
    """Open dictionary: fields of Megatron's `TransformerConfig` that neither the model nor other keys decide."""

    def findings(self, at: str) -> Findings:
        expected = f"one of {', '.join(sorted(_OPEN))}"
        fix = "Leave it out: the model or another key decides it."
        for name in sorted(self.override_transformer_config.keys() - _OPEN):
            yield ConfigError(f"{at}.override_transformer_config.{name}", "a value", expected, fix)


class PolicyLossConfig(Section):
    """Choice of the policy loss."""

    loss_mode: Name = "vanilla"
    """Name of a registered policy loss, or `path/to/file.py:function`."""
    options: dict[str, Any] = {}
    """Open dictionary: options of that loss, under its own names; they may also be written next to loss_mode."""

    @model_validator(mode="before")
    @classmethod
    def _move_into_options(cls, values: Any) -> Any:
        """Move keys that are no fields into `options`; an entry of `options` overrides such a key.

        Values that validation refuses are returned as they are.
        """
        options = values.get("options", {}) if isinstance(values, dict) else None
        if not isinstance(options, dict):
            return values
        fields = {}
        further_options = {}
        for name, value in values.items():
            if name in cls.model_fields:
                fields[name] = value
            else:
                further_options[name] = value
        if not further_options:
            return values
        return {**fields, "options": {**further_options, **options}}


class ActorConfig(BatchingConfig):
    """The update of the policy."""

    strategy: Literal["fsdp", "fsdp2", "megatron"] = "fsdp"
    """Training engine of all roles. fsdp, fsdp2: FSDP2, for any Hugging Face model; megatron: Megatron-core."""
    megatron: MegatronConfig = MegatronConfig()
    clip_ratio: NonNegativeFloat = 0.2
    """Shorthand for `clip_ratio_low` and `clip_ratio_high`, for those that are not set."""
    clip_ratio_low: NonNegativeFloat = 0.2
    """Clip range of the probability ratio (importance weight of a token) below 1."""
    clip_ratio_high: NonNegativeFloat = 0.2
    """Clip range of the probability ratio above 1."""
    clip_ratio_c: Annotated[float, Gt(1)] = 3.0
    """Dual clip: upper bound of the ratio for a negative advantage, above 1."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus, per nat."""
    calculate_entropy: bool = False
    """Whether responses without an advantage are computed too, for entropy, `ppo_kl` and clip fractions over all."""
    use_kl_loss: bool = False
    """Whether the KL divergence from the reference model is added to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that divergence, per nat."""
    kl_loss_type: KLKind = "low_var_kl"
    """Estimator of the divergence; a trailing + gives the straight-through gradient."""
    echo_coeff: NonNegativeFloat = 0.0
    """Weight of the cross entropy (ECHO) of what tools, users and environments wrote after the first reply, per nat:
    its mean over their tokens, without the template's, at the rollout's temperature. Needs responses of several turns.
    """
    echo_roles: Annotated[
        list[Literal["tool", "user"]], MinLen(1), ReadIf("echo_coeff", (0.0,), is_listed=False)
    ] = ["tool", "user"]
    """Roles whose tokens have that loss. Environments without calls of tools write as user."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    use_prefix_sharing: bool = True
    """Whether responses to one prompt share the computation of the prompt in training; the gradient is the same."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a mixture of experts, which is 1 if all experts get equally many tokens."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Weight of the z-loss of routers: the square of the log of the sum of exponentials, added over layers."""
    router_replay: Literal["off", "rollout", "old_log_prob"] = "off"
    """Choice of experts that the update repeats. off: none; rollout: the rollout's (R3), also in the pass for old
    log-probs; old_log_prob: that pass's (R2)."""
    freeze_vision_tower: bool = False
    """Whether the vision encoder of a vision-language model keeps its weights, in the compute dtype."""
    optim: OptimConfig = OptimConfig()

    @property
    def megatron_if_chosen(self) -> MegatronConfig | None:
        """Settings of Megatron-core if it is the training engine, else None."""
        return self.megatron if self.strategy == "megatron" else None

    @model_validator(mode="before")
    @classmethod
    def _fill_in_clip_bounds(cls, values: Any) -> Any:
        """Set a bound that is not given, `clip_ratio_low` or `clip_ratio_high`, to `clip_ratio`."""
        if not isinstance(values, dict) or "clip_ratio" not in values:
            return values
        return fill_missing(
            values, dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), values["clip_ratio"])
        )


class LogProbConfig(Section):
    """Size of the passes that only compute log-probabilities. The numbers do not depend on it."""

    log_prob_micro_batch_size_per_gpu: Annotated[
        Count | None, ReadIf("log_prob_use_dynamic_bsz", (False,))
    ] = None
    """Sequences in one pass. null: as many as `log_prob_max_token_len_per_gpu` allows."""
    log_prob_use_dynamic_bsz: bool = False
    """Whether passes are cut by tokens even when a number of sequences is given."""
    log_prob_max_token_len_per_gpu: Count = 16384
    """Tokens in one pass, where passes are cut by tokens."""


class ReferenceConfig(LogProbConfig):
    """The reference policy: its passes, and its memory."""

    fsdp_config: ReferenceFSDPConfig = ReferenceFSDPConfig()


class CriticModelConfig(Section):
    """Pretrained model that the critic starts from."""

    path: PathText | None = None
    """Folder or hub name of a model. null: `actor_rollout_ref.model.path`, with a new value head."""
    enable_gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Gradient (activation) checkpointing: recomputes activations backward, for less memory and a third more time.
    auto: on an accelerator if the predicted peak with kept activations takes more than 90 % of its memory, or if the
    peak is not predicted for the model."""
    enable_activation_offload: bool = False
    """Whether activations are offloaded to the memory of the CPU until the backward pass; with CUDA."""


class CriticConfig(BatchingConfig):
    """The update of the value model, which exists if the advantage estimator uses values."""

    model: CriticModelConfig = CriticModelConfig()
    ppo_max_token_len_per_gpu: Count = 32768
    """Tokens packed into one micro-batch, where micro-batches are cut by tokens."""
    cliprange_value: PositiveFloat = 0.5
    """Clip range of a value around the value at the time of the rollout."""
    optim: CriticOptimConfig = CriticOptimConfig()
