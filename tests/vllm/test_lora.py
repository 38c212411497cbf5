# SPDX-License-Identifier: Apache-2.0
"""An adapter that vLLM applies beside its weights: what it answers, that each publication is a new one, and refusals."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.models.adapter_files import write_factors
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.vllm.async_engine import AsyncVLLMEngine
from quadriga.rollout.vllm.core import VLLMBase, VLLMOptions
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import InProcessWeights
from small_adapters import adapted, adapter, by_peft, published
from small_models import EOS, greedy, model

LONG = [2 + number * 7 % 250 for number in range(200)]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], LONG]
GREEDY = [SamplingParams(max_tokens=24, temperature=0.0)] * len(PROMPTS)
UP = "model.layers.1.mlp.up_proj.lora_B.default.weight"

Make = Callable[..., VLLMOptions]


@pytest.fixture(scope="module")
def engine(options: Make) -> Iterator[VLLMEngine]:
    """One in this process, with the frozen weights."""
    one = VLLMEngine(options(has_weights=False, adapter=adapter()))
    InProcessWeights().publish(published(adapted(0), with_frozen=True), one, 1)
    yield one
    one.close()


def require_greedy_of(engine: VLLMBase, reference: Any) -> list[list[int]]:
    """Its tokens are the likeliest of the reference."""
    found = engine.generate_batch(PROMPTS, GREEDY)
    for prompt, one in zip(PROMPTS, found, strict=True):
        tokens, log_probs = greedy(reference, prompt, 24)
        assert (one.token_ids, one.finish_reason) == (tokens, "stop" if tokens[-1] == EOS else "length")
        torch.testing.assert_close(one.log_probs, log_probs, atol=3e-4, rtol=0)
    return [one.token_ids for one in found]


def publish(engine: VLLMBase, seed: int, version: int) -> None:
    """The adapter alone."""
    InProcessWeights().publish(published(adapted(seed), with_frozen=False), engine, version)


def test_greedy_is_peft(engine: VLLMEngine, tmp_path: Path) -> None:
    """With several adapters one after the other, packed and plain modules; none of them says what the model says."""
    answers = []
    for version, seed in enumerate((1, 2, 1), start=2):
        publish(engine, seed, version)
        answers.append(require_greedy_of(engine, by_peft(adapted(seed), tmp_path / str(version))))
        assert engine.weight_version == version
    assert answers[0] == answers[2] != answers[1]
    assert answers[0] != [greedy(model(0), prompt, 24)[0] for prompt in PROMPTS]
