# SPDX-License-Identifier: Apache-2.0
"""The tests of SGLang run where it is: `scripts/test --sglang`. Elsewhere they are skipped with a sentence."""

import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from quadriga.rollout.manifest import Manifest
from quadriga.rollout.sglang.core import Limits
from quadriga.rollout.sglang.engine import SGLangEngine, SGLangOptions
from quadriga.rollout.sglang.receiver import LOADER
from quadriga.rollout.sglang.server import SGLangServer
from small_models import EOS, model, save
from small_servers import Server, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder in an environment without SGLang."""
    if find_spec("sglang") is None:
        for item in items:
            if item.path.is_relative_to(__file__.rpartition("/")[0]):
                item.add_marker(pytest.mark.skip(reason="no SGLang here: scripts/test --sglang runs them where it is"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of seed 0."""
    return save(model(0), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def limits() -> Limits:
    """Of the model of seed 0; its weights need several buckets."""
    return Limits(max_model_len=1000, manifest=Manifest.of(model(0)), eos_token_ids=(EOS,), bucket_bytes=1 << 18)


@pytest.fixture(scope="session")
def options(folder: str, limits: Limits) -> SGLangOptions:
    """A small engine without weights."""
    return SGLangOptions(
        path=folder,
        dtype=torch.float32,
        device="cpu",
        limits=limits,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        cache_tokens=8192,
        is_eager=True,
        has_weights=False,
    )


@pytest.fixture(scope="session")
def beside(options: SGLangOptions) -> Iterator[SGLangEngine]:
    """An engine beside this process."""
    one = SGLangEngine(options)
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
def at_server(process: Server, limits: Limits) -> Iterator[SGLangServer]:
    """An engine at that server."""
    one = SGLangServer(process[0], limits)
    yield one
    one.close()
