# SPDX-License-Identifier: Apache-2.0
"""vLLM in processes of its own: requests that come and go, weights through shared memory, a process that dies."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch

from quadriga.errors import EngineLostError
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights
from small_models import EOS, greedy, model
from small_servers import require_coming_and_going

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [2 + number * 7 % 250 for number in range(200)]]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
LONG = SamplingParams(max_tokens=250, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def others() -> set[psutil.Process]:
    """Processes of vLLM that other tests left open."""
    return _cores()


@pytest.fixture(scope="module")
def engine(others: set[psutil.Process], start) -> Iterator[VLLMEngine]:
    """One engine; the last test ends it."""
    one = start(mode="async")
    CopiedWeights().publish(model(0).named_parameters(), one, 1)
    yield one
    one.close()


def _cores() -> set[psutil.Process]:
    return {one for one in psutil.Process().children(recursive=True) if "EngineCore" in one.name()}


def _require_greedy_of(engine: VLLMEngine, seed: int) -> None:
    for prompt, found in zip(
        PROMPTS, engine.generate_batch(PROMPTS, [GREEDY] * len(PROMPTS)), strict=True
    ):
        tokens, _ = greedy(model(seed), prompt, 20)
        assert (found.token_ids, found.finish_reason) == (
            tokens,
            "stop" if tokens[-1] == EOS else "length",
        )


def test_new_weights_are_used_at_once(engine: VLLMEngine) -> None:
    """They travel in buckets that are smaller than the model, and smaller than its largest weight."""
    for version, seed in enumerate((1, 0), start=2):
        CopiedWeights().publish(model(seed).named_parameters(), engine, version)
        _require_greedy_of(engine, seed)


@pytest.mark.parametrize(
    ("keeps_cache", "size", "is_async"),
    [(False, 1, False), (True, 1, False), (False, 2, False), (False, 1, True), (True, 1, True)],
    ids=[
        "recompute",
        "keep",
        "recompute, two processes",
        "recompute, asynchronous scheduling",
        "keep, asynchronous scheduling",
    ],
)
def test_a_response_under_way_goes_on_with_new_weights(
    keeps_cache: bool,
    size: int,
    is_async: bool,
    others: set[psutil.Process],
    start: Callable[..., VLLMEngine],
    request: pytest.FixtureRequest,
) -> None:
    """Two loads while it is generated: each token has its version, and the log-probability that those weights give it
    after all before it, or with the older KV cache another one. What comes later, or had to wait, is served from none
    of that. So with tensor parallelism, whose processes all report the fingerprints of what came; the loss of one ends
    the engine."""
    if is_async:
        request.getfixturevalue("as_on_cuda")
    kept = f"async_training.kv_on_update={'keep' if keeps_cache else 'recompute'}"
    engine = start(
        max_num_seqs=3, words=("async_training.enable=True", kept), tensor_model_parallel_size=size
    )
    assert engine.core.engine.vllm_config.scheduler_config.async_scheduling == is_async
    copies = {version: model(version) for version in range(3)}

    def load(version: int) -> None:
        CopiedWeights().publish(copies[version].named_parameters(), engine, version)

    engine.between_steps(partial(load, 0), keeps_cache=keeps_cache).result(60)
    prompts, lengths = [PROMPTS[3], *PROMPTS], [100, 250, 250, 250, 100]
    futures = engine.begin(prompts, [replace(LONG, max_tokens=length) for length in lengths])
    for version in (1, 2):
        while max(engine.core.call("drawn_tokens")[0].values(), default=0) < 50 * version:
            time.sleep(0.005)
        assert not all(future.done() for future in futures), "the loads came too late"
        assert engine.between_steps(partial(load, version), keeps_cache=keeps_cache).result(60) == 0
    later = engine.begin([PROMPTS[3]], [GREEDY])[0].result(60)
    assert later.token_ids == greedy(copies[2], PROMPTS[3], 20)[0] and set(later.versions) == {2}
    differences = []
    for prompt, length, future in zip(prompts, lengths, futures, strict=True):
        one = future.result(60)
        assert len(one.token_ids) == len(one.versions) == length and one.versions == sorted(
            one.versions
        )
        with torch.no_grad():
            row = torch.tensor([[*prompt, *one.token_ids]])
            log_probs = [
                copy(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                for copy in copies.values()
            ]
        wanted = torch.stack(log_probs)[
            torch.tensor(one.versions), torch.arange(length), torch.tensor(one.token_ids)
        ]
        differences.append((torch.tensor(one.log_probs) - wanted).abs())
        first = torch.tensor(one.versions) == one.versions[0]
        assert differences[-1][first].max() < 1e-3
    spread = [len(set(future.result().versions)) for future in futures]
    assert 3 in spread, spread
    assert (max(one.max() for one in differences) > 1e-3) == keeps_cache
    if size > 1:
        _require_greedy_of(engine, 2)
        lost = engine.begin([PROMPTS[0]], [LONG])[0]
        [rank] = {
            one
            for one in psutil.Process().children(recursive=True)
            if "TP1" in " ".join(one.cmdline())
        } - others
        rank.kill()
        with pytest.raises(EngineLostError, match="vLLM, which has ended"):
            lost.result(60)
    engine.close()


def test_requests_come_and_go(engine: VLLMEngine) -> None:
    """See `require_coming_and_going`; the engine goes on as before."""
    require_coming_and_going(engine, PROMPTS, LONG, pause_s=0.1)
    _require_greedy_of(engine, 0)


def test_an_engine_that_dies_ends_its_requests_with_the_reason(
    engine: VLLMEngine, others: set[psutil.Process]
) -> None:
    """In the middle of a batch: nobody waits for ever, and later requests are refused as well."""

    async def scene() -> list[Completion | BaseException]:
        tasks = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS[:3]]
        await asyncio.sleep(0.2)
        [core] = _cores() - others
        os.kill(core.pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    results = asyncio.run(scene())
    assert all(
        isinstance(one, EngineLostError) and "vLLM, which has ended" in str(one) for one in results
    ), results
    with pytest.raises(EngineLostError, match="vLLM, which has ended"):
        engine.generate_batch(PROMPTS[:1], [GREEDY])
