# SPDX-License-Identifier: Apache-2.0
"""verl's keys of models, engines, optimizers and losses that have no field here."""

from quadriga.config.verl.rule import EMPTY, OFF, ONE, Rule, instead, note, only

PARALLEL: list[Rule] = [
    *note(
        "Settings of Megatron-core are not needed: the engine is fsdp.",
        "<engine>.megatron.override_transformer_config.*",
    ),
    *note(
        "The processes of the reference are arranged as actor_rollout_ref.actor says.",
        "actor_rollout_ref.ref.megatron.*_parallel_size",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        "actor_rollout_ref.ref.fsdp_config.fsdp_size",
        "actor_rollout_ref.ref.fsdp_config.reshard_after_forward",
        "actor_rollout_ref.ref.fsdp_config.offload_policy",
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size",
    ),
    *only(
        ONE,
        "Set actor_rollout_ref.actor.tensor_model_parallel_size.",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    ),
    *only(ONE, "Set critic.tensor_model_parallel_size.", "critic.megatron.tensor_model_parallel_size"),
    *only(
        ONE,
        "Set actor_rollout_ref.actor.pipeline_model_parallel_size.",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    ),
    *only(ONE, "Set critic.pipeline_model_parallel_size.", "critic.megatron.pipeline_model_parallel_size"),
    *only(
        ONE,
        "Set actor_rollout_ref.actor.ulysses_sequence_parallel_size.",
        "actor_rollout_ref.actor.megatron.context_parallel_size",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    ),
    *only(
        ONE,
        "Set critic.ulysses_sequence_parallel_size.",
        "critic.megatron.context_parallel_size",
        "critic.fsdp_config.ulysses_sequence_parallel_size",
    ),
    *instead("Set critic.fsdp_config.fsdp_size.", "critic.model.fsdp_config.fsdp_size"),
    *only(
        ONE,
        "There is no such parallelism: set the size to 1, or leave the key out.",
        "<engine>.megatron.*_parallel_size",
        "critic.model.fsdp_config.ulysses_sequence_parallel_size",
    ),
    *only(
        ONE,
        "A generation engine is split by tensor_model_parallel_size alone: set this size to 1, or leave the key out.",
        "<rollout>.expert_parallel_size",
        "<rollout>.pipeline_model_parallel_size",
    ),
    *only(
        (None,),
        "Weights are read from the Hugging Face folder in the model's path: leave the key out.",
        "<engine>.megatron.dist_checkpointing_path",
    ),
    *note("Settings of Megatron-core are not needed: the engine is fsdp.", "<engine>.megatron.*"),
    *only(
        ("bfloat16", "auto", None),
        "Set actor_rollout_ref.actor.fsdp_config.model_dtype: float32 or bfloat16.",
        "<engine>.fsdp_config.dtype",
        "<engine>.dtype",
        "<rollout>.dtype",
    ),
    *only(
        ("auto", None),
        "The frozen model computes in actor_rollout_ref.actor.fsdp_config.model_dtype.",
        "actor_rollout_ref.ref.fsdp_config.model_dtype",
    ),
    *instead("Set critic.fsdp_config.model_dtype.", "critic.model.fsdp_config.model_dtype"),
    *only(
        OFF,
        "Every random choice is seeded from trainer.seed: leave the key out.",
        "<engine>.fsdp_config.full_determinism",
        "<rollout>.full_determinism",
    ),
    *note(
        "Weights are shared layer by layer; fsdp_config.offload_policy lets them and the optimizer rest on the host.",
        "<engine>.fsdp_config.*",
        "reward_model.model.fsdp_config.*",
    ),
    *note(
        "The strategy of actor_rollout_ref.actor holds for every role.",
        "actor_rollout_ref.ref.strategy",
        "critic.strategy",
        "reward_model.strategy",
    ),
    *note(
        "A wait of over 30 s says every 30 s what it waits for, and ends as soon as a process dies.",
        "actor_rollout_ref.nccl_timeout",
        "trainer.ray_wait_register_center_timeout",
    ),
    *only(
        (True, None), "Training and generation share one process: leave the key out.", "actor_rollout_ref.hybrid_engine"
    ),
    *instead("Set the key of this name under ray_kwargs.ray_init.", "ray_init.*"),
    *only(
        (0, 1, None),
        "Generation runs in the actor's processes; trainer.placement gives it some of its own: leave the key out.",
        "<rollout>.nnodes",
        "<rollout>.n_gpus_per_node",
    ),
]

