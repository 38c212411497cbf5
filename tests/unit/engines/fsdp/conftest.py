# SPDX-License-Identifier: Apache-2.0
"""An engine with a random model of a few hundred weights."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config import OptimConfig
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.scorers import PolicyScorer


@pytest.fixture
def make_engine() -> Callable[..., FSDPEngine]:
    def make(
        dtype: torch.dtype = torch.float32,
        scorer=PolicyScorer,
        seed: int = 0,
        optim: OptimConfig | None = None,
    ) -> FSDPEngine:
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=31,
            tie_word_embeddings=True,
        )
        config._attn_implementation = ATTENTION_NAME
        training = Training(
            optim or OptimConfig(weight_decay=0.0), grad_clip=1.0, max_nonfinite_steps=2
        )
        model = LlamaForCausalLM(config).eval()
        return FSDPEngine(scorer(model), dtype=dtype, device=torch.device("cpu"), training=training)

    return make
