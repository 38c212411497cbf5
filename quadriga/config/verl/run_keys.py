# SPDX-License-Identifier: Apache-2.0
"""verl's keys of generation, rewards, data and the run that have no field here."""

from quadriga.config.verl.rule import EMPTY, OFF, Rule, instead, note, only

ROLLOUT: list[Rule] = [
    *note(
        "The engine plans its own batches; what it samples does not depend on them, and an option of vLLM's own is set "
        "under rollout.engine_kwargs.vllm.",
        *(
            f"<rollout>.{name}"
            for name in (
                "enable_chunked_prefill",
                "enable_prefix_caching",
                "cudagraph_capture_sizes",
                "scheduling_policy",
                "disable_log_stats",
                "disable_log_requests",
                "skip_tokenizer_init",
                "block_size",
                "swap_space",
                "server.*",
            )
        ),
    ),
    *note(
        "An engine starts with the trainer's weights, and gets them in buckets of update_weights_bucket_megabytes.",
        "<rollout>.load_format",
        "<rollout>.layered_summon",
        "<rollout>.multi_stage_wake_up",
        "<rollout>.checkpoint_engine.*",
        "<rollout>.use_shm",
    ),
    *note("Conversations are driven by the process that generates.", "<rollout>.agent.num_workers"),
    *note("Log-probabilities of the sampled tokens are always kept.", "<rollout>.calculate_log_probs"),
    *only(
        ("processed_logprobs", None),
        "Log-probabilities are those under rollout.temperature: leave the key out.",
        "<rollout>.logprobs_mode",
    ),
    *instead("Set multi_turn.interaction_config_path.", "<rollout>.multi_turn.interaction_config_file"),
    *note(
        "What the model wrote is never tokenised again: there is nothing to check or to choose.",
        "<rollout>.multi_turn.tokenization_sanity_check_mode",
        "<rollout>.multi_turn.use_inference_chat_template",
    ),
    *instead("Set rollout.n.", "<rollout>.multi_turn.num_repeat_rollouts"),
    *only((0, 0.0, None), "Exactly the prompts of a batch are answered: set it to 0.", "<rollout>.over_sample_rate"),
    *only(EMPTY, "Set rollout.trace_dir: a JSONL record for each trajectory.", "<rollout>.trace.backend"),
    *note("Set rollout.trace_dir: a JSONL record for each trajectory.", "<rollout>.trace.*"),
    *only(OFF, "Set rollout.skip.enable.", "<rollout>.skip_rollout"),
    *instead("Set rollout.skip.dump_dir.", "<rollout>.skip_dump_dir", "<rollout>.skip.dump_dir_*"),
    *only(OFF, "Routers are not replayed: leave the key out.", "<rollout>.enable_rollout_routing_replay"),
    *only(OFF, "Metrics go where trainer.logger says: leave the key out.", "<rollout>.prometheus.enable"),
    *note("Read only with a metrics server, which is off.", "<rollout>.prometheus.*"),
    *instead(
        "Generation uses the weights that are trained: leave the key out.", "<rollout>.quantization*", "<rollout>.qat*"
    ),
    *instead("Set data.max_prompt_length.", "<rollout>.prompt_length"),
    *instead("Set data.max_response_length.", "<rollout>.response_length"),
    *only(
        (1, 1.0, None),
        "Training samples from the model's own distribution: leave the key out.",
        "<rollout>.repetition_penalty",
        "<rollout>.val_kwargs.repetition_penalty",
    ),
    *note("The seeds of generation come from trainer.seed.", "<rollout>.seed"),
    *note("A prompt may have as many images as data.max_prompt_length holds.", "<rollout>.limit_images"),
]

