# SPDX-License-Identifier: Apache-2.0
"""verl's programs beside main_ppo: supervised training, generation, grading, its merger, and those that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quadriga_verl.commands.entries import ENTRIES, find_entry
from quadriga_verl.commands.hydra import MISSING, VERSIONS, verl_defaults
from quadriga_verl.commands.translate import Line, translate

MEGATRON = "actor_rollout_ref.actor.megatron"
FIELDS = f"{MEGATRON}.override_transformer_config"
REPLAY = "router_replay.mode"
OF_MEGATRON = "actor_rollout_ref.actor.strategy=megatron"
SFT = ("verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer")


def translated(program: str, *words: str, version: str = VERSIONS[-1]) -> Line:
    return translate(find_entry(program), [*words], version)


def ours(program: str, *words: str, version: str = VERSIONS[-1]) -> dict[str, Any]:
    found = translated(program, *words, version=version)
    assert not found.refused
    return found.settings


def test_a_supervised_run_means_what_verl_makes_of_it() -> None:
    keys = ours(
        "verl.trainer.sft_trainer", "engine=fsdp", "optim=fsdp", "model=hf_model", "model.path=m", "optim.lr=1e-5",
        "optim.clip_grad=0.5", "optim.min_lr_ratio=0.1", "optim.lr_scheduler_type=cosine", "engine.fsdp_size=1",
        "engine.ulysses_sequence_parallel_size=2", "data.max_token_len_per_gpu=2048", "trainer.logger=[console,file]",
        "data.train_batch_size=64", "trainer.test_freq=after_each_epoch", "trainer.n_gpus_per_node=4",
    )  # fmt: skip
    assert keys.items() >= {
        "model.path": "m", "optim.lr": 1e-5, "engine.grad_clip": 0.5, "optim.min_lr_ratio": 0.1,
        "optim.lr_scheduler_type": "cosine", "engine.fsdp_config.fsdp_size": 2, "data.train_batch_size": 64,
        "engine.ulysses_sequence_parallel_size": 2, "engine.max_token_len_per_gpu": 2048,
        "trainer.logger": ["console", "jsonl"], "trainer.test_freq": "after_each_epoch", "trainer.backend": "ray",
        "trainer.n_gpus_per_node": 4, "trainer.val_before_train": False, "model.enable_gradient_checkpointing": True,
    }.items()  # fmt: skip
    assert "engine.micro_batch_size_per_gpu" not in keys


def test_verls_own_defaults_hold_for_a_supervised_run() -> None:
    """A learning rate of 0.001 and four epochs; the older program's rate is 1e-5 and falls by a cosine."""
    assert (
        ours(SFT[0]).items()
        >= {"optim.lr": 1e-3, "trainer.total_epochs": 4, "trainer.seed": 1}.items()
    )
    older = ours(SFT[1], version="0.5.0")
    assert older.items() >= {"optim.lr": 1e-5, "optim.lr_scheduler_type": "cosine"}.items()
    assert (
        older.items()
        >= {"optim.lr_warmup_steps_ratio": 0.1, "data.format": "prompt_response"}.items()
    )


def test_a_batch_is_cut_as_the_switch_says() -> None:
    keys = ours(SFT[0], "data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2")
    assert keys["engine.micro_batch_size_per_gpu"] == 2
    assert "engine.max_token_len_per_gpu" not in keys


def test_entries_of_a_column_and_chats_of_the_older_program() -> None:
    words = ["data.prompt_key=extra_info", "data.response_key=extra_info"]
    inner = ["data.prompt_dict_keys=['question']", "+data.response_dict_keys=['answer']"]
    keys = ours(SFT[1], *words, *inner, "model.partial_pretrain=m", version="0.6.1")
    assert (keys["data.prompt_key"], keys["data.response_key"]) == (
        "extra_info.question",
        "extra_info.answer",
    )
    assert keys["model.path"] == "m"
    words = [
        "data.multiturn.enable=true",
        "data.multiturn.messages_key=chat",
        "ulysses_sequence_parallel_size=2",
    ]
    keys = ours(SFT[1], *words, version="0.6.1")
    assert (keys["data.format"], keys["data.messages_key"], keys["trainer.n_gpus_per_node"]) == (
        "messages",
        "chat",
        2,
    )


