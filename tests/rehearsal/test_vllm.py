# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine in the trainer's process on a GPU: its device, its random numbers, its arguments.

A library stands where vLLM does. tests/vllm/test_first_gpu_run.py has vLLM itself.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quadriga.config import load_config
from quadriga.errors import ConfigError
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm import cores, engine
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.rollout.vllm.group import GroupCore
from quadriga.rollout.vllm.library import VLLMLibrary
from tests.gpu.test_cuda import make_model
from tests.rehearsal.stand_in import StandIn

SECOND = torch.device("cuda", 1)


class Echo:
    """An engine that answers each request with a random token, and notes where it computes."""

    def __init__(self, arguments: dict[str, Any], *_: Any, **__: Any) -> None:
        self.arguments = arguments
        self.waiting: list[str] = []
        self.devices: list[int] = []
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, name: str, prompt: Any, sampling: Any, lora_request: Any) -> None:
        self.waiting.append(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [[]]

    def step(self) -> list[Any]:
        self.devices.append(torch.cuda.current_device())
        token = int(torch.randint(1000, ()))
        sequence = SimpleNamespace(
            token_ids=[token], logprobs=SimpleNamespace(logprobs=[0.0]), finish_reason="stop"
        )
        names = self.waiting
        self.waiting = []
        return [
            SimpleNamespace(request_id=name, outputs=[sequence], finished=True) for name in names
        ]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines find a library whose engine is `Echo`."""
    module = SimpleNamespace(
        EngineArgs=lambda **arguments: SimpleNamespace(create_engine_config=lambda: arguments),
        LLMEngine=Echo,
    )
    sampling = SimpleNamespace(
        SamplingParams=SimpleNamespace, RequestOutputKind=SimpleNamespace(FINAL_ONLY=2)
    )
    found = VLLMLibrary("0.32.0", module, sampling, None)
    monkeypatch.setattr(engine, "load", lambda: found)
    monkeypatch.setattr(cores, "executor", lambda device, group: None)
    monkeypatch.setattr(cores, "partial_outputs", lambda engine, names: [])


def make_engine(folder: Path, *keys: str, group: Any = None) -> VLLMEngine:
    """An engine on the second GPU."""
    make_model().save_pretrained(folder)
    words = [f"model.path={folder}", "rollout.name=vllm", "rollout.enforce_eager=true", *keys]
    limits = ["data.max_prompt_length=10", "data.max_response_length=10"]
    config = load_config([*(f"actor_rollout_ref.{word}" for word in words), *limits]).config
    tokenizer: Any = SimpleNamespace(eos_token_id=1)
    setup = EngineSetup(config, tokenizer, {}, SECOND, torch.bfloat16, group=group)
    made = VLLMEngine.from_config(setup)
    assert isinstance(made, VLLMEngine)
    made.weight_version = 0
    made._state = "ready"
    return made


@pytest.mark.usefixtures("library")
def test_a_group_computes_on_its_device_in_every_thread(stand_in: StandIn, tmp_path: Path) -> None:
    """Also in the thread that steps for conversations; the peers' GPUs are not visible."""
    stand_in.here.device = 1
    group: Any = SimpleNamespace(
        is_leader=True,
        broadcast=lambda message: None,
        size=4,
        device=SECOND,
        ranks=range(4),
        rank=0,
    )
    made = make_engine(tmp_path, group=group)
    assert isinstance(made.core, GroupCore)
    assert "nothing is compiled" in made.description and "all-reduce by NCCL" in made.description
    params = SamplingParams(max_tokens=2)
    asyncio.run(made.generate([5], params))
    made.generate_batch([[5]], [params])
    assert made.core.engine.devices == [1, 1]
    assert made.core.engine.arguments["disable_custom_all_reduce"]
    made.close()


@pytest.mark.usefixtures("library")
def test_draws_without_seeds_leave_the_trainers_generator(
    stand_in: StandIn, tmp_path: Path
) -> None:
    stand_in.here.device = 1
    made = make_engine(tmp_path, "rollout.request_seeds=false")
    before = torch.get_rng_state()
    made.generate_batch([[5]], [SamplingParams(max_tokens=2, seed=3)])
    assert torch.equal(torch.get_rng_state(), before)
    made.close()


@pytest.mark.usefixtures("library")
def test_memory_that_another_process_cannot_open(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="no expandable segments while vLLM"):
        make_engine(tmp_path, "rollout.mode=async")
