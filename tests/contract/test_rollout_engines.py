# SPDX-License-Identifier: Apache-2.0
"""What every rollout engine keeps to. A new engine joins `ENGINES` and gets these tests."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quadriga.errors import RolloutError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.rollout import (
    Completion,
    HFEngine,
    NativeEngine,
    RolloutEngine,
    SamplingParams,
    ScriptedEngine,
)
from quadriga.user_file import load_reference
from quadriga.weight_sync import CopiedWeights, SharedWeights
from quadriga.weight_sync.fingerprint import fingerprint

EOS = 1
EXAMPLE = f"{Path(__file__).parents[2] / 'examples/custom/engine.py'}:BruteForceEngine"
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


class Pairs:
    """A tokenizer whose tokens are two letters each, so that texts span tokens."""

    eos_token_id = EOS

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            chr(ord("a") + token // 8) + chr(ord("a") + token % 8) for token in token_ids
        )


def _script(prompt: list[int]) -> list[int]:
    return [*prompt, 3, EOS]


ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "native": lambda: NativeEngine(_model(ATTENTION_NAME), tokenizer=Pairs()),
    "hf": lambda: HFEngine(_model("sdpa"), tokenizer=Pairs()),
    "scripted": lambda: ScriptedEngine(_script, tokenizer=Pairs()),
    "example": lambda: load_reference(EXAMPLE, "test")(_model("sdpa"), tokenizer=Pairs()),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    """Each engine in turn."""
    return ENGINES[request.param]()


def _params(**options) -> list[SamplingParams]:
    return [
        SamplingParams(**{"max_tokens": 12, "seed": row, **options}) for row in range(len(PROMPTS))
    ]


def test_one_answer_for_each_prompt(engine: RolloutEngine) -> None:
    """Answers hold tokens with a log-probability each, end where they say, and name the weights' version."""
    for completion in engine.generate_batch(PROMPTS, _params()):
        assert 0 < len(completion.token_ids) <= 12
        assert len(completion.log_probs) == len(completion.token_ids)
        assert all(number <= 0 for number in completion.log_probs)
        assert EOS not in completion.token_ids[:-1]
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == EOS)
        assert completion.weight_version == engine.weight_version == 0


@pytest.mark.parametrize("name", ["native", "hf", "scripted"])
def test_each_response_of_a_batch_is_counted_once(name: str) -> None:
    engine = ENGINES[name]()
    counts: list[int] = []
    engine.count_ended = counts.append
    engine.generate_batch(PROMPTS, _params())
    assert sum(counts) == len(PROMPTS)


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
    CopiedWeights().publish(trained.state_dict().items(), engine, version=5)
    assert engine.weight_version == 5
    if dict(engine.named_weights()):
        expected = NativeEngine(trained).generate_batch(PROMPTS, _params())
        found = engine.generate_batch(PROMPTS, _params())
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert found[0].weight_version == 5


def test_what_was_loaded_has_a_fingerprint(engine: RolloutEngine) -> None:
    """It is that of the weights that were sent; one weight that differs shows under its name."""
    weights = {
        name: tensor.detach() for name, tensor in _model(ATTENTION_NAME, seed=1).named_parameters()
    }
    engine.load_weights(weights.items(), 5)
    sent = fingerprint(weights.items())
    arrived = engine.fingerprint()
    assert {name: arrived.tensors[name] for name in sent.tensors} == sent.tensors
    name = "model.norm.weight"
    engine.load_weights(((key, tensor + (key == name)) for key, tensor in weights.items()), 6)
    assert engine.fingerprint().differences(arrived) == [name]


def test_a_text_ends_an_answer(engine: RolloutEngine) -> None:
    """At any place, across two tokens too; the token that completes it is the last one. Other answers go on."""
    free = engine.generate_batch(PROMPTS, _params(ignore_eos=True))
    texts = [Pairs().decode(completion.token_ids) for completion in free]
    stop = texts[0][1:3]  # the end of one token and the beginning of the next
    stopped = engine.generate_batch(PROMPTS, _params(ignore_eos=True, stop=(stop, "no such text")))
    for completion, before, text in zip(stopped, free, texts, strict=True):
        end = len(text) if stop not in text else text.index(stop) + len(stop)
        assert completion.token_ids == before.token_ids[: (end + 1) // 2]
        if stop in text:
            assert completion.finish_reason == "stop"
    assert any(
        len(one.token_ids) < len(other.token_ids) for one, other in zip(stopped, free, strict=True)
    )


def test_a_text_needs_a_tokenizer(engine: RolloutEngine) -> None:
    """Without one the engine refuses and says what to do."""
    engine.tokenizer = None  # type: ignore[attr-defined]
    with pytest.raises(RolloutError, match=r"stop strings, without a tokenizer.*tokenizer="):
        engine.generate_batch(PROMPTS, _params(stop=("x",)))


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"do_sample": False}, {"temperature": 0.0}])
def test_log_probs_of_the_distribution_drawn_from(engine: RolloutEngine, options: dict) -> None:
    """Equal to the others without filters, larger with them, zero where nothing was left to draw."""
    for completion in engine.generate_batch(PROMPTS, _params(**options)):
        assert len(completion.sampling_log_probs) == len(completion.token_ids)
        if not options:
            assert completion.sampling_log_probs == completion.log_probs
        elif "top_k" in options:
            pairs = zip(completion.sampling_log_probs, completion.log_probs, strict=True)
            assert all(0 >= drawn >= plain for drawn, plain in pairs)
        else:
            assert set(completion.sampling_log_probs) == {0.0}


def test_greedy_samples_of_one_prompt_are_equal(engine: RolloutEngine) -> None:
    """Temperature 0 with several samples is no error: seeds change nothing."""
    params = [SamplingParams(max_tokens=6, temperature=0.0, seed=seed) for seed in range(3)]
    assert (
        len({tuple(one.token_ids) for one in engine.generate_batch([PROMPTS[0]] * 3, params)}) == 1
    )


def test_requests_that_wait_are_given_up(engine: RolloutEngine) -> None:
    """After `abort` each caller has an answer, finished or marked as given up; the engine goes on afterwards."""

    async def ask() -> list[Completion]:
        params = _params(max_tokens=1500, ignore_eos=True)
        tasks = [
            asyncio.ensure_future(engine.generate(*request))
            for request in zip(PROMPTS, params, strict=True)
        ]
        await asyncio.sleep(0)  # they have asked, and nobody had the time to answer
        engine.abort()
        return await asyncio.gather(*tasks)

    for completion in asyncio.run(ask()):
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) == len(completion.log_probs) < 1500
    assert {one.finish_reason for one in engine.generate_batch(PROMPTS, _params())} <= {
        "stop",
        "length",
    }


def test_a_cancelled_caller_does_not_disturb_the_others(engine: RolloutEngine) -> None:
    """Who is cancelled gets nothing; the others get what they would get anyway."""

    async def ask() -> list[Completion | BaseException]:
        tasks = [
            asyncio.ensure_future(engine.generate(*one))
            for one in zip(PROMPTS, _params(), strict=True)
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(ask())
    expected = engine.generate_batch(PROMPTS, _params())
    assert isinstance(answers[1], asyncio.CancelledError)
    for row in (0, 2, 3):
        answer = answers[row]
        assert isinstance(answer, Completion)
        assert answer.token_ids == expected[row].token_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": False},
        {"temperature": 0.5, "top_p": 0.7},
        {"top_k": 3, "ignore_eos": True},
    ],
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