def test_other_engines_are_ours_with_the_same_sizes() -> None:
    words = [
        "engine=veomni",
        "optim=veomni",
        "optim.lr=1e-5",
        "optim.lr_min=1e-6",
        "engine.ulysses_parallel_size=2",
    ]
    found = translated(SFT[0], *words, "engine.data_parallel_size=4", "engine.ep_size=8")
    assert found.settings["optim.min_lr_ratio"] == pytest.approx(0.1)
    assert found.settings["engine.ulysses_sequence_parallel_size"] == 2
    assert any("FSDP2 trains in place of veomni" in one for one in found.notices)


@pytest.mark.parametrize(
    "words", [["engine=megatron", "optim=megatron"], ["engine.strategy=megatron"]]
)
def test_megatron_trains_with_verls_sizes(words: list[str]) -> None:
    sizes = [
        "tensor_model_parallel_size=2",
        "pipeline_model_parallel_size=2",
        "virtual_pipeline_model_parallel_size=2",
    ]
    others = [
        "context_parallel_size=2",
        "+override_transformer_config.context_parallel_size=2",
        "use_mbridge=True",
    ]
    own = [f"engine.{one}" if one[0] != "+" else f"+engine.{one[1:]}" for one in (*sizes, *others)]
    found = translated(
        SFT[0], *words, *own, "optim.lr_decay_style=cosine", "optim.lr=1e-5", "optim.min_lr=1e-6"
    )
    assert not found.refused
    assert found.settings.items() >= {
        "engine.strategy": "megatron", "engine.tensor_model_parallel_size": 2, "engine.pipeline_model_parallel_size": 2,
        "engine.megatron.virtual_pipeline_model_parallel_size": 2, "engine.ulysses_sequence_parallel_size": 2,
        "optim.lr_scheduler_type": "cosine", "trainer.n_gpus_per_node": 8,
    }.items()  # fmt: skip
    assert found.settings["optim.min_lr_ratio"] == pytest.approx(0.1)


