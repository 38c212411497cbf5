# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process: what it answers, what its numbers mean, and that new weights are new weights."""

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.vllm.cores import InProcessCore, ProcessCore
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.rollout.vllm.library import require_version
from quadriga.weight_sync import CopiedWeights
from small_models import EOS, greedy, model, save
from vllm_contract import missing_names, reader_of

LONG = [2 + number * 7 % 250 for number in range(200)]
PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13], LONG]


@pytest.fixture(scope="module")
def engine(start) -> Iterator[VLLMEngine]:
    """One engine for all tests; each that needs certain weights publishes them."""
    one = start()
    _publish(one, 0)
    yield one
    one.close()


@pytest.fixture(scope="module")
def filtering(start) -> Iterator[VLLMEngine]:
    """One that reports the model's own log-probabilities."""
    one = start(extra={"logprobs_mode": "raw_logprobs"})
    yield one
    one.close()


def _params(**changes: Any) -> list[SamplingParams]:
    return [
        SamplingParams(**{"max_tokens": 24, "seed": 11 * row, **changes})
        for row in range(len(PROMPTS))
    ]


def _publish(engine: VLLMEngine, seed: int, version: int = 1) -> None:
    CopiedWeights().publish(model(seed).named_parameters(), engine, version)


def _require_greedy_of(engine: VLLMEngine, reference: Any) -> None:
    for prompt, found in zip(
        PROMPTS, engine.generate_batch(PROMPTS, _params(temperature=0.0)), strict=True
    ):
        tokens, log_probs = greedy(reference, prompt, 24)
        assert found.token_ids == tokens
        assert (found.finish_reason == "stop") == (tokens[-1] == EOS)
        torch.testing.assert_close(found.log_probs, log_probs, atol=2e-4, rtol=0)


def test_greedy_is_transformers(engine: VLLMEngine) -> None:
    """Tokens equal, log-probabilities close, in float32. It does not prove anything about bfloat16 or accelerators."""
    _publish(engine, 0)
    _require_greedy_of(engine, model(0))


def test_new_weights_are_used_at_once(engine: VLLMEngine) -> None:
    """There and back: the tied head, prompts of several cache blocks, and the layers that a CPU packs."""
    for version, seed in enumerate((1, 0, 1), start=1):
        _publish(engine, seed, version)
        _require_greedy_of(engine, model(seed))
        assert engine.weight_version == version


def test_a_head_of_its_own(start, tmp_path) -> None:
    """A model whose head is not tied, started without weights."""
    own = model(0, is_tied=False)
    engine = start(path=save(own, tmp_path))
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch(PROMPTS, _params())
    trained = model(3, is_tied=False)
    CopiedWeights().publish(trained.named_parameters(), engine, 1)
    _require_greedy_of(engine, trained)
    engine.close()


def test_a_sampled_token_has_the_log_probability_of_training(engine: VLLMEngine) -> None:
    """At temperature 0.7 it is that of the logits divided by 0.7."""
    _publish(engine, 0)
    for prompt, found in zip(
        PROMPTS, engine.generate_batch(PROMPTS, _params(temperature=0.7)), strict=True
    ):
        row = torch.tensor([prompt + found.token_ids])
        with torch.no_grad():
            scaled = (model(0)(row).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        expected = scaled.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0].tolist()
        torch.testing.assert_close(found.log_probs, expected, atol=3e-4, rtol=0)
        assert found.sampling_log_probs == found.log_probs


def test_filters_and_their_log_probabilities(engine: VLLMEngine, filtering: VLLMEngine) -> None:
    """After a filter vLLM reports one of the two distributions; the other number is not made up."""
    _publish(engine, 0)
    _publish(filtering, 0)
    after = engine.generate_batch(PROMPTS, _params(top_k=3))
    before = filtering.generate_batch(PROMPTS, _params(top_k=3))
    for one, other in zip(after, before, strict=True):
        assert one.token_ids == other.token_ids
        assert all(map(math.isnan, one.log_probs))
        assert other.sampling_log_probs == []
        assert all(
            drawn >= full - 1e-4
            for drawn, full in zip(one.sampling_log_probs, other.log_probs, strict=True)
        )
        assert sum(one.sampling_log_probs) > sum(other.log_probs)


