# SPDX-License-Identifier: Apache-2.0
"""A model of a few hundred weights on disk, and a batch of answers with advantages."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quadriga.config import Config
from quadriga.protocol import DataProto

VOCABULARY = 23


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w2"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="w0", eos_token="w1", unk_token="w2"
    )


@pytest.fixture
def config(model_path: Path) -> Config:
    """Two prompts with two answers each, one update a batch, everything in float32 on the CPU."""
    role = {
        "ppo_mini_batch_size": 2,
        "fsdp_config": {"model_dtype": "float32"},
        "optim": {"lr": 1e-2},
    }
    return Config(
        data={"train_batch_size": 2, "max_prompt_length": 4, "max_response_length": 5},
        actor_rollout_ref={"model": {"path": str(model_path)}, "actor": role, "rollout": {"n": 2}},
        critic=role,
        trainer={"device": "cpu"},
    )


@pytest.fixture
def prompts() -> DataProto:
    """Two prompts of 2 and 4 tokens, each twice."""
    input_ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 3]]).repeat_interleave(2, 0)
    attention = (input_ids != 0).long()
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        },
        non_tensors={"uid": np.array(["p", "p", "q", "q"], dtype=object)},
        meta_info={"global_steps": 1},
    )