def test_what_megatrons_section_means() -> None:
    """Sizes, offloading, stages and schedules are our keys; roles of one process have the actor's sizes."""
    sizes = [
        "tensor_model_parallel_size=4",
        "pipeline_model_parallel_size=2",
        "context_parallel_size=2",
    ]
    words = [
        *sizes,
        "virtual_pipeline_model_parallel_size=2",
        "param_offload=True",
        "grad_offload=True",
        "seed=7",
    ]
    words += ["use_dist_checkpointing=True", "dist_checkpointing_path=/ckpt"]
    fields = [
        "recompute_granularity=full",
        "recompute_method=uniform",
        "num_layers_in_last_pipeline_stage=3",
    ]
    fields += [
        "moe_aux_loss_coeff=0.01",
        "moe_z_loss_coeff=0.001",
        "pipeline_model_parallel_layout='Et|tL'",
    ]
    fields += [
        "moe_router_enable_expert_bias=True",
        "moe_router_bias_update_rate=0",
        "use_fused_mhc=False",
    ]
    found = translated(
        "main_ppo",
        *(
            "model_engine=megatron",
            "trainer.n_gpus_per_node=16",
            "actor_rollout_ref.rollout.name=vllm",
        ),
        *(f"{MEGATRON}.{one}" for one in words),
        *(f"+{FIELDS}.{one}" for one in (*fields, "apply_rope_fusion=True")),
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        *("algorithm.adv_estimator=gae", "critic.megatron.tensor_model_parallel_size=2"),
        *(
            "actor_rollout_ref.actor.optim.lr_decay_steps=50",
            "actor_rollout_ref.actor.optim.clip_grad=0.5",
        ),
        *(
            "actor_rollout_ref.actor.optim.weight_decay=0.1",
            "actor_rollout_ref.ref.megatron.param_offload=True",
        ),
    )
    assert not found.refused
    actor = "actor_rollout_ref.actor"
    assert found.settings.items() >= {
        f"{actor}.strategy": "megatron", f"{actor}.tensor_model_parallel_size": 4,
        f"{actor}.pipeline_model_parallel_size": 2, f"{actor}.ulysses_sequence_parallel_size": 2,
        f"{MEGATRON}.virtual_pipeline_model_parallel_size": 2, f"{actor}.fsdp_config.param_offload": True,
        f"{actor}.fsdp_config.grad_offload": True, f"{FIELDS}.num_layers_in_last_pipeline_stage": 3,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True, f"{actor}.grad_clip": 0.5,
        "critic.tensor_model_parallel_size": 4, "critic.pipeline_model_parallel_size": 2,
        "actor_rollout_ref.ref.fsdp_config.param_offload": True,
        f"{actor}.router_z_loss_coef": 0.001,
    }.items()  # fmt: skip
    told = "\n".join(found.notices)
    assert "dist_checkpointing_path: Weights are read from the Hugging Face folder" in told
    assert "critic.megatron.tensor_model_parallel_size" in told and "the actor's sizes" in told
    assert f"{actor}.optim.weight_decay: Norms and biases decay" in told
    assert (
        "apply_rope_fusion" in told and "lr_decay_steps: Read only with a rate that falls" in told
    )
    assert (
        "moe_aux_loss_coeff: It counts in no loss" in told
        and "moe_z_loss_coeff: The z-loss is averaged" in told
    )
    assert "pipeline_model_parallel_layout: Layers are divided evenly" in told


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        (SFT[0], ["engine.unheard=1"], "engine.unheard"),
        (SFT[0], ["optim.optimizer=SGD"], "optim.optimizer"),
        (SFT[0], ["model.mtp.enable=True", "model.mtp.enable_train=True"], "sft_trainer"),
        ("main_ppo", ["distillation.unheard=1"], "distillation.unheard"),
        ("main_ppo", ["actor_rollout_ref.actor.fsdp_config.qat.enable=True"], "main_ppo"),
        ("main_ppo", ["+actor_rollout_ref.rollout.quantization=fp8"], "main_ppo"),
        ("main_ppo", ["model_engine=megatron", f"{MEGATRON}.unheard=2"], f"{MEGATRON}.unheard"),
        (
            "main_ppo",
            ["--config-name=ppo_megatron_trainer", f"{MEGATRON}.dtype=float8"],
            f"{MEGATRON}.dtype",
        ),
        ("main_ppo", [OF_MEGATRON, f"+{FIELDS}.fp8=hybrid"], f"{FIELDS}.fp8"),
        ("main_ppo", [OF_MEGATRON, f"+{FIELDS}.hetereogenous=8"], f"{FIELDS}.hetereogenous"),
        *(
            ("main_ppo", [OF_MEGATRON, f"+{FIELDS}.{name}={value}"], f"{FIELDS}.{name}")
            for name, value in (
                ("moe_router_load_balancing_type", "aux_loss"),
                ("moe_router_bias_update_rate", 0.001),
                ("moe_router_enable_expert_bias", True),
                ("dsa_indexer_loss_coeff", 0.1),
            )
        ),
        ("main_ppo", [OF_MEGATRON, f"{MEGATRON}.{REPLAY}=record"], f"{MEGATRON}.{REPLAY}"),
        (SFT[1], ["optim.lr_scheduler=wsd"], "optim.lr_scheduler_type"),
        (SFT[1], ["data.custom_cls.path=x.py"], "data.custom_cls.path"),
        ("verl.trainer.main_generation", ["rollout.n=4"], "rollout.n"),
        ("verl.trainer.main_eval", ["data.unheard=4"], "data.unheard"),
    ],
)
def test_what_would_mean_something_else_is_refused_by_name(
    program: str, words: list[str], named: str
) -> None:
    refused = translated(
        program, *words, version="0.6.1" if program == SFT[1] else VERSIONS[-1]
    ).refused
    assert [one.where.partition(" ")[0] for one in refused] == [named]