BATCHING: list[Rule] = [
    *instead(
        "Set actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu.", "actor_rollout_ref.actor.ppo_micro_batch_size"
    ),
    *instead("Set critic.ppo_micro_batch_size_per_gpu.", "critic.ppo_micro_batch_size"),
    *instead(
        "Set the key of this name that ends in _per_gpu.",
        "<rollout>.log_prob_micro_batch_size",
        "actor_rollout_ref.ref.log_prob_micro_batch_size",
    ),
    *note(
        "critic.ppo_max_token_len_per_gpu bounds the critic's passes; the bound does not change its values.",
        "critic.forward_max_token_len_per_gpu",
        "critic.forward_micro_batch_size*",
        "critic.ppo_infer_*",
        "actor_rollout_ref.actor.ppo_infer_*",
    ),
    *note(
        "actor_rollout_ref.rollout.n holds for the critic too.", "critic.rollout_n", "actor_rollout_ref.actor.rollout_n"
    ),
    *note("Whether there is a critic follows from algorithm.adv_estimator.", "critic.enable"),
    *instead("Set data.train_batch_size.", "data.gen_batch_size"),
]

COMPUTE: list[Rule] = [
    *note(
        "Sequences are always packed: padding is never computed.",
        "<engine>.use_remove_padding",
        "<model>.use_remove_padding",
        "reward_model.model.use_remove_padding",
    ),
    *note(
        "Log-probabilities and entropy are always fused with the output head, in chunks.",
        "<model>.use_fused_kernels",
        "<model>.fused_kernel_options.*",
        "<engine>.use_fused_kernels",
        "<engine>.entropy_from_logits_with_chunking",
        "<engine>.entropy_checkpointing",
        "<model>.use_liger",
        "<model>.tiled_mlp.*",
    ),
    *note("The entropy is always reported.", "actor_rollout_ref.actor.calculate_entropy"),
    *note("The engine chooses how it compiles; results do not depend on it.", "<engine>.use_torch_compile"),
    *instead("Set actor_rollout_ref.actor.use_prefix_sharing.", "actor_rollout_ref.actor.use_prefix_grouper"),
    *note("The processes of a machine share the system's cache of files.", "<model>.use_shm", "data.use_shm"),
]

MODEL: list[Rule] = [
    *only(
        (0, None),
        "All weights of the critic are trained: leave the key out, or set it to 0.",
        "critic.model.lora_rank",
        "critic.model.lora.rank",
    ),
    *only(
        EMPTY,
        "All weights of the critic are trained: leave the key out.",
        "critic.model.lora_adapter_path",
        "critic.model.lora.adapter_path",
    ),
    *note(
        "Read only with an adapter, which the critic has not.",
        "critic.model.lora_alpha",
        "critic.model.lora.*",
        "critic.model.target_modules",
        "critic.model.target_parameters",
        "critic.model.exclude_modules",
    ),
    *only((0, None), "Set actor_rollout_ref.model.lora_rank.", "<model>.lora.rank"),
    *instead("Set actor_rollout_ref.model.lora_alpha.", "<model>.lora.alpha"),
    *instead("Set actor_rollout_ref.model.target_modules.", "<model>.lora.target_modules"),
    *only(EMPTY, "Set actor_rollout_ref.model.exclude_modules.", "<model>.lora.exclude_modules"),
    *only(EMPTY, "Set actor_rollout_ref.model.lora_adapter_path.", "<model>.lora.adapter_path"),
    *only(("lora", None), "Adapters are plain LoRA: leave the key out.", "<model>.lora.type"),
    *only(
        (0, 0.0, None),
        "A policy computes without dropout, as it samples: leave the key out.",
        "<model>.lora.dropout",
    ),
    *only(("kaiming", None), "A begins as PEFT's does: leave the key out.", "<model>.lora.lora_A_init_method"),
    *only(("zero", None), "B begins with zeros: leave the key out.", "<model>.lora.lora_B_init_method"),
    *instead("Set actor_rollout_ref.model.lora_merge.", "<model>.lora.merge"),
    *only(EMPTY, "Experts' own parameters get no adapter: leave the key out.", "<model>.target_parameters"),
    *only(
        (*EMPTY, *OFF),
        "This option of adapters is not offered: see actor_rollout_ref.model.lora_rank.",
        "<model>.lora",
        "<model>.lora.*",
    ),
    *instead("Set data.tokenizer.", "<model>.tokenizer_path"),
    *instead(
        "The model's own config.json is used: change it with actor_rollout_ref.model.override_config.",
        "<model>.hf_config_path",
    ),
    *only(
        EMPTY,
        "The critic takes actor_rollout_ref.model.override_config: leave the key out.",
        "critic.model.override_config",
        "critic.model.override_config.*",
    ),
    *note("actor_rollout_ref.model.trust_remote_code holds for the critic too.", "critic.model.trust_remote_code"),
    *instead(
        "Import what must be registered from the file of your reward function, data set or sampler.",
        "<model>.external_lib",
    ),
    *only(OFF, "Multi-token prediction is not trained: leave the key out.", "<model>.mtp.enable*"),
    *note("Read only with multi-token prediction, which is off.", "<model>.mtp.*"),
]