def test_seeds_decide(engine: VLLMEngine) -> None:
    """The same seeds give the same answers, together, alone and in another order; other seeds give others."""
    _publish(engine, 0)
    together = [one.token_ids for one in engine.generate_batch(PROMPTS, _params())]
    backwards = engine.generate_batch(PROMPTS[::-1], _params()[::-1])
    assert [one.token_ids for one in backwards[::-1]] == together
    for prompt, params, tokens in zip(PROMPTS, _params(), together, strict=True):
        assert engine.generate_batch([prompt], [params])[0].token_ids == tokens
    assert together[0] != together[2]


def test_equal_greedy_answers(engine: VLLMEngine) -> None:
    """Several answers at temperature 0 to one prompt are equal, whatever their seeds."""
    answers = engine.generate_batch([PROMPTS[0]] * 4, _params(temperature=0.0)[:4])
    assert len({tuple(one.token_ids) for one in answers}) == 1


def test_a_stop_text_that_spans_tokens(engine: VLLMEngine, folder: str) -> None:
    """The answer keeps the token that completes it and ends there."""
    _publish(engine, 0)
    plain = engine.generate_batch([LONG], [SamplingParams(max_tokens=24, seed=3, ignore_eos=True)])[
        0
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop = tokenizer.decode(plain.token_ids[6:9])
    ended = engine.generate_batch(
        [LONG], [SamplingParams(max_tokens=24, seed=3, ignore_eos=True, stop=(stop,))]
    )[0]
    assert (ended.token_ids, ended.finish_reason) == (plain.token_ids[:9], "stop")
    assert len(ended.log_probs) == 9


def test_stop_tokens(engine: VLLMEngine) -> None:
    """A stop token is the last one, and the model's own ends nothing where it is ignored."""
    _publish(engine, 0)
    plain = engine.generate_batch([LONG], [SamplingParams(max_tokens=40, seed=5, ignore_eos=True)])[
        0
    ]
    assert (len(plain.token_ids), plain.finish_reason) == (40, "length")
    token = plain.token_ids[7]
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, stop_token_ids=(token,))
    ended = engine.generate_batch([LONG], [params])[0]
    assert ended.token_ids == plain.token_ids[: plain.token_ids.index(token) + 1]
    assert ended.finish_reason == "stop"


def test_a_prompt_that_is_too_long(engine: VLLMEngine) -> None:
    """It is refused before vLLM sees it, with the limit."""
    _publish(engine, 0)
    with pytest.raises(
        RolloutError, match=r"prompt 1: got 310 prompt tokens and up to 24.*at most 320"
    ):
        engine.generate_batch([[5], [5] * 310], _params()[:2])


class Meddling(VLLMEngine):
    """Changes one number of one weight on its way."""

    def _make_core(self) -> InProcessCore | ProcessCore:
        core = super()._make_core()
        plain = core.ask

        def ask(method: str, *args: Any, **given: Any) -> Any:
            for name, tensor in given["args"][0] if args[:1] == ("load_bucket",) else ():
                if name == "model.layers.1.mlp.down_proj.weight":
                    tensor[3, 5] += 1e-3
            return plain(method, *args, **given)

        core.ask = ask  # pyrefly: ignore[bad-assignment]
        return core


