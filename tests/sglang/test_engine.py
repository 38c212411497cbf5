# SPDX-License-Identifier: Apache-2.0
"""SGLang's engine beside this process: what it answers, that new weights are new weights, and how it ends."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from quadriga.errors import RolloutError
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.rollout.sglang.connections import SGLangProcess
from quadriga.rollout.sglang.engine import SGLangEngine
from quadriga.rollout.sglang.host import require_version
from quadriga.weight_sync import CopiedWeights
from small_models import greedy, model

LONG = [2 + number * 7 % 250 for number in range(200)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture
def engine(beside: SGLangEngine) -> SGLangEngine:
    """One for all tests; the last one kills it."""
    return beside


def _publish(engine: SGLangEngine, seed: int, version: int) -> None:
    CopiedWeights().publish(model(seed).named_parameters(), engine, version)


def test_abort_from_another_thread(engine: SGLangEngine) -> None:
    """Every unfinished answer of a batch ends with the tokens that it has."""
    _publish(engine, 0, 1)
    params = [SamplingParams(max_tokens=950, ignore_eos=True)] * 16
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(engine.generate_batch, [[5, 6]] * 16, params)
        threading.Event().wait(0.5)
        engine.abort()
        found = batch.result(60)
    assert {one.finish_reason for one in found} == {"abort"}
    assert 0 < max(len(one.token_ids) for one in found) < 950


def test_an_answer_as_long_as_the_limit(engine: SGLangEngine) -> None:
    """Not cut; one token more is refused before SGLang sees it."""
    _publish(engine, 0, 1)
    [found] = engine.generate_batch([LONG], [SamplingParams(max_tokens=800, ignore_eos=True)])
    assert (len(found.token_ids), found.finish_reason) == (800, "length")
    with pytest.raises(RolloutError, match="at most 1000 together"):
        engine.generate_batch([LONG], [SamplingParams(max_tokens=801)])


def test_stop_texts_and_stop_tokens(engine: SGLangEngine, folder: str) -> None:
    """A text that spans tokens is kept with the token that completes it; so is a stop token."""
    _publish(engine, 0, 1)
    plain = engine.generate_batch([LONG], [GREEDY])[0].token_ids
    stop = AutoTokenizer.from_pretrained(folder).decode(plain[6:9])
    for params in (
        replace(GREEDY, stop=(stop,)),
        replace(GREEDY, stop_token_ids=(plain[8],)),
    ):
        [ended] = engine.generate_batch([LONG], [params])
        end = 9 if params.stop else plain.index(plain[8]) + 1
        assert (ended.token_ids, ended.finish_reason) == (plain[:end], "stop")
        assert len(ended.log_probs) == end


def test_asleep(engine: SGLangEngine) -> None:
    """It refuses, takes weights, and uses them when it is awake."""
    _publish(engine, 0, 1)
    engine.sleep()
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate_batch([[5, 6, 7]], [GREEDY])
    _publish(engine, 1, 2)
    engine.wake()
    [found] = engine.generate_batch([LONG], [GREEDY])
    assert found.token_ids == greedy(model(1), LONG, 20)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ignore_eos": True, "stop_token_ids": (5,)}, "ignores stop_token_ids, too"),
        ({"max_tokens": 1000}, "at most 1000 together"),
    ],
)
def test_what_it_cannot_do_is_refused(
    engine: SGLangEngine, changes: dict[str, Any], message: str
) -> None:
    """Instead of doing something else."""
    _publish(engine, 0, 1)
    with pytest.raises(RolloutError, match=message):
        engine.generate_batch([[5]], [replace(GREEDY, **changes)])


@pytest.mark.parametrize("found", ["", "0.5.22"])
def test_versions_that_are_refused(found: str) -> None:
    """None, and one that is too old."""
    with pytest.raises(RolloutError, match=r"0\.5\.23 or newer"):
        require_version(found)


def test_bad_settings_are_told_in_sglangs_words(arguments: dict[str, Any]) -> None:
    """An option that does not exist."""
    with pytest.raises(RolloutError, match=r"at its start.*no_such_option"):
        SGLangProcess(arguments | {"no_such_option": 1})


def test_an_engine_that_dies_ends_its_requests_with_the_reason(engine: SGLangEngine) -> None:
    """In the middle of a batch: nobody waits for ever, this process lives on, and later requests are refused."""
    _publish(engine, 0, 1)
    endless = SamplingParams(max_tokens=700, ignore_eos=True)
    bystander, family = (
        psutil.Popen(["sleep", "600"]),
        [psutil.Process(engine.connection.process.pid)],
    )

    async def scene() -> list[Completion | BaseException]:
        tasks = [
            asyncio.create_task(engine.generate(prompt, endless))
            for prompt in [[5, 6, 7], [8], [9, 10], [11] * 30]
        ]
        await asyncio.sleep(0.1)
        family.extend(psutil.Process(engine.connection.process.pid).children(recursive=True))
        [scheduler] = [one for one in family if "scheduler" in one.name()]
        os.kill(scheduler.pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    try:
        results = asyncio.run(scene())
        assert all(
            isinstance(one, RolloutError) and "SGLang, which" in str(one) for one in results
        ), results
        with pytest.raises(RolloutError, match="SGLang, which"):
            engine.generate_batch([[5, 6, 7]], [GREEDY])
        engine.close()
        assert bystander.is_running()
        assert not [
            one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
        ]
    finally:
        bystander.kill()
        bystander.wait()
