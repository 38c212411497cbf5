# SPDX-License-Identifier: Apache-2.0
"""The tests of vLLM run where it is: `scripts/test --vllm`. Elsewhere they are skipped with a sentence."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from quadriga.config import load_config
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm.engine import VLLMEngine
from scheduling import keep_async_scheduling
from small_models import model, save


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder in an environment without vLLM."""
    if find_spec("vllm") is None:
        for item in items:
            if item.path.is_relative_to(__file__.rpartition("/")[0]):
                item.add_marker(
                    pytest.mark.skip(
                        reason="no vLLM here: scripts/test --vllm runs them where it is"
                    )
                )


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous scheduling is on unless the arguments switch it off."""
    monkeypatch.setattr(*keep_async_scheduling())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of seed 0."""
    return save(model(0), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def start(folder: str) -> Callable[..., Any]:
    """`start(**rollout)`: an engine on the model of seed 0, with these settings of the rollout, in float32."""

    def make(
        kind: type[VLLMEngine] = VLLMEngine,
        path: str = folder,
        model: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        words: tuple[str, ...] = (),
        **rollout: Any,
    ) -> VLLMEngine:
        sizes = {
            "max_model_len": 320,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 1024,
            "cache_gigabytes": 1 / 32,
        }
        words = [
            *words,
            *(
                f"actor_rollout_ref.rollout.{key}={value}"
                for key, value in (sizes | rollout).items()
            ),
        ]
        words += [
            f"actor_rollout_ref.model.{key}={value}"
            for key, value in ({"path": path} | (model or {})).items()
        ]
        words += [f"data.{key}={value}" for key, value in (data or {}).items()]
        config = load_config(["actor_rollout_ref.rollout.name=vllm", *words]).config
        tokenizer = AutoTokenizer.from_pretrained(path)
        options = {"block_size": 32} | (extra or {})
        engine = kind.from_config(
            EngineSetup(config, tokenizer, options, torch.device("cpu"), torch.float32)
        )
        assert isinstance(engine, VLLMEngine)
        engine.bucket_bytes = (1 << 20) // 8  # the model needs several
        return engine

    return make
