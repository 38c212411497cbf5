# SPDX-License-Identifier: Apache-2.0
"""Models that do not fit a run's processes or sequences are refused by their configurations alone."""

from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig

from quadriga.config import Config
from quadriga.errors import ConfigError
from quadriga.workers.model_fit import check_models, layout_tables


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64
    ).save_pretrained(tmp_path / "llama")
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    return tmp_path


def config(folder: Path, model: str = "llama", processes: int = 4, length: int = 32, **sizes: int) -> Config:
    return Config(
        data={"max_prompt_length": length, "max_response_length": 32},
        actor_rollout_ref={"model": {"path": str(folder / model)}, "actor": sizes},
        trainer={"backend": "ray", "n_gpus_per_node": processes},
    )


def test_models_that_fit(folder: Path) -> None:
    check_models(config(folder, tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    check_models(config(folder, "gpt2", processes=2))


def test_sequences_longer_than_the_positions(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 65 tokens, expected at most 64"):
        check_models(config(folder, length=33))


def test_heads_that_cannot_be_shared(folder: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaConfig: got 4 heads and 2 key-value heads for tensor"):
        check_models(config(folder, tensor_model_parallel_size=4))


def test_an_architecture_without_a_plan_for_tensor_parallelism(folder: Path) -> None:
    with pytest.raises(ConfigError, match="GPT2Config: got an architecture without a plan"):
        check_models(config(folder, "gpt2", tensor_model_parallel_size=2))


def test_tables_are_told_of_sections_with_several_processes(folder: Path) -> None:
    (actor, *_) = layout_tables(config(folder, tensor_model_parallel_size=2))
    assert "actor_rollout_ref.actor: 2 processes with a share of each weight, 2 processes for a layer" in actor
    assert list(layout_tables(config(folder, processes=1))) == []
