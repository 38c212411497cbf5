# SPDX-License-Identifier: Apache-2.0
"""The keys: documented, frozen, strict, and found by name, by meaning and by the names that other trainers have."""

import pickle
import re
from fnmatch import filter as matching
from pathlib import Path

import pytest
from pydantic import ValidationError

from quadriga.config import (
    ActorConfig,
    Config,
    CriticConfig,
    DataConfig,
    OptimConfig,
    TrainerConfig,
    keys_text,
    leaf_keys,
    load_config,
)
from quadriga.config.actor import CheckpointConfig, FSDPConfig
from quadriga.config.keys import aliases, leaf_of, nearest_keys, section_keys
from quadriga.errors import ConfigError


@pytest.mark.parametrize("key", list(leaf_keys()))
def test_every_key_says_what_it_means(key: str) -> None:
    leaf = leaf_keys()[key]
    assert leaf.meaning.endswith(".")
    assert leaf.kind


def test_every_default_passes_its_own_check() -> None:
    assert Config.model_validate(Config().model_dump()) == Config()


def test_it_is_frozen_and_travels() -> None:
    config = DataConfig(seed=3)
    with pytest.raises(ValidationError):
        config.seed = 4
    with pytest.raises(ValidationError):
        DataConfig(sead=3)
    assert pickle.loads(pickle.dumps(Config(data=config))).data.seed == 3


def test_the_two_clips_follow_the_one() -> None:
    assert (ActorConfig().clip_ratio_low, ActorConfig().clip_ratio_high) == (0.2, 0.2)
    both = ActorConfig(clip_ratio=0.1)
    assert (both.clip_ratio_low, both.clip_ratio_high) == (0.1, 0.1)
    one = ActorConfig(clip_ratio=0.1, clip_ratio_high=0.28)
    assert (one.clip_ratio_low, one.clip_ratio_high) == (0.1, 0.28)
    over = load_config(
        ["actor_rollout_ref.actor.clip_ratio_high=0.3", "actor_rollout_ref.actor.clip_ratio=0.1"]
    ).config
    assert over.actor_rollout_ref.actor.clip_ratio_high == 0.3


def test_what_is_loaded_follows_what_is_saved() -> None:
    assert CheckpointConfig(save_contents=["model", "hf_model"]).load_contents == ["model"]
    assert CheckpointConfig(save_contents=["model"], load_contents=[]).load_contents == []
    assert CheckpointConfig().load_contents == ["model", "optimizer", "extra"]


def test_the_critic_has_defaults_of_its_own() -> None:
    assert (CriticConfig().optim.lr, OptimConfig().lr) == (1e-5, 1e-6)
    assert CriticConfig().ppo_max_token_len_per_gpu == 32768


def test_words_of_others_are_understood() -> None:
    assert FSDPConfig(model_dtype="bf16").model_dtype == "bfloat16"
    assert FSDPConfig(model_dtype="fp32").model_dtype == "float32"
    assert FSDPConfig(model_dtype="fp16").model_dtype == "float16"
    assert TrainerConfig(resume_mode="path").resume_mode == "resume_path"


def test_sizes_of_images_are_in_order() -> None:
    sizes = DataConfig(mm_processor_kwargs={"max_pixels": 9}).mm_processor_kwargs
    assert sizes.model_dump(exclude_none=True) == {"max_pixels": 9}
    assert DataConfig().mm_processor_kwargs.model_dump(exclude_none=True) == {}
    with pytest.raises(ValidationError, match="min_pixels of at most max_pixels"):
        DataConfig(mm_processor_kwargs={"min_pixels": 10, "max_pixels": 9})
    with pytest.raises(ConfigError, match=r"patch_size.*max_pixels|unknown"):
        load_config(["data.mm_processor_kwargs.patch_size=7"])


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    assert DataConfig(train_files=[tmp_path / "a"], val_files=tmp_path).train_files == [
        str(tmp_path / "a")
    ]
    assert TrainerConfig(default_local_dir=tmp_path).directory == tmp_path


def test_the_directory_has_the_names_filled_in() -> None:
    assert TrainerConfig(project_name="p", experiment_name="e").directory == Path("outputs/p/e")
    assert TrainerConfig(default_local_dir="~/x").directory == Path.home() / "x"


