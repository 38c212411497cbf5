# SPDX-License-Identifier: Apache-2.0
"""What every rollout engine keeps to. A new engine joins `ENGINES` and gets these tests."""

import asyncio
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quadriga.errors import RolloutError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.rollout import Completion, HFEngine, NativeEngine, RolloutEngine, SamplingParams, ScriptedEngine
from quadriga.weight_sync import InProcessWeights, SharedWeights

EOS = 1
PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13]]


def _model(attention: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    config._attn_implementation = attention
    return LlamaForCausalLM(config).eval()


def _script(prompt: list[int]) -> list[int]:
    return [*prompt, 3, EOS]


ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "native": lambda: NativeEngine(_model(ATTENTION_NAME)),
    "hf": lambda: HFEngine(_model("sdpa")),
    "scripted": lambda: ScriptedEngine(_script),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    """Each engine in turn."""
    return ENGINES[request.param]()


def _params(**options) -> list[SamplingParams]:
    return [SamplingParams(**{"max_tokens": 12, "seed": row, **options}) for row in range(len(PROMPTS))]


def test_one_answer_for_each_prompt(engine: RolloutEngine) -> None:
    """Answers hold tokens with a log-probability each, end where they say, and name the weights' version."""
    for completion in engine.generate_batch(PROMPTS, _params()):
        assert 0 < len(completion.token_ids) <= 12
        assert len(completion.log_probs) == len(completion.token_ids)
        assert all(number <= 0 for number in completion.log_probs)
        assert EOS not in completion.token_ids[:-1]
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == EOS)
        assert completion.weight_version == engine.weight_version == 0


def test_seeds_decide(engine: RolloutEngine) -> None:
    """The same seeds give the same answers, together and one by one."""
    together = engine.generate_batch(PROMPTS, _params())
    assert engine.generate_batch(PROMPTS, _params()) == together
    for prompt, params, completion in zip(PROMPTS, _params(), together, strict=True):
        assert engine.generate_batch([prompt], [params])[0].token_ids == completion.token_ids


def test_awaiting_is_the_same(engine: RolloutEngine) -> None:
    """`generate` gives what `generate_batch` gives."""

    async def ask() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, PROMPTS, _params()))

    answers = asyncio.run(ask())
    expected = engine.generate_batch(PROMPTS, _params())
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]


def test_max_tokens(engine: RolloutEngine) -> None:
    """Each request has its own, down to one."""
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 2, 3, 2)]
    completions = engine.generate_batch(PROMPTS, params)
    assert [len(completion.token_ids) for completion in completions] == [1, 2, 3, 2]
    assert {completion.finish_reason for completion in completions} <= {"length", "stop"}


def test_nothing_asked(engine: RolloutEngine) -> None:
    """No prompts, no answers."""
    assert engine.generate_batch([], []) == []


def test_asleep_and_awake(engine: RolloutEngine) -> None:
    """An engine asleep refuses; awake again it answers as before; closed it refuses for good."""
    before = engine.generate_batch(PROMPTS, _params())
    engine.sleep()
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate_batch(PROMPTS, _params())
    engine.wake()
    assert engine.generate_batch(PROMPTS, _params()) == before
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.generate_batch(PROMPTS, _params())


def test_published_weights_arrive(engine: RolloutEngine) -> None:
    """Afterwards the engine holds the version and, if it has weights, answers as a model with them does."""
    trained = _model(ATTENTION_NAME, seed=1)
    InProcessWeights().publish(trained.state_dict().items(), engine, version=5)
    assert engine.weight_version == 5
    if dict(engine.named_weights()):
        expected = NativeEngine(trained).generate_batch(PROMPTS, _params())
        found = engine.generate_batch(PROMPTS, _params())
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert found[0].weight_version == 5


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": False}, {"temperature": 0.5, "top_p": 0.7}, {"top_k": 3, "ignore_eos": True}],
)
def test_native_and_reference_agree(options: dict) -> None:
    """The same seeds, settings and weights give the same tokens and log-probabilities in both engines."""
    native = ENGINES["native"]().generate_batch(PROMPTS, _params(**options))
    reference = ENGINES["hf"]().generate_batch(PROMPTS, _params(**options))
    for one, other in zip(native, reference, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=2e-5, rtol=1e-5)


def test_the_trainers_module_needs_no_copy() -> None:
    """Weights shared with the native engine are published by their version alone, and what is trained is generated."""
    model = _model(ATTENTION_NAME)
    engine = NativeEngine(model)
    before = engine.generate_batch(PROMPTS, _params(do_sample=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    SharedWeights().publish(model.named_parameters(), engine, version=1)
    after = engine.generate_batch(PROMPTS, _params(do_sample=False))
    assert after[0].weight_version == 1
    assert [one.token_ids for one in after] != [one.token_ids for one in before]
