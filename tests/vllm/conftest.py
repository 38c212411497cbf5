# SPDX-License-Identifier: Apache-2.0
"""The tests of vLLM run where it is: `scripts/test --vllm`. Elsewhere they are skipped with a sentence."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from quadriga.rollout.manifest import Manifest
from quadriga.rollout.vllm.core import MIB, VLLMOptions
from small_models import EOS, model, save


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder in an environment without vLLM."""
    if find_spec("vllm") is None:
        for item in items:
            if item.path.is_relative_to(__file__.rpartition("/")[0]):
                item.add_marker(pytest.mark.skip(reason="no vLLM here: scripts/test --vllm runs them where it is"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of seed 0."""
    return save(model(0), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def options(folder: str) -> Callable[..., VLLMOptions]:
    """Settings for the model of seed 0; changed by keyword."""

    def make(**changes: Any) -> VLLMOptions:
        own = {
            "path": folder,
            "dtype": torch.float32,
            "max_model_len": 320,
            "manifest": Manifest.of(model(0)),
            "eos_token_ids": (EOS,),
            "max_num_seqs": 32,
            "max_num_batched_tokens": 1024,
            "cache_bytes": 32 * MIB,
            "bucket_bytes": MIB // 8,
            "extra": {"block_size": 32},
        }
        return VLLMOptions(**own | changes)

    return make
