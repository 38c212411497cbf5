# SPDX-License-Identifier: Apache-2.0
"""What engines on third-party libraries share, by one that keeps weights in two dictionaries."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any, cast

import pytest
import torch
from torch import nn

from quadriga.config import load_config
from quadriga.errors import ConfigError, PeerLostError, QuadrigaError, RolloutError, WeightSyncError
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.sglang.engine import SGLangEngine
from quadriga.rollout.third_party import (
    ThirdPartyEngine,
    process_environment,
    require_device_memory,
)
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights
from quadriga.weight_sync.fingerprint import fingerprint
from tests.moe import moe_model

Weights = Iterator[tuple[str, torch.Tensor]]


class TwoProcesses(ThirdPartyEngine):
    """The second one gets what `meddle` makes of a weight."""

    name, title = "two", "TwoLM"

    def __init__(self, weight_version: int = 0) -> None:
        super().__init__(Manifest.of(nn.Linear(2, 3)), 10)
        self.weight_version = weight_version
        self.meddle: Callable[[torch.Tensor], torch.Tensor] = torch.clone

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Any = None,
    ) -> list[Completion]:
        self._require_ready(prompts, sampling, images)
        return [Completion([1], [0.0], "stop", self.weight_version) for _ in prompts]

    def load_weights(self, weights: Weights, version: int) -> None:
        with self._loading(version) as received:
            first = {
                name: tensor.detach().clone()
                for name, tensor in self._manifest.check_stream(weights)
            }
            second = {name: self.meddle(tensor) for name, tensor in first.items()}
            received += [fingerprint(one.items()).tensors for one in (first, second)]


def breaking(error: Exception) -> Weights:
    """A stream that breaks off."""
    yield "weight", torch.zeros(3, 2)
    raise error


def test_a_load_is_vouched_for() -> None:
    """Without weights of its own it refuses until then."""
    engine, sent = TwoProcesses(weight_version=-1), nn.Linear(2, 3)
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch([[1]], [SamplingParams(1)])
    CopiedWeights().publish(sent.named_parameters(), engine, 4)
    assert engine.weight_version == 4
    assert not engine.fingerprint().differences(fingerprint(sent.named_parameters()))
    assert engine.generate_batch([[1]], [SamplingParams(1)])[0].weight_version == 4


@pytest.mark.parametrize(
    ("raised", "expected", "told"),
    [
        (
            OSError("no\nspace\nleft"),
            WeightSyncError,
            r"TwoLM rejected the weights: OSError: no: space, .*abort",
        ),
        (
            RolloutError("call", got="status 400"),
            WeightSyncError,
            r"rollout\.name=two, weights of version 1.*status 400",
        ),
        (PeerLostError("rank 3"), PeerLostError, "^rank 3"),
    ],
)
def test_a_load_that_fails(raised: Exception, expected: type[QuadrigaError], told: str) -> None:
    """What the engine says is told; an error of ours that has nothing to do with it stays as it is."""
    engine = TwoProcesses()
    with pytest.raises(expected, match=told):
        engine.load_weights(breaking(raised), 1)
    assert engine.weight_version == -1
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch([[1]], [SamplingParams(1)])


def test_processes_that_received_different_weights() -> None:
    engine = TwoProcesses()
    engine.meddle = lambda tensor: tensor + 1 if tensor.dim() == 1 else tensor
    with pytest.raises(
        WeightSyncError, match="1 weights that differ between process 0 and 1: bias"
    ):
        engine.load_weights(nn.Linear(2, 3).named_parameters(), 1)
    assert engine.weight_version == -1


def test_requests_that_may_become_too_long() -> None:
    """The limit is prompt and answer together; the row is named."""
    engine = TwoProcesses()
    assert len(engine.generate_batch([[1] * 6], [SamplingParams(4)])) == 1
    told = r"two\.generate, prompt 1: got 7 prompt tokens and up to 4 new ones, expected at most 10 together"
    with pytest.raises(RolloutError, match=told):
        engine.generate_batch([[1], [1] * 7], [SamplingParams(4)] * 2)


@pytest.mark.parametrize(
    ("held", "held_elsewhere", "to_come", "fits"),
    [
        (30, 1, 8, True),
        (30, 1, 12, False),
        (41, 0, 0, False),
        (40, 0, 0, True),
        (1, 40, 2, False),
    ],
)
def test_training_and_engine_share_the_memory_of_a_gpu(
    held: int, held_elsewhere: int, to_come: int, *, fits: bool
) -> None:
    """Refuse half of 80 GiB for the engine, with what holds the rest, and the share that is left."""
    gib = 1 << 30
    sizes = (80 * gib, held * gib, held_elsewhere * gib)
    if fits:
        require_device_memory(*sizes, to_come * gib, 0.5)
        return
    trained = held + to_come
    rest = f"{(80 - trained - held_elsewhere) * 100 // 80 / 100:g}"
    with pytest.raises(
        ConfigError,
        match=rf"0.5, which is 40.0 GiB of 80.0, while training keeps {trained}.0.*, and other"
        rf" programs, CUDA and NCCL hold {held_elsewhere}.0, expected at most {rest}\.",
    ):
        require_device_memory(*sizes, to_come * gib, 0.5)


@pytest.mark.parametrize(
    ("kind", "family", "known"),
    [
        (VLLMEngine, "gpt_oss", "a model without experts, or one of .*mixtral"),
        (SGLangEngine, "qwen3_moe", "a model without experts. Generate"),
    ],
)
def test_experts_are_refused(
    tmp_path: Path, kind: type[VLLMEngine] | type[SGLangEngine], family: str, known: str
) -> None:
    """Before the library is loaded: published weights would not be those that it computes with."""
    moe_model(family).save_pretrained(tmp_path)
    words = [
        f"actor_rollout_ref.rollout.name={kind.name}",
        f"actor_rollout_ref.model.path={tmp_path}",
    ]
    setup = EngineSetup(
        load_config(words).config, cast(Any, None), {}, torch.device("cpu"), torch.float32
    )
    with pytest.raises(
        RolloutError, match=rf"a mixture of experts \(.*model_type '{family}'\), expected {known}"
    ):
        kind.from_config(setup)


def test_engines_that_start_at_the_same_time_leave_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those do that are made again: each has its own variables, and the next one starts after it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    both = Barrier(2)

    def start(number: int) -> tuple[str, str]:
        with process_environment(2, ENGINE=str(number)):
            # Would both be in here, one would leave what the other has set.
            with pytest.raises(BrokenBarrierError):
                both.wait(0.2)
            return os.environ["ENGINE"], os.environ["OMP_NUM_THREADS"]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, (1, 2))) == [("1", "2"), ("2", "2")]
    assert "ENGINE" not in os.environ and os.environ["OMP_NUM_THREADS"] == "4"
