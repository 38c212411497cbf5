# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduling, its default on GPUs, which its platform for CPUs switches off.

Here the platform leaves it as CUDA's does.
"""

from collections.abc import Callable
from typing import Any

import pytest

from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights
from small_models import model

PROMPTS = [[5, 6, 7], [8], [9, 10, 11]] * 3
Make = Callable[..., VLLMEngine]


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous scheduling is on unless the arguments switch it off."""
    platform = pytest.importorskip("vllm.platforms.cpu").CpuPlatform
    check = platform.check_and_update_config

    def check_and_keep(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = wanted is None or wanted

    monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check_and_keep))


def generate(engine: VLLMEngine) -> list[list[int]]:
    CopiedWeights().publish(
        ((name, weight.detach()) for name, weight in model(0).named_parameters()), engine, 1
    )
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(len(PROMPTS))]
    return [response.token_ids for response in engine.generate_batch(PROMPTS, params)]


def batches_in_flight(engine: VLLMEngine) -> Any:
    """vLLM's queue of batches that are computed; None without asynchronous scheduling."""
    return engine.core.engine.engine_core.engine_core.batch_queue


def test_it_is_off_in_this_process(start: Make, as_on_cuda: None) -> None:
    """It gives the same tokens, but leaves a batch in flight that memory must not be freed under."""
    engine = start(max_num_seqs=4)
    expected = generate(engine)
    assert batches_in_flight(engine) is None
    engine.close()
    engine = start(max_num_seqs=4, extra={"async_scheduling": True})
    assert generate(engine) == expected
    assert len(batches_in_flight(engine)) == 1
    engine.close()