def test_one_number_changed_on_the_way_is_seen(start) -> None:
    """The error names the tensor, and the engine generates nothing with it."""
    engine = start(Meddling)
    with pytest.raises(
        WeightSyncError, match=r"1 of \d+ weights that differ: model.layers.1.mlp.down_proj.weight"
    ):
        _publish(engine, 1)
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch(PROMPTS, _params())
    engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[:-3], "a stream without 3 of"),
        (lambda pairs: [*pairs, ("model.extra", torch.zeros(2))], "weight model.extra"),
        (lambda pairs: [(pairs[0][0], torch.zeros(3)), *pairs[1:]], "expected shape"),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_an_incomplete_stream_is_refused_and_the_next_one_is_fine(
    engine: VLLMEngine, change, message: str
) -> None:
    """vLLM would go on with what it has; we do not."""
    pairs = [(name, tensor.detach()) for name, tensor in model(1).named_parameters()]
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights(change(pairs), 4)
    assert engine.weight_version == -1
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch(PROMPTS, _params())
    engine.load_weights(pairs, 5)
    _require_greedy_of(engine, model(1))


def test_nan_weights_are_an_error_and_leave_nothing_behind(engine: VLLMEngine) -> None:
    """What they left in the cache does not reach the answers of good weights."""
    bad = [
        (name, torch.full_like(tensor, torch.nan).detach())
        for name, tensor in model(0).named_parameters()
    ]
    engine.load_weights(bad, 1)
    with pytest.raises(RolloutError, match="not a number"):
        engine.generate_batch(PROMPTS, _params())
    _publish(engine, 0, 2)
    _require_greedy_of(engine, model(0))


def test_abort_gives_what_there_is(engine: VLLMEngine) -> None:
    """From another thread: every unfinished answer ends with the tokens that it has."""
    _publish(engine, 0)
    found: list[Any] = []
    params = [SamplingParams(max_tokens=300, seed=row, ignore_eos=True) for row in range(16)]
    thread = threading.Thread(
        target=lambda: found.extend(engine.generate_batch([[5, 6]] * 16, params))
    )
    thread.start()
    states = engine.core.engine.output_processor.request_states  # pyrefly: ignore[missing-attribute]
    while thread.is_alive() and not any(
        one.detokenizer.num_output_tokens() for one in list(states.values())
    ):
        time.sleep(0.01)
    engine.abort()
    thread.join(30)
    assert {one.finish_reason for one in found} == {"abort"}
    assert 0 < max(len(one.token_ids) for one in found) < 300
    _require_greedy_of(engine, model(0))


def test_asleep(engine: VLLMEngine) -> None:
    """It refuses, and is the same afterwards."""
    _publish(engine, 0)
    engine.sleep()
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate_batch(PROMPTS, _params())
    _publish(engine, 1)
    engine.wake()
    _require_greedy_of(engine, model(1))


