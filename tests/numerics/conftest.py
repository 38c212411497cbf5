# SPDX-License-Identifier: Apache-2.0
"""A tiny random model and a ragged batch of answers in groups, for tests that compare numbers."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quadriga.models.attention import ATTENTION_NAME
from quadriga.protocol import DataProto

VOCABULARY, PROMPT_WIDTH, RESPONSE_WIDTH = 97, 9, 7


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """The same random Llama at each call, with grouped heads and tied embeddings."""

    def make(attention: str = ATTENTION_NAME) -> PreTrainedModel:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            tie_word_embeddings=True,
        )
        config._attn_implementation = attention
        return LlamaForCausalLM(config).eval()

    return make


@pytest.fixture
def batch(make_batch: Callable[[], DataProto]) -> DataProto:
    """The batch of `make_batch`."""
    return make_batch()


@pytest.fixture(scope="session")
def make_batch() -> Callable[[], DataProto]:
    """At each call the same four prompts with three answers each, all lengths ragged; one prompt's answers have no
    advantage."""
    return ragged_batch


def ragged_batch() -> DataProto:
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size or (1,), generator=generator)

    rows = []
    for _ in range(4):
        prompt = draw(0, VOCABULARY, int(draw(2, PROMPT_WIDTH + 1)))
        for _ in range(3):
            rows.append((prompt, draw(0, VOCABULARY, int(draw(1, RESPONSE_WIDTH + 1)))))
    width = PROMPT_WIDTH + RESPONSE_WIDTH
    input_ids, attention = (
        torch.zeros(len(rows), width).long(),
        torch.zeros(len(rows), width).long(),
    )
    for row, (prompt, answer) in enumerate(rows):
        span = slice(PROMPT_WIDTH - len(prompt), PROMPT_WIDTH + len(answer))
        input_ids[row, span] = torch.cat([prompt, answer])
        attention[row, span] = 1
    mask = attention[:, PROMPT_WIDTH:]
    advantages = torch.randn(len(rows), 1, generator=generator) * mask
    advantages[3:6] = 0
    noise = torch.randn(2, *mask.shape, generator=generator) * 0.2
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": input_ids[:, PROMPT_WIDTH:],
            "response_mask": mask,
            "advantages": advantages,
            "old_log_probs": noise[0] - 4.6,
            "ref_log_prob": noise[1] - 4.6,
        }
    )