def test_loggers_are_a_list_of_different_names() -> None:
    assert TrainerConfig(logger="jsonl").loggers == ["jsonl"]
    assert TrainerConfig(logger=["jsonl", "console", "jsonl"]).loggers == ["jsonl", "console"]


def test_leaves_sections_and_open_dictionaries() -> None:
    assert leaf_of("data.seed").kind == "a whole number, at least 0"
    assert leaf_of("data.seed.x") is None
    assert leaf_of("reward_model.reward_kwargs.a.b").key == "reward_model.reward_kwargs"
    assert "actor_rollout_ref.actor.optim" in section_keys()
    assert nearest_keys("optim.lr") == ["actor_rollout_ref.actor.optim.lr", "critic.optim.lr"]
    # Other trainers' names.
    assert nearest_keys("num_generations") == ["actor_rollout_ref.rollout.n"]
    assert nearest_keys("learning_rate") == ["actor_rollout_ref.actor.optim.lr", "critic.optim.lr"]
    assert "actor_rollout_ref.actor.kl_loss_coef" in nearest_keys("beta")


def test_another_task_has_leaves_sections_and_open_dictionaries_of_its_own() -> None:
    assert leaf_of("optim.lr") is None
    assert leaf_of("optim.lr", "sft").default == 1e-5
    assert (
        leaf_of("data.apply_chat_template_kwargs.a.b", "sft").key
        == "data.apply_chat_template_kwargs"
    )
    assert "engine.fsdp_config" in section_keys("sft") - section_keys()
    assert nearest_keys("actor.optim.lr", "sft") == ["optim.lr"]
    assert nearest_keys("learning_rate", "sft") == ["optim.lr"]


ROLLOUT = "actor_rollout_ref.rollout"


def found(*words: str) -> list[str]:
    return re.findall(r"^(\S+) = ", keys_text(words), flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("kv cache", f"{ROLLOUT}.cache_gigabytes"),
        ("KV cache", f"{ROLLOUT}.cache_gigabytes"),
        ("num_generations", f"{ROLLOUT}.n"),
        ("n_samples_per_prompt", f"{ROLLOUT}.n"),
        ("off-policy", "algorithm.rollout_correction.rollout_is"),
        ("importance sampling", "algorithm.rollout_correction.rollout_is"),
        ("staleness", "algorithm.rollout_correction.preset"),
        ("multi-turn", f"{ROLLOUT}.multi_turn.enable"),
        ("tool calling", f"{ROLLOUT}.multi_turn.function_tool_path"),
        ("tensorboard", "trainer.logger"),
        ("wandb", "trainer.logger"),
        ("continuous batching", f"{ROLLOUT}.max_num_seqs"),
        ("tensor parallel", "actor_rollout_ref.actor.tensor_model_parallel_size"),
        ("pipeline parallel", "actor_rollout_ref.actor.pipeline_model_parallel_size"),
        ("sequence parallelism", "actor_rollout_ref.actor.ulysses_sequence_parallel_size"),
        ("gradient accumulation", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("activation checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing"),
        ("mixed precision", "actor_rollout_ref.actor.fsdp_config.model_dtype"),
        ("dynamic sampling", "algorithm.filter_groups.enable"),
        ("multi-node", "trainer.nnodes"),
        ("max_new_tokens", "data.max_response_length"),
        ("system prompt", "data.apply_chat_template_kwargs"),
        ("debug", "trainer.rollout_data_dir"),
        ("weight sync", f"{ROLLOUT}.update_weights_bucket_megabytes"),
        ("learning rate", "actor_rollout_ref.actor.optim.lr"),
        ("vision-language model", "data.image_key"),
    ],
)
def test_a_key_is_found_by_the_words_of_the_field(words: str, key: str) -> None:
    assert key in found(words)


def test_what_has_the_words_in_its_name_comes_first() -> None:
    keys = found("temperature")
    assert keys[0] == f"{ROLLOUT}.temperature" and f"{ROLLOUT}.val_kwargs.do_sample" in keys[2:]


def test_each_word_has_to_be_there() -> None:
    assert found("KV", "cache", "engine")
    assert found("kv", "zebra") == []


def test_every_alias_means_keys_that_exist() -> None:
    known = [*leaf_keys(), *leaf_keys("sft")]
    assert len(aliases()) > 100
    for word, patterns in aliases().items():
        assert word == word.lower()
        assert [one for one in patterns if not matching(known, one)] == [], word
