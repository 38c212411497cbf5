# SPDX-License-Identifier: Apache-2.0
"""The parts that compute, on a CUDA device against the same parts on the CPU in float32."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config import ActorConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer, update
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.heads import head_logits
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol import DataProto
from quadriga.rollout import NativeEngine, SamplingParams

pytestmark = pytest.mark.gpu

VOCABULARY, PROMPT, RESPONSE = 97, 6, 5


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    config._attn_implementation = ATTENTION_NAME
    return LlamaForCausalLM(config).eval()


def make_batch() -> DataProto:
    """Three prompts with two answers each."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, VOCABULARY, (3, PROMPT), generator=generator).repeat_interleave(2, 0)
    answers = torch.randint(0, VOCABULARY, (6, RESPONSE), generator=generator)
    attention = torch.ones(6, PROMPT + RESPONSE).long()
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.cat([prompts, answers], 1),
            "attention_mask": attention,
            "position_ids": attention.cumsum(-1) - 1,
            "responses": answers,
            "response_mask": attention[:, PROMPT:],
            "advantages": torch.randn(6, 1, generator=generator).expand(6, RESPONSE).contiguous(),
        }
    )


def make_engine(device: str) -> FSDPEngine:
    training = Training(OptimConfig(eps=1e-3), grad_clip=1.0, max_nonfinite_steps=3)
    model = make_model().to(device)
    return FSDPEngine(
        PolicyScorer(model), dtype=torch.float32, device=torch.device(device), training=training
    )


def test_an_update_on_the_device_is_the_one_on_the_cpu() -> None:
    """Log-probs before and after three optimizer steps. Does not show it in bfloat16, nor for more than one device."""
    results = []
    for device in ("cpu", "cuda"):
        engine = make_engine(device)
        for _ in range(3):
            update(
                engine,
                make_batch(),
                PolicyObjective(ActorConfig()),
                Passes(6, 1, MicroBatching(None, 20)),
                lr=1e-3,
            )
        results.append(infer(engine, make_batch(), MicroBatching(4, 1))["log_probs"])
    torch.testing.assert_close(results[0], results[1], atol=1e-3, rtol=1e-3)


def test_greedy_answers_agree() -> None:
    """Token by token. Does not show it for long answers, where a tie may fall on the other side."""
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3]]
    sampling = [SamplingParams(max_tokens=8, do_sample=False, seed=seed) for seed in range(3)]
    answers = [
        [
            completion.token_ids
            for completion in NativeEngine(
                make_model().to(device), eos_token_ids=()
            ).generate_batch(prompts, sampling)
        ]
        for device in ("cpu", "cuda")
    ]
    assert answers[0] == answers[1]


def test_bfloat16_logits_are_float32_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 64, generator=generator).bfloat16()
    weight = torch.randn(VOCABULARY, 64, generator=generator).bfloat16()
    exact = hidden.double() @ weight.double().t()
    logits = head_logits(hidden.cuda(), weight.cuda()).cpu()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=1e-4)