def test_generation_and_grading_are_commands_here() -> None:
    words = [
        "model.path=m",
        "data.path=p.parquet",
        "data.n_samples=3",
        "data.output_path=o.parquet",
    ]
    found = translated(
        "verl.trainer.main_generation", *words, "rollout.top_k=50", "rollout.prompt_length=99"
    )
    assert found.settings.items() >= {
        "actor_rollout_ref.model.path": "m", "data.val_files": "p.parquet", "actor_rollout_ref.rollout.n": 3,
        "actor_rollout_ref.rollout.top_k": 50, "actor_rollout_ref.rollout.top_p": 0.7, "data.max_prompt_length": 99,
        "data.max_response_length": 512, "data.truncation": "right", "data.val_batch_size": 128,
    }.items()  # fmt: skip
    assert found.options == {"output_path": "o.parquet"}
    words = [
        "data.train_files=[a.parquet]",
        "+data.output_path=o.parquet",
        "actor_rollout_ref.rollout.response_length=9",
    ]
    server = translated(
        "verl.trainer.main_generation_server", *words, "actor_rollout_ref.rollout.top_k=50"
    )
    assert (
        server.settings.items()
        >= {"data.val_files": ["a.parquet"], "data.max_response_length": 9}.items()
    )
    assert server.settings.get("actor_rollout_ref.rollout.top_k") != 50
    assert any("does not pass it" in one for one in server.notices)
    graded = translated(
        "recipe.r1.main_eval", "data.path=o.parquet", "custom_reward_function.path=r.py"
    )
    assert graded.options == {
        "path": "o.parquet",
        "response_key": "responses",
        "reward_model_key": "reward_model",
    }
    assert graded.settings["custom_reward_function.path"] == "r.py"


def test_the_merger_takes_our_checkpoints_and_refuses_verls_shards(tmp_path: Path) -> None:
    words = ["merge", "--backend", "fsdp", "--local_dir", str(tmp_path), "--target_dir", "out"]
    assert translated("verl.model_merger", *words).options == {
        "argv": [str(tmp_path), "--output", "out"]
    }
    (tmp_path / "model_world_size_2_rank_0.pt").touch()
    (refused,) = translated("verl.model_merger", *words).refused
    assert "shards of verl's own" in str(refused)
    assert translated("verl.model_merger", "merge", "--backend", "megatron", *words[3:5]).refused
    (folder := tmp_path / "of megatron" / "dist_ckpt").mkdir(parents=True)
    words = [
        "merge",
        "--backend",
        "megatron",
        "--local_dir",
        str(folder.parent),
        "--target_dir",
        "out",
    ]
    assert "shards of verl's own" in str(translated("verl.model_merger", *words).refused[0])
    folder.rmdir()
    assert not translated("verl.model_merger", *words).refused


@pytest.mark.parametrize("program", [entry.name for entry in ENTRIES if entry.refused])
def test_other_programs_are_answered_in_one_sentence(program: str) -> None:
    (refused,) = translated(program, "trainer.unheard=1", "algorithm.adv_estimator=unheard").refused
    assert refused.fix


POOLS = {"actor": "all", "ref": "all", "critic": "all", "rollout": "generation"}