OPTIMIZER: list[Rule] = [
    *note(
        "The optimizer's state stays on the device that trains.",
        *(
            f"<engine>.optim.override_optimizer_config.{name}"
            for name in (
                "optimizer_cpu_offload",
                "optimizer_offload_fraction",
                "overlap_cpu_optimizer_d2h_h2d",
                "use_precision_aware_optimizer",
            )
        ),
    ),
    *only(
        EMPTY,
        "AdamW takes lr, betas, eps and weight_decay of this section: leave the key out.",
        "<engine>.optim.override_optimizer_config",
        "<engine>.optim.override_optimizer_config.*",
    ),
    *only(
        ("adam", "adamw", "Adam", "AdamW", None),
        "The optimizer is AdamW: leave the key out.",
        "<engine>.optim.optimizer",
    ),
    *only(("torch.optim", None), "The optimizer is torch's AdamW: leave the key out.", "<engine>.optim.optimizer_impl"),
    *only((1.0, None), "Set actor_rollout_ref.actor.grad_clip, or critic.grad_clip.", "<engine>.optim.clip_grad"),
    *only((-1, None), "Set trainer.total_training_steps.", "<engine>.optim.total_training_steps"),
    *only(
        ("constant", None),
        "Set lr_scheduler_type in the same section: constant, cosine or linear.",
        "<engine>.optim.warmup_style",
        "<engine>.optim.lr_decay_style",
    ),
    *only(
        (None, 0, 0.0),
        "Set min_lr_ratio in the same section: the end of the schedule as a share of lr.",
        "<engine>.optim.min_lr",
        "<engine>.optim.lr_warmup_init",
    ),
    *instead("The schedule ends with the run: set trainer.total_training_steps.", "<engine>.optim.lr_decay_steps"),
    *only(
        ("constant", None), "The weight decay is constant: leave the key out.", "<engine>.optim.weight_decay_incr_style"
    ),
    *note(
        "Read only with a schedule that is not offered.",
        "<engine>.optim.lr_wsd_decay_s*",
        "<engine>.optim.use_checkpoint_opt_param_scheduler",
    ),
    *note("Checkpoints are always written while training goes on.", "<engine>.checkpoint.async_save"),
]

LOSS: list[Rule] = [
    *instead("Set actor_rollout_ref.actor.policy_loss.options.tau_pos or tau_neg.", "actor_rollout_ref.actor.tau_*"),
    *only(
        ("disabled", None), "Routers are not replayed: leave the key out.", "actor_rollout_ref.actor.router_replay.mode"
    ),
    *note("Read only with the replay of routers, which is off.", "actor_rollout_ref.actor.router_replay.*"),
    *only(
        OFF,
        "This is not computed: leave the key out.",
        "actor_rollout_ref.actor.use_rollout_log_probs",
    ),
    *note(
        "Computed where the estimator reads it; no gradient goes through it.",
        "actor_rollout_ref.actor.calculate_sum_pi_squared",
        "actor_rollout_ref.actor.sum_pi_squared_checkpointing",
    ),
    *instead("Set algorithm.adv_options.", "algorithm.f_norm", "algorithm.gdpo_*"),
    *note(
        "Every step that updates the actor compares the rollout's log-probabilities with the trainer's.",
        "algorithm.rollout_correction.debug_rollout_actor_probs",
    ),
    *instead(
        "Write both bounds as LOWER_UPPER: rollout_rs_threshold=0.999_1.001.",
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
    ),
    *instead(
        "Add a rule on the worst token of an answer, such as seq_max_k2, to rollout_rs.",
        "algorithm.rollout_correction.rollout_token_veto_threshold",
    ),
    *only(
        OFF,
        "Set algorithm.rollout_correction.loss_type=reinforce.",
        "algorithm.rollout_correction.use_policy_gradient",
        "algorithm.rollout_correction.use_pure_rollout_correction",
    ),
    *only(
        OFF,
        "Set algorithm.rollout_correction.bypass_mode.",
        "algorithm.rollout_correction.bypass_old_logprob_for_rollout",
    ),
]
