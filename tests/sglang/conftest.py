# SPDX-License-Identifier: Apache-2.0
"""The tests of SGLang run where it is: `scripts/test --sglang`. Elsewhere they are skipped with a sentence."""

import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from quadriga.config import load_config
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.sglang.connections import SGLangProcess, SGLangServer
from quadriga.rollout.sglang.engine import SGLangEngine, sglang_arguments
from quadriga.rollout.sglang.receiver import LOADER
from small_models import EOS, model, save
from small_servers import Server, serving

MAX_MODEL_LEN = 1000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder in an environment without SGLang."""
    if find_spec("sglang") is None:
        for item in items:
            if item.path.is_relative_to(__file__.rpartition("/")[0]):
                item.add_marker(
                    pytest.mark.skip(
                        reason="no SGLang here: scripts/test --sglang runs them where it is"
                    )
                )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of seed 0."""
    return save(model(0), tmp_path_factory.mktemp("tied"))


def engine_on(connection: SGLangProcess | SGLangServer) -> SGLangEngine:
    """For the model of seed 0; its weights need several buckets."""
    return SGLangEngine(
        connection, Manifest.of(model(0)), MAX_MODEL_LEN, (EOS,), bucket_bytes=1 << 18
    )


@pytest.fixture(scope="session")
def arguments(folder: str) -> dict[str, Any]:
    """Of a small engine without weights."""
    sizes = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
    }
    words = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in sizes.items()]
    config = load_config([f"actor_rollout_ref.model.path={folder}", *words]).config
    setup = EngineSetup(
        config, AutoTokenizer.from_pretrained(folder), {}, torch.device("cpu"), torch.float32
    )
    return sglang_arguments(setup, cache_tokens=8192)


@pytest.fixture(scope="session")
def beside(arguments: dict[str, Any]) -> Iterator[SGLangEngine]:
    """An engine in processes of its own."""
    one = engine_on(SGLangProcess(arguments))
    yield one
    one.close()


@pytest.fixture(scope="session")
def process(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SGLang's own server."""
    options = [
        "--model-path", folder, "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
        "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph",
        "--disable-overlap-schedule", "--context-length", "1008", "--max-total-tokens", "8192",
        "--max-running-requests", "32", "--mem-fraction-static", "0.9", "--skip-server-warmup",
        "--custom-weight-loader", LOADER,
    ]  # fmt: skip
    variables = {"TORCH_COMPILE_DISABLE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with serving("sglang.launch_server", options, variables, log, signal.SIGKILL) as one:
        yield one


@pytest.fixture(scope="session")
def at_server(process: Server) -> Iterator[SGLangEngine]:
    """An engine at that server."""
    one = engine_on(SGLangServer(process[0], max_model_len=MAX_MODEL_LEN))
    yield one
    one.close()
