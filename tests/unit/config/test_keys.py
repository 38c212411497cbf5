# SPDX-License-Identifier: Apache-2.0
"""Search among the keys: by name, by meaning, by what the field and other trainers call them."""

import re
from fnmatch import filter as matching

import pytest

from quadriga.config import keys_text, leaf_keys
from quadriga.config.keys import aliases

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
