# SPDX-License-Identifier: Apache-2.0
"""The native engine under way: requests that join and leave, a cache that is too small, weights that change, errors."""

import asyncio
import copy
import threading
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quadriga.errors import RolloutError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.rollout import Completion, NativeEngine, SamplingParams
from quadriga.rollout.native.generation import Generation
from quadriga.rollout.native.network import Network, PlainNetwork
from quadriga.rollout.native.products import Weight, can_pack
from quadriga.rollout.native.scheduler import Scheduler
from tests.limits import SOON_S

VOCABULARY = 199
PROMPTS = [
    [5, 6, 7, 8],
    [9],
    [5, 6, 7, 8],
    [10, 11, 12],
    [13, 14, 15, 16, 17, 18, 19],
    [9],
    [20, 21],
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A random model, confident enough that answers differ by prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        initializer_range=0.1,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    config._attn_implementation = ATTENTION_NAME
    return LlamaForCausalLM(config).eval()


def _params(max_tokens: int = 40) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=max_tokens + row, seed=row, ignore_eos=row % 2 == 0)
        for row in range(7)
    ]


def _tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_requests_join_while_others_run(model: PreTrainedModel) -> None:
    """In float32 the tokens are those of one batch, whenever a request came; the event loop turns meanwhile."""
    expected = _tokens(NativeEngine(model).generate_batch(PROMPTS, _params()))
    engine = NativeEngine(model, max_num_seqs=5)

    async def ask() -> tuple[list[list[int]], int]:
        tasks, turns = [], 0
        for prompt, params in zip(PROMPTS, _params(), strict=True):
            tasks.append(asyncio.ensure_future(engine.generate(prompt, params)))
            await asyncio.sleep(0.01)
        while not all(task.done() for task in tasks):
            turns += 1
            await asyncio.sleep(0.001)
        return _tokens([task.result() for task in tasks]), turns

    found, turns = asyncio.run(ask())
    assert found == expected
    assert turns > 1
    assert _tokens(engine.generate_batch(PROMPTS, _params())) == expected
    engine.close()


def test_abort_and_cancel_under_way(model: PreTrainedModel) -> None:
    """What was generated before is the beginning of the whole answer; a cancelled caller leaves the batch."""
    params = SamplingParams(max_tokens=500, seed=3, ignore_eos=True)
    whole = NativeEngine(model).generate_batch([[5, 6]], [params])[0]
    engine = NativeEngine(model)

    async def ask() -> Completion:
        kept = asyncio.ensure_future(engine.generate([5, 6], params))
        left = asyncio.ensure_future(engine.generate([7], params))
        while not (engine._inbox.taken and len(engine._inbox.taken[0].token_ids) > 5):
            await asyncio.sleep(0.001)
        left.cancel()
        while len(engine._inbox.taken) > 1:
            await asyncio.sleep(0.001)
        with pytest.raises(
            RolloutError, match="load_weights: got 1 responses that are not finished"
        ):
            engine.load_weights(model.state_dict().items(), 2)
        engine.abort()
        return await kept

    completion = asyncio.run(ask())
    assert completion.finish_reason == "abort"
    assert 5 < len(completion.token_ids) < 500
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    engine.sleep()
    engine.wake()
    assert engine.generate_batch([[5, 6]], [params])[0] == whole