def test_fully_asynchronous_training_is_a_bound_on_staleness() -> None:
    """A step learns from `require_batches` mini-batches; 0.5 of a version's samples may be older: up to one version."""
    words = (
        "actor_rollout_ref.actor.ppo_mini_batch_size=32", "data.train_batch_size=0", "data.gen_batch_size=1",
        "actor_rollout_ref.hybrid_engine=False", "rollout.total_rollout_steps=51200", "rollout.nnodes=2",
        "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=8", "async_training.staleness_threshold=0.5",
        "async_training.trigger_parameter_sync_step=16", "async_training.require_batches=4",
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )  # fmt: skip
    found = translated("verl.experimental.fully_async_policy.fully_async_main", *words)
    expected = {
        "async_training.enable": True, "async_training.max_staleness": 1, "async_training.sync_every": 16,
        "async_training.in_flight": "continue", "data.train_batch_size": 128, "trainer.total_training_steps": 400,
        "algorithm.rollout_correction.bypass_mode": True, "trainer.backend": "ray", "trainer.placement": POOLS,
        "trainer.resource_pools": {"generation": [4, 4]}, "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    }  # fmt: skip
    assert not found.refused and found.settings.items() >= expected.items()
    notices = "\n".join(found.notices)
    assert (
        "staleness_threshold: verl lets a share" in notices
        and "actor_rollout_ref.rollout.name" not in notices
    )
    native = translated("fully_async_main", "actor_rollout_ref.rollout.name=sglang",
                        "actor_rollout_ref.rollout.tensor_model_parallel_size=4")  # fmt: skip
    assert native.settings["actor_rollout_ref.rollout.name"] == "native"
    assert native.settings["actor_rollout_ref.rollout.tensor_model_parallel_size"] == 1
    assert any(
        "tensor_model_parallel_size: Generated by the engine native, with" in one
        for one in native.notices
    )
    other = ours("fully_async_main", "async_training.staleness_threshold=0", "async_training.partial_rollout=False",
                 "async_training.compute_prox_log_prob=True")  # fmt: skip
    assert (other["async_training.max_staleness"], other["async_training.in_flight"]) == (
        0,
        "finish",
    )
    assert not other.get("algorithm.rollout_correction.bypass_mode")
    fixed_roles = translated(
        "fully_async_main", "async_training.use_dynamic_resource_scheduling=True"
    )
    assert not fixed_roles.refused
    assert "each process keeps its role" in "\n".join(fixed_roles.notices)


def test_one_step_off_keeps_its_batch() -> None:
    keys = ours("verl.experimental.one_step_off_policy.main_ppo", "data.train_batch_size=512", "rollout.nnodes=1",
                "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=6", "actor_rollout_ref.hybrid_engine=False",
                "actor_rollout_ref.actor.strategy=fsdp2")  # fmt: skip
    assert keys.items() >= {
        "async_training.enable": True, "async_training.preset": "one_step_off", "data.train_batch_size": 512,
        "trainer.placement": POOLS, "trainer.resource_pools": {"generation": [2]}, "trainer.n_gpus_per_node": 6,
    }.items()  # fmt: skip


@pytest.mark.parametrize("module", ["recipe.prime.main_prime", "verl.experimental.vla.main_ppo"])
def test_a_module_of_another_program_is_not_taken_for_main_ppo(module: str) -> None:
    assert translated(module).refused


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "program", [*SFT, "verl.trainer.main_generation", "verl.trainer.main_eval"]
)
def test_verls_default_of_each_leaf_is_taken_without_a_word(program: str, version: str) -> None:
    entry = find_entry(program)
    tree = verl_defaults(entry.tree, version)
    assert len(tree) > 5
    for key, value in tree.items():
        if value == MISSING or "${" in str(value) or key.endswith("_target_"):
            continue
        found = translate(entry, [f"{key}={json.dumps(value)}"], version)
        assert (key, found.refused, found.notices) == (key, [], [])


TEACHERS, LOSS = "distillation.teacher_models", "distillation.distillation_loss"
OPD = ["distillation.enabled=True", f"{LOSS}.use_task_rewards=False", f"{LOSS}.loss_max_clamp=10.0"]


