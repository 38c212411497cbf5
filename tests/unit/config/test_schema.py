# SPDX-License-Identifier: Apache-2.0
"""The schema itself: documented, frozen, strict, and the few values that follow others."""

import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from quadriga.config import (
    ActorConfig,
    CheckpointConfig,
    Config,
    CriticConfig,
    DataConfig,
    FSDPConfig,
    OptimConfig,
    TrainerConfig,
    leaf_keys,
    load_config,
)
from quadriga.config.keys import leaf_of, nearest_keys, section_keys
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
    over = load_config(["actor_rollout_ref.actor.clip_ratio_high=0.3", "actor_rollout_ref.actor.clip_ratio=0.1"]).config
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
    assert TrainerConfig(resume_mode="path").resume_mode == "resume_path"


def test_sizes_of_images_are_in_order() -> None:
    sizes = DataConfig(mm_processor_kwargs={"max_pixels": 9}).mm_processor_kwargs
    assert sizes.given == {"max_pixels": 9} and DataConfig().mm_processor_kwargs.given == {}
    with pytest.raises(ValidationError, match="min_pixels of at most max_pixels"):
        DataConfig(mm_processor_kwargs={"min_pixels": 10, "max_pixels": 9})
    with pytest.raises(ConfigError, match=r"patch_size.*max_pixels|unknown"):
        load_config(["data.mm_processor_kwargs.patch_size=7"])


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    assert DataConfig(train_files=[tmp_path / "a"], val_files=tmp_path).train_files == [str(tmp_path / "a")]
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


def test_another_task_has_leaves_sections_and_open_dictionaries_of_its_own() -> None:
    assert leaf_of("optim.lr") is None
    assert leaf_of("optim.lr", "sft").default == 1e-5
    assert leaf_of("data.apply_chat_template_kwargs.a.b", "sft").key == "data.apply_chat_template_kwargs"
    assert "engine.fsdp_config" in section_keys("sft") - section_keys()
    assert nearest_keys("actor.optim.lr", "sft") == ["optim.lr"]
