# SPDX-License-Identifier: Apache-2.0
"""verl's keys: each is a field or is met by a sentence, and values that would change what a user gets are refused."""

from pathlib import Path

import pytest

from quadriga.config import leaf_keys, load_config
from quadriga.config.keys import VerlRule, leaf_of, verl_rules
from quadriga.errors import ConfigError

PUBLISHED = [
    tuple(line.split("\t"))
    for line in Path(__file__).with_name("published_keys.tsv").read_text().splitlines()
    if not line.startswith("#")
]

# A whole command line of the usual kind: GRPO on GSM8K, eight GPUs, vLLM.
COMMAND_LINE = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=data/gsm8k/train.parquet",
    "data.val_files=data/gsm8k/test.parquet",
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "data.shuffle=False",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=5",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0",
    'trainer.logger=["console","wandb"]',
    "trainer.project_name=verl_grpo_example_gsm8k",
    "trainer.experiment_name=qwen2_5_0_5b",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
]


def verl_rule(key: str) -> VerlRule | None:
    return next((rule for rule in verl_rules() if rule.pattern.fullmatch(key)), None)


@pytest.mark.parametrize(("key", "value"), PUBLISHED, ids=[key for key, _ in PUBLISHED])
def test_a_published_key_is_a_field_or_is_met_by_a_sentence(key: str, value: str) -> None:
    assert leaf_of(key) is not None or verl_rule(key) is not None
    try:
        load_config([f"{key}={value}"])
    except ConfigError as error:
        assert "does not exist" not in str(error)
        assert key.rsplit(".", 1)[0] in str(error)
        assert error.fix


def test_a_published_command_line_is_taken_as_it_is() -> None:
    loaded = load_config(COMMAND_LINE)
    config = loaded.config
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"disable_mm_preprocessor_cache": True}}
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.trainer.logger == ["console", "wandb"]
    said = "\n".join(loaded.notices)
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (8, 1)
    for key in ("use_remove_padding", "param_offload"):
        assert key in said
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == ("vllm", 2, 0.6)


def test_keys_with_the_same_sentence_share_a_notice() -> None:
    offload = [f"actor_rollout_ref.actor.fsdp_config.{name}=True" for name in ("param_offload", "optimizer_offload")]
    assert len(load_config(offload).notices) == 1


@pytest.mark.parametrize(
    ("neutral", "other"),
    [
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=1",
         "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
         "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4"),
        ("critic.megatron.tensor_model_parallel_size=1", "critic.megatron.tensor_model_parallel_size=2"),
        ("actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=null",
         "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=4"),
        ("critic.model.lora_rank=0", "critic.model.lora_rank=64"),
        ("actor_rollout_ref.model.lora.dropout=0.0", "actor_rollout_ref.model.lora.dropout=0.1"),
        ("actor_rollout_ref.model.lora.alpha=null", "actor_rollout_ref.model.lora.alpha=32"),
        ("actor_rollout_ref.model.lora.rank=0", "actor_rollout_ref.model.lora.rank=256"),
        ("reward_model.enable_resource_pool=False", "reward_model.enable_resource_pool=True"),
        ("reward_model.micro_batch_size=null", "reward_model.micro_batch_size=4"),
        ("reward.reward_model.enable=False", "reward.reward_model.enable=True"),
        ("actor_rollout_ref.rollout.over_sample_rate=0", "actor_rollout_ref.rollout.over_sample_rate=0.1"),
        ("trainer.max_actor_ckpt_to_keep=null", "trainer.max_actor_ckpt_to_keep=3"),
        ("ray_init.num_cpus=null", "ray_init.num_cpus=8"),
        ("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.strategy=megatron"),
    ],
)  # fmt: skip
def test_the_neutral_value_is_taken_and_another_is_refused(neutral: str, other: str) -> None:
    load_config([neutral])
    with pytest.raises(ConfigError, match=other.split("=")[0]) as caught:
        load_config([other])
    assert caught.value.fix


def test_one_is_not_true() -> None:
    with pytest.raises(ConfigError):
        load_config(["actor_rollout_ref.rollout.tensor_model_parallel_size=True"])


def test_open_dictionaries_take_anything() -> None:
    loaded = load_config(
        [
            "actor_rollout_ref.actor.megatron.override_transformer_config.anything.at.all=7",
            "actor_rollout_ref.rollout.engine_kwargs.sglang.some_flag=[1,2]",
            "reward_model.reward_kwargs.overlong_buffer_cfg.len=4096",
        ]
    )
    assert loaded.config.reward_model.reward_kwargs == {"overlong_buffer_cfg": {"len": 4096}}
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs == {"sglang": {"some_flag": [1, 2]}}


def test_no_rule_hides_a_field_and_every_sentence_is_one() -> None:
    assert not [key for key in leaf_keys() if verl_rule(key) is not None and verl_rule(key).accepted is not None]
    for rule in verl_rules():
        assert rule.sentence.endswith(".")
        assert ". " not in rule.sentence