def test_what_is_awake_is_not_woken_again(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own executor says what sleeps; on a CPU it moves no memory, which only tests/gpu can show. An accelerator
    that maps memory twice stops there."""
    asked: list[tuple[str, Any]] = []
    plain = engine.core.ask

    def ask(method: str, *args: Any, **options: Any) -> Any:
        if method in ("sleep", "wake_up"):
            asked.append((method, options))
        return plain(method, *args, **options)

    monkeypatch.setattr(engine.core, "ask", ask)
    monkeypatch.setattr(engine.memory, "can_sleep", True)
    executor = engine.core.engine.engine_core.engine_core.model_executor  # pyrefly: ignore[missing-attribute]
    _publish(engine, 0)
    engine.sleep()
    assert executor.sleeping_tags == {"weights", "kv_cache"}
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate_batch(PROMPTS, _params())
    _publish(engine, 1)
    assert executor.sleeping_tags == {"kv_cache"} and not engine.has_dropped_weights
    engine.wake()
    engine.wake()
    assert executor.sleeping_tags == set()
    _require_greedy_of(engine, model(1))
    assert asked == [
        ("sleep", {"level": 2}),
        ("wake_up", {"tags": ["weights"]}),
        ("wake_up", {"tags": ["kv_cache"]}),
    ]
    # Woken without new weights it has none.
    engine.sleep()
    engine.wake()
    assert engine.has_dropped_weights
    with pytest.raises(RolloutError, match="dropped its weights in its sleep"):
        engine.generate_batch(PROMPTS, _params())
    _publish(engine, 0)
    _require_greedy_of(engine, model(0))


def test_it_starts_as_it_generates(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled and captured at the start is what generates: otherwise the first request compiles. And vLLM is
    on the device of the process, where that sees others; of CPUs there is one, whatever its number."""
    stances: list[str] = []
    kind = engine.library.module.LLMEngine
    plain = kind.__init__

    def init(*args: Any, **options: Any) -> None:
        stances.append(torch._dynamo.eval_frame._stance.stance)
        plain(*args, **options)

    monkeypatch.setattr(kind, "__init__", init)
    with torch.compiler.set_stance("eager_on_recompile"):  # neither of the two
        for is_eager in (True, False):
            changes = {"enforce_eager": is_eager, "compilation_config": {"mode": 0}}
            core = InProcessCore(engine.library, engine.arguments | changes, torch.device("cpu", 1))
            assert (
                core.engine.engine_core.engine_core.model_executor.driver_worker.worker.local_rank
                == 1
            )
            core.close()
    assert stances == ["force_eager", "default"]


def test_without_seeds_of_their_own(start) -> None:
    """The batch has a seed: it is drawn again alike, and the trainer's random numbers are not touched."""
    engine = start(request_seeds=False)
    try:
        _publish(engine, 0)
        before = torch.get_rng_state()
        first, second = (engine.generate_batch(PROMPTS, _params()) for _ in range(2))
        assert [one.token_ids for one in first] == [one.token_ids for one in second]
        assert first[0].token_ids != first[2].token_ids
        assert torch.equal(torch.get_rng_state(), before)
        others = engine.generate_batch(
            PROMPTS, [SamplingParams(max_tokens=24, seed=7)] * len(PROMPTS)
        )
        assert [one.token_ids for one in others] != [one.token_ids for one in first]
    finally:
        engine.close()


def test_the_module_that_is_rebuilt_is_counted(engine: VLLMEngine) -> None:
    """The largest module, the embedding, beside the first weight that arrives after it."""
    _publish(engine, 0)
    assert engine.rebuilt == ((256 + 64) * 64 * 4, "model.layers.0.self_attn.q_proj")


def test_private_parts_are_there(engine: VLLMEngine) -> None:
    """This version still has what is used of it beyond its public interface."""
    assert engine.missing_parts == []
    folder = Path(engine.library.module.__file__).parents[1]
    assert missing_names(reader_of(folder)) == {}


def test_bad_settings_are_told_in_vllms_words(start) -> None:
    """A cache that one sequence does not fit into, and an option that does not exist."""
    with pytest.raises(RolloutError, match=r"at its start.*cache") as caught:
        start(cache_gigabytes=2**-15)
    assert "cache_gigabytes" in str(caught.value)
    with pytest.raises(RolloutError, match=r"no_such_option"):
        start(extra={"no_such_option": 1})


@pytest.mark.parametrize("found", ["", "0.29.3"])
def test_versions_that_are_refused(found: str) -> None:
    """None, and one that is too old."""
    with pytest.raises(RolloutError, match=r"0\.30 or newer"):
        require_version(found)


def test_more_prompts_than_one_pass_holds(start) -> None:
    """Requests with seeds, of which vLLM would cut some at the end of a pass, and then fail on a CPU."""
    engine = start(max_num_seqs=8, max_num_batched_tokens=64)
    try:
        _publish(engine, 0)
        requests = [
            (LONG[row:], SamplingParams(max_tokens=4, seed=row, ignore_eos=True, temperature=0.7))
            for row in range(5)
        ]
        together = engine.generate_batch(*zip(*requests, strict=True))
        for (prompt, params), found in zip(requests, together, strict=True):
            assert engine.generate_batch([prompt], [params])[0].token_ids == found.token_ids
    finally:
        engine.close()