REWARD: list[Rule] = [
    *only(OFF, "Set reward_model.enable and reward_model.model.path.", "reward.reward_model.enable"),
    *instead("Set the key of this name under reward_model.", "reward.reward_model.*"),
    *only(
        EMPTY,
        "Set custom_reward_function.reward_kwargs.code.sandbox_url.",
        "*.sandbox_fusion.url",
        "sandbox_fusion.url",
    ),
    *note(
        "Graded by processes of their own (reward_model.num_workers); with rollout.mode=async during generation.",
        "reward_model.use_reward_loop",
    ),
    *note(
        "The reward model is a classifier that the engine evaluates: nothing is generated or served.",
        "reward_model.rollout.*",
        "reward_model.model_type",
    ),
    *note(
        "The reward model computes in packed micro-batches, each with its own kernels: nothing is to be chosen.",
        "reward_model.model.use_fused_kernels",
        "reward_model.model.use_shm",
    ),
    *instead(
        "Import what must be registered from the file of your reward function, data set or sampler.",
        "reward_model.model.external_lib",
    ),
    *instead("Set reward_model.micro_batch_size_per_gpu.", "reward_model.micro_batch_size"),
    *only(
        OFF,
        "Set trainer.placement.reward_model to the pool that the reward model is to have.",
        "reward_model.enable_resource_pool",
    ),
    *only(
        (0, 1, None),
        "Set trainer.placement.reward_model, and the pool's shape in trainer.resource_pools.",
        "reward_model.n_gpus_per_node",
        "reward_model.nnodes",
    ),
    *note(
        "Set custom_reward_function.reward_kwargs.code: sandbox_url, parallel, memory_megabytes.",
        "reward_model.sandbox_fusion.*",
        "sandbox_fusion.*",
    ),
    *instead("Set custom_reward_function.path and custom_reward_function.name.", "reward.custom_reward_function.*"),
    *instead(
        "Set reward_model.reward_manager.", "reward_manager.*", "reward.reward_manager.*", "reward_model.reward_loop_*"
    ),
    *instead("Set the key of this name under reward_model.", "reward.num_workers", "reward.reward_kwargs.*"),
]

DATA: list[Rule] = [
    *instead("Of images, video and sound only images are read: leave the key out.", "data.video_key", "data.audio_key"),
    *note("Rows always carry what the model takes of their images.", "data.return_multi_modal_inputs"),
    *note("It stands in the model's own files.", "data.image_patch_size"),
    *note("data.filter_overlong_prompts counts images too.", "data.filter_overlong_images"),
    *note("raw_prompt_ids are always there.", "data.return_raw_input_ids"),
    *instead(
        "Data come from files: set data.train_files, or data.custom_cls for a data set of your own.",
        "data.datagen.*",
        "data.datagen",
    ),
    *note("The tools_kwargs of a row are read wherever it has them.", "data.need_tools_kwargs"),
    *instead(
        "Set data.apply_chat_template_kwargs, or actor_rollout_ref.model.custom_chat_template.", "data.chat_template*"
    ),
]

RUN: list[Rule] = [
    *instead("Set trainer.max_ckpt_to_keep.", "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"),
    *note(
        "There is one implementation of the workers and of the trainer.",
        "trainer.use_legacy_worker_impl",
        "trainer.use_v1",
        "trainer.v1.*",
    ),
    *instead("Checkpoints are written to trainer.default_local_dir.", "trainer.default_hdfs_dir"),
    *only(
        OFF,
        "A checkpoint is kept after it was read; set trainer.max_ckpt_to_keep to bound their number.",
        "trainer.del_local_ckpt_after_load",
    ),
    *instead("Set global_profiler.steps.", "trainer.profile_steps"),
    *note(
        "global_profiler.tool and global_profiler.steps say what is profiled.",
        "<role>.profiler.*",
        "trainer.npu_profile.*",
        "global_profiler.global_tool_config.*",
        "trainer.controller_nsight_options.*",
        "trainer.worker_nsight_options.*",
    ),
    *only(OFF, "Batches travel through the driver, or inside the process: leave the key out.", "transfer_queue.enable"),
    *note("Read only with a transfer queue, which is off.", "transfer_queue.*"),
    *only(OFF, "There is no teacher model: leave the key out.", "distillation.enable*"),
    *note("Read only with distillation, which is off.", "distillation.*"),
    *instead("Generation and training take turns: leave the key out.", "async_training.*"),
    *instead("Name configuration files in order, each with --config.", "defaults", "hydra.searchpath"),
    *note("Hydra is not used.", "hydra.*", "*._target_", "_target_"),
]
