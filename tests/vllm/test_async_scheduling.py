# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduling, its default on GPUs: while a batch is computed, the next one is scheduled.

Here the platform for CPUs leaves it as CUDA's does. Groups: test_groups.py; new weights beside
responses: test_beside.py.

What it does not prove: that a GPU does not read the memory of a batch in flight after it was freed.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from losing import lose
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights
from scheduling import batches_in_flight
from small_models import model
from small_servers import require_coming_and_going

pytestmark = pytest.mark.usefixtures("as_on_cuda")
PROMPTS = [[5, 6, 7], [8], [9, 10, 11]] * 3
LONG = SamplingParams(max_tokens=250, seed=4, ignore_eos=True)
Make = Callable[..., VLLMEngine]


def generate(engine: VLLMEngine) -> list[list[int]]:
    """Tokens that the model of seed 0 draws."""
    CopiedWeights().publish(
        ((name, weight.detach()) for name, weight in model(0).named_parameters()), engine, 1
    )
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(len(PROMPTS))]
    return [response.token_ids for response in engine.generate_batch(PROMPTS, params)]


@pytest.fixture
def expected(start: Make) -> list[list[int]]:
    """What `generate` gives without asynchronous scheduling."""
    engine = start(max_num_seqs=4)
    tokens = generate(engine)
    engine.close()
    return tokens


@pytest.fixture
def engine(start: Make) -> Iterator[VLLMEngine]:
    """An engine with asynchronous scheduling in this process."""
    engine = start(max_num_seqs=4, extra={"async_scheduling": True})
    yield engine
    engine.close()


def test_it_is_off_in_this_process(start: Make) -> None:
    """A batch would be in flight while memory is freed."""
    engine = start(max_num_seqs=4)
    assert batches_in_flight(engine) is None
    engine.close()


def test_a_sleep_with_a_batch_in_flight(engine: VLLMEngine, expected: list[list[int]]) -> None:
    """It gives the same tokens, and leaves a batch that reads lost memory and is not delivered."""
    assert generate(engine) == expected
    for _ in range(2):
        assert len(batches_in_flight(engine)) == 1
        engine.sleep()
        engine.core.ask("collective_rpc", lose)
        engine.wake()
        assert generate(engine) == expected


def test_an_abort_with_a_batch_in_flight(engine: VLLMEngine, expected: list[list[int]]) -> None:
    """Unfinished responses end with what was delivered; nothing of them reaches later ones."""
    assert generate(engine) == expected
    whole = engine.generate_batch(PROMPTS[:3], [LONG] * 3)
    ended: list[Completion] = []

    def run() -> None:
        ended.extend(engine.generate_batch(PROMPTS[:3], [LONG] * 3))

    thread = threading.Thread(target=run)
    thread.start()
    states = engine.core.engine.output_processor.request_states
    while not any(state.detokenizer.output_token_ids for state in list(states.values())):
        time.sleep(0.001)
    engine.abort()
    thread.join()
    assert {completion.finish_reason for completion in ended} == {"abort"}
    for completion, complete in zip(ended, whole, strict=True):
        num_tokens = len(completion.token_ids)
        assert num_tokens < 250
        assert completion.token_ids == complete.token_ids[:num_tokens]
        assert completion.log_probs == pytest.approx(complete.log_probs[:num_tokens], abs=1e-4)
    engine.core.ask("collective_rpc", lose)
    assert generate(engine) == expected


def test_requests_come_and_go(start: Make, expected: list[list[int]]) -> None:
    """vLLM in a process of its own, where asynchronous scheduling stays on: see `require_coming_and_going`."""
    engine = start(mode="async")
    assert engine.core.engine.vllm_config.scheduler_config.async_scheduling
    assert generate(engine) == expected
    require_coming_and_going(engine, PROMPTS, LONG, pause_s=0.1)
    assert generate(engine) == expected
    engine.close()