@pytest.mark.parametrize("max_cache_tokens", [200, 330, 500])
def test_a_small_cache_changes_no_token(
    model: PreTrainedModel, max_cache_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows give way and go on later; in float32 nobody sees it. The cache never holds more than it may."""
    expected = NativeEngine(model).generate_batch(PROMPTS, _params(150))
    engine = NativeEngine(
        model,
        cache_gigabytes=max_cache_tokens * NativeEngine(model).cache_memory.token_bytes / 2**30,
    )
    num_preempted, sizes = 0, []
    step, preempt = Generation._decode_step, Scheduler.preempt

    def counting_preempt(self):
        nonlocal num_preempted
        num_preempted += 1
        return preempt(self)

    def measuring_step(self: Generation) -> None:
        step(self)
        tensors = (
            *self.responses.keys,
            *self.responses.values,
            *self.prefixes.keys,
            *self.prefixes.values,
        )
        sizes.append(
            sum(tensor.nbytes for tensor in tensors) / NativeEngine(model).cache_memory.token_bytes
        )

    monkeypatch.setattr(Scheduler, "preempt", counting_preempt)
    monkeypatch.setattr(Generation, "_decode_step", measuring_step)
    found = engine.generate_batch(PROMPTS, _params(150))
    assert _tokens(found) == _tokens(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=2e-5, rtol=1e-5)
    assert max(sizes) <= max_cache_tokens
    assert num_preempted > 0


def test_a_cache_too_small_for_one_sequence(model: PreTrainedModel) -> None:
    """The error says how much there is, how much a token takes, and which key to raise; so does the length limit."""
    engine = NativeEngine(
        model, cache_gigabytes=50.5 * NativeEngine(model).cache_memory.token_bytes / 2**30
    )
    with pytest.raises(
        RolloutError,
        match=r"prompt 0: got 4 prompt tokens and up to 47 .* at most 50.*cache_gigabytes",
    ):
        engine.generate_batch([[1, 2, 3, 4]], [SamplingParams(max_tokens=47)])
    assert len(engine.generate_batch([[1, 2, 3, 4]], [SamplingParams(max_tokens=46)])) == 1
    short = NativeEngine(model, max_model_len=16)
    with pytest.raises(
        RolloutError, match=r"prompt 1: got 9 prompt tokens.* at most 16 together .*max_model_len"
    ):
        short.generate_batch([[1], [2] * 9], [SamplingParams(max_tokens=8)] * 2)


def test_an_engine_that_dies_in_the_middle(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everyone who waits gets the error; the engine answers again once its cause is gone."""
    engine, calls = NativeEngine(model), []
    logits = Network.logits

    def breaking(self: Network, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        if len(calls) == 6:
            raise RuntimeError("out of memory")
        return logits(self, hidden)

    monkeypatch.setattr(Network, "logits", breaking)

    async def ask() -> list[Completion | BaseException]:
        requests = zip(PROMPTS, _params(), strict=True)
        return await asyncio.gather(
            *(engine.generate(*request) for request in requests), return_exceptions=True
        )

    assert [str(error) for error in asyncio.run(ask())] == ["out of memory"] * 7
    again = engine.generate_batch(PROMPTS, _params())
    assert _tokens(again) == _tokens(NativeEngine(model).generate_batch(PROMPTS, _params()))
    calls.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate_batch(PROMPTS, _params())


@pytest.mark.skipif(not can_pack(), reason="this build of torch packs no bfloat16 weights")
def test_packed_weights_follow_the_parameters(model: PreTrainedModel) -> None:
    """In bfloat16 a copy is made of the weights; one that the parameters have left behind is not used."""
    narrow = LlamaForCausalLM(model.config).to(torch.bfloat16).eval()
    narrow.load_state_dict(model.state_dict())
    engine, params = (
        NativeEngine(narrow),
        [SamplingParams(max_tokens=8, seed=row) for row in range(7)],
    )
    before = engine.generate_batch(PROMPTS, params)
    network = engine._network
    assert isinstance(network, PlainNetwork)
    used = network.layers[0].output_projection.weight
    assert isinstance(used, Weight)
    assert ("MKL" in engine.description) == (used.few is not None)
    assert engine.generate_batch(PROMPTS, params) == before
    assert engine._network is network
    with torch.no_grad():
        narrow.model.layers[1].mlp.up_proj.weight.mul_(-3)
    after = engine.generate_batch(PROMPTS, params)
    fresh = NativeEngine(narrow).generate_batch(PROMPTS, params)
    assert after == fresh
    assert after != before


@pytest.mark.parametrize("num_rows", [2, 40], ids=["few", "many"])
def test_the_plain_network_computes_what_the_module_computes(
    model: PreTrainedModel, num_rows: int
) -> None:
    """In bfloat16: log-probabilities of either network for the same tokens differ by rounding."""
    narrow = LlamaForCausalLM(model.config).to(torch.bfloat16).eval()
    narrow.load_state_dict(model.state_dict())
    prompts = [[2 + row, 3, 5] for row in range(num_rows)]
    params = [SamplingParams(max_tokens=6, seed=row, ignore_eos=True) for row in range(num_rows)]
    engines = NativeEngine(narrow), NativeEngine(narrow)
    engines[0]._network, engines[1]._network = PlainNetwork(narrow), Network(narrow)
    plain, module = (engine.generate_batch(prompts, params) for engine in engines)
    pairs = [
        abs(mine - theirs)
        for one, other in zip(plain, module, strict=True)
        for mine, theirs, *tokens in zip(
            one.log_probs, other.log_probs, one.token_ids, other.token_ids, strict=True
        )
        if one.token_ids == other.token_ids and tokens
    ]
    assert len(pairs) >= 6
    assert sum(pairs) / len(pairs) < 0.02


@pytest.mark.parametrize("keeps_cache", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("max_cache_tokens", [None, 330], ids=["room", "a full cache"])
def test_weights_change_between_two_steps(
    model: PreTrainedModel,
    keeps_cache: bool,
    max_cache_tokens: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each token has the version of the weights that drew it, and their log-probability: that of a pass over all tokens
    so far, where the KV cache is computed anew. No prefix of older weights serves a request that comes later.

    It does not prove how far kept entries change what is drawn.
    """
    engine, config = NativeEngine(copy.deepcopy(model)), copy.deepcopy(model.config)
    engine.cache_memory.limit, config._attn_implementation = max_cache_tokens, "sdpa"
    older, newer = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    with torch.no_grad():
        older.load_state_dict(model.state_dict())
        newer.load_state_dict(model.state_dict())
        for parameter in newer.parameters():
            parameter.mul_(1.05)
    reached, advance, count = threading.Event(), Generation.advance, [0]

    def counted(self: Generation, given_up: Any = ()) -> None:
        count[0] += 1
        if count[0] == 12:
            reached.set()
            begun.wait()
        advance(self, given_up)

    begun = threading.Event()
    monkeypatch.setattr(Generation, "advance", counted)
    futures = engine.begin(PROMPTS, _params())
    assert reached.wait(SOON_S)
    done = engine.between_steps(
        lambda: engine.load_weights(newer.named_parameters(), 1), keeps_cache=keeps_cache
    )
    later = engine.begin(PROMPTS, _params())
    begun.set()
    done.result(SOON_S)
    completions = [future.result(SOON_S) for future in (*futures, *later)]
    assert {tuple(sorted(set(one.versions))) for one in completions[:7]} >= {(0, 1)}
    assert all(set(one.versions) == {1} for one in completions[7:])
    for prompt, completion in zip(PROMPTS * 2, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        for version, weights in enumerate((older, newer)):
            with torch.no_grad():
                logits = weights(ids, use_cache=False).logits[0].log_softmax(-1)
            for place, token in enumerate(completion.token_ids):
                if completion.versions[place] == version and not (
                    keeps_cache and completion.versions[0] != version
                ):
                    expected = float(logits[len(prompt) + place - 1, token])
                    assert completion.log_probs[place] == pytest.approx(expected, abs=2e-4)
    engine.close()


def test_an_error_between_two_steps_reaches_every_caller(model: PreTrainedModel) -> None:
    engine = NativeEngine(copy.deepcopy(model))
    futures = engine.begin(PROMPTS, _params())
    done = engine.between_steps(
        lambda: engine.load_weights([("nonsense", torch.zeros(1))], 1), keeps_cache=False
    )
    for future in (done, *futures):
        assert future.exception(60) is not None
    engine.load_weights(model.named_parameters(), 2)
    assert len(engine.generate_batch(PROMPTS, _params())) == 7
    engine.close()
