# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model by its config.json alone are those of the model itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

from quadriga.errors import ConfigError
from quadriga.models.load import skeleton_causal_lm
from quadriga.models.scorers import ValueScorer
from quadriga.planning.module_sizes import module_sizes
from quadriga.planning.sizes import ModelSizes

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
        MistralConfig(**SMALL, tie_word_embeddings=True),
        Qwen2Config(**SMALL),
        Qwen3Config(**SMALL),
    ],
    ids=lambda config: config.model_type,
)
def test_sizes_of_the_file_are_those_of_the_model(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert ModelSizes.from_config(raw, "config.json") == module_sizes(skeleton_causal_lm(tmp_path))


@pytest.mark.parametrize("is_tied", [False, True])
def test_sizes_with_a_value_head_are_those_of_a_critic(is_tied: bool, tmp_path: Path) -> None:
    Qwen2Config(**SMALL, tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    critic = ValueScorer(skeleton_causal_lm(tmp_path))
    predicted = ModelSizes.from_config(raw, "config.json").with_value_head()
    assert predicted == module_sizes(critic.model)


def test_what_is_not_covered_is_named() -> None:
    raw = Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4).to_dict()
    assert ModelSizes.from_config(raw, "config.json").unknown_part == "a mixture of experts"
    raw = {**Qwen3Config(**SMALL).to_dict(), "model_type": "other"}
    assert ModelSizes.from_config(raw, "config.json").unknown_part == "models of the type other"


@pytest.mark.parametrize("value", [None, 0, "48", True])
def test_a_file_without_a_size(value: Any) -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        ModelSizes.from_config({**SMALL, "hidden_size": value}, "model/config.json")