def test_teachers_by_data_source() -> None:
    """A published line with two of them on processes of their own, by reverse KL as a policy gradient."""
    words = [
        *OPD, "distillation.n_gpus_per_node=4", "distillation.nnodes=2", f"{LOSS}.loss_mode=k1", f"{LOSS}.topk=64",
        f"{LOSS}.use_policy_gradient=True", f"{LOSS}.log_prob_min_clamp=-10.0", f"{LOSS}.clip_ratio_high=0.3",
        f"+{TEACHERS}.gsm8k.key=openai/gsm8k", f"+{TEACHERS}.gsm8k.model_path=Qwen/Qwen3-32B",
        f"+{TEACHERS}.gsm8k.inference.tensor_model_parallel_size=2", f"+{TEACHERS}.geo3k.key=hiyouga/geometry3k",
        f"+{TEACHERS}.geo3k.model_path=Qwen/Qwen3-VL-32B-Instruct", f"+{TEACHERS}.geo3k.num_replicas=1",
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.actor.entropy_coeff=0.1",
    ]  # fmt: skip
    found = translate(find_entry("main_ppo"), words)
    assert found.refused == [] and found.config is not None
    config, actor = found.config, found.config.actor_rollout_ref.actor
    teachers = {
        "openai/gsm8k": "Qwen/Qwen3-32B",
        "hiyouga/geometry3k": "Qwen/Qwen3-VL-32B-Instruct",
    }
    assert (config.distillation.teachers, config.distillation.path) == (teachers, None)
    loss = config.distillation
    assert (loss.loss_mode, loss.use_policy_gradient, loss.use_task_rewards) == ("k1", True, False)
    assert (loss.loss_max_clamp, loss.log_prob_min_clamp) == (10.0, None)
    assert config.trainer.resource_pools == {"teacher": [4, 4]}
    assert config.trainer.placement == {
        "actor_rollout_ref": "all",
        "critic": "all",
        "teacher": "teacher",
    }
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.entropy_coeff) == (0.2, 0.3, 0.0)
    told = "\n".join(found.notices)
    assert (
        "entropy_coeff: verl does not read it without task rewards" in told
        and "sharded over its processes" in told
    )


def test_one_teacher_beside_the_rewards() -> None:
    one = ["distillation.enabled=True", f"{TEACHERS}.teacher_model.model_path=Qwen/Qwen3-32B"]
    found = translate(
        find_entry("main_ppo"), [*one, f"{LOSS}.distillation_loss_coef=2", f"{LOSS}.loss_mode=k3"]
    )
    assert found.config is not None
    loss = found.config.distillation
    assert (loss.path, loss.teachers, loss.loss_coef, loss.use_task_rewards) == (
        "Qwen/Qwen3-32B",
        {},
        2.0,
        True,
    )
    assert (loss.use_policy_gradient, found.config.trainer.resource_pools) == (False, {})
    top = ["loss_mode=forward_kl_topk", "topk=64", "log_prob_min_clamp=-10.0"]
    found = translate(find_entry("main_ppo"), [*one, *(f"{LOSS}.{word}" for word in top)])
    assert found.config is not None
    assert (
        found.config.distillation.num_top_tokens,
        found.config.distillation.log_prob_min_clamp,
    ) == (64, -10.0)
    gradient = [*one, f"{LOSS}.use_policy_gradient=True", f"{LOSS}.loss_mode=k1"]
    assert "verl clips two" in "\n".join(translate(find_entry("main_ppo"), gradient).notices)
    refused = translate(find_entry("main_ppo"), [*gradient, f"{LOSS}.clip_ratio_low=0.4"]).refused
    assert any("0.2, as actor_rollout_ref.actor.clip_ratio_low" in str(error) for error in refused)
    refused = translate(find_entry("main_ppo"), [*one, f"+{TEACHERS}.second.model_path=m"]).refused
    assert any("for each of several teachers" in str(error) for error in refused)


def test_the_key_that_a_setting_comes_from_is_named() -> None:
    pool = (
        "reward_model.enable=True",
        "reward_model.enable_resource_pool=True",
        "reward_model.nnodes=1",
    )
    line = translated("main_ppo", *pool, "custom_reward_function.path=score.py", version="0.6.1")
    assert line.sources["trainer.resource_pools"] == "reward_model.enable"
    assert translated("main_generation", "data.path=o.parquet").sources["data.truncation"] == ""
