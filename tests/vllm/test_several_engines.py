# SPDX-License-Identifier: Apache-2.0
"""Two engines on vLLM behind one rollout, out of the configuration; one of them is killed in the middle of a batch.

What it does not prove: engines on accelerators, which share the memory of the device.
"""

import asyncio
import logging
import os
import signal

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from quadriga.config import load_config
from quadriga.rollout import Balancer
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.weight_sync import CopiedWeights
from quadriga.workers.rollout_engines import make_rollout_engine
from small_models import greedy, model

ROLLOUT = "actor_rollout_ref.rollout"
REQUESTS = [
    ([5 + number, 6, 7], SamplingParams(max_tokens=200, seed=number, ignore_eos=True))
    for number in range(8)
]


def cores() -> set[psutil.Process]:
    return {one for one in psutil.Process().children(recursive=True) if "EngineCore" in one.name()}


def test_requests_are_balanced_and_those_of_an_engine_that_dies_move(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever engine answers, a request has the same answer; new weights reach whoever is left."""
    before = cores()
    options = [
        f"actor_rollout_ref.model.path={folder}",
        "data.max_prompt_length=64",
        "data.max_response_length=256",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.data_parallel_size=2",
        f"{ROLLOUT}.cache_gigabytes=0.03125",
        f"{ROLLOUT}.max_num_seqs=32",
        "trainer.stall_timeout_s=10",
        f"+{ROLLOUT}.engine_kwargs.vllm.block_size=32",
    ]
    config, tokenizer = load_config(options).config, AutoTokenizer.from_pretrained(folder)
    engine = make_rollout_engine(config, tokenizer, device=torch.device("cpu"), dtype=torch.float32)
    weights = CopiedWeights()
    assert isinstance(engine, Balancer) and len(cores() - before) == 2
    assert "requests balanced over 2 engines, each: vllm" in engine.description
    weights.publish(model(0).named_parameters(), engine, 1)

    async def answers(*, kills: bool, by: signal.Signals = signal.SIGKILL) -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(*request)) for request in REQUESTS]
        await asyncio.sleep(0.1)
        # Equal requests: half of the tokens each.
        assert engine.in_flight == [4 * 203, 4 * 203]
        if kills:
            os.kill(min(cores() - before, key=lambda one: one.create_time()).pid, by)
        return await asyncio.wait_for(asyncio.gather(*tasks), 120)

    first, second = asyncio.run(answers(kills=False)), asyncio.run(answers(kills=True))
    assert [one.token_ids for one in second] == [one.token_ids for one in first]
    assert all(len(one.token_ids) == 200 and one.weight_version == 1 for one in second)
    assert engine.alive == [1] and engine.in_flight == [0, 0]
    # Made again in the background; there with the next weights, which it has like the other.
    engine._restarts.wait(120)
    assert not engine.has_frozen_weights and len(cores() - before) == 2
    engine.sleep()
    engine.wake()
    weights.publish(model(1).named_parameters(), engine, 2)
    assert engine.alive == [0, 1] and engine.counts["rollout/engine_restarts"] == 1
    weights.verify(engine, 2)
    likeliest = SamplingParams(max_tokens=20, temperature=0.0)
    prompts = [prompt for prompt, _ in REQUESTS]
    found = engine.generate_batch(prompts, [likeliest] * len(prompts))
    assert [one.token_ids for one in found] == [
        greedy(model(1), prompt, 20)[0] for prompt in prompts
    ]
    # One that is stopped answers no health check: it is killed, and what it was given moves.
    third = asyncio.run(answers(kills=False))
    with caplog.at_level(logging.WARNING):
        fourth = asyncio.run(answers(kills=True, by=signal.SIGSTOP))
    assert [one.token_ids for one in fourth] == [one.token_ids for one in third]
    assert len(engine.alive) == 1 and "has not answered for 10 s, and is killed" in caplog.text
    engine.close()
    assert cores() - before == set()
