# SPDX-License-Identifier: Apache-2.0
"""The engine `http` against vLLM's own server."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quadriga.errors import RolloutError
from quadriga.rollout.http import HTTPEngine
from quadriga.rollout.interface import SamplingParams
from small_models import EOS, greedy, model
from small_servers import Server, serving

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It has the weights of seed 0."""
    options = [
        "--model", folder, "--served-model-name", "small", "--dtype", "float32", "--max-model-len", "320",
        "--enforce-eager", "--kv-cache-memory-bytes", str(32 << 20), "--generation-config", "vllm",
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with serving(
        "vllm.entrypoints.openai.api_server", options, variables, log, signal.SIGTERM
    ) as one:
        yield one


def test_it_answers_as_the_engine_in_this_process_does(server) -> None:
    """Greedy tokens are transformers', log-probabilities those of training, stop tokens ours."""
    engine = HTTPEngine(
        [server[0]], "small", eos_token_ids=(EOS,), logprobs_mode="processed_logprobs"
    )
    params = [SamplingParams(max_tokens=20, temperature=0.0)] * len(PROMPTS)
    for prompt, found in zip(PROMPTS, engine.generate_batch(PROMPTS, params), strict=True):
        tokens, log_probs = greedy(model(0), prompt, 20)
        assert (found.token_ids, found.finish_reason) == (
            tokens,
            "stop" if tokens[-1] == EOS else "length",
        )
        torch.testing.assert_close(found.log_probs, log_probs, atol=2e-4, rtol=0)
    sampled = [
        SamplingParams(max_tokens=20, seed=row, temperature=0.7, ignore_eos=True)
        for row in range(3)
    ]
    first = engine.generate_batch(PROMPTS, sampled)
    assert [one.token_ids for one in engine.generate_batch(PROMPTS, sampled)] == [
        one.token_ids for one in first
    ]
    row = torch.tensor([PROMPTS[0] + first[0].token_ids])
    with torch.no_grad():
        scaled = (model(0)(row).logits[0, len(PROMPTS[0]) - 1 : -1] / 0.7).log_softmax(-1)
    expected = scaled.gather(1, torch.tensor(first[0].token_ids)[:, None])[:, 0].tolist()
    torch.testing.assert_close(first[0].log_probs, expected, atol=3e-4, rtol=0)


def test_a_prompt_that_is_too_long(server) -> None:
    """The server's own words reach the user. An answer that has not enough room it cuts at its limit."""
    engine = HTTPEngine([server[0]], "small", eos_token_ids=(EOS,))
    with pytest.raises(RolloutError, match=r"status 400.*320"):
        engine.generate_batch([[5] * 330], [SamplingParams(max_tokens=100)])
    [cut] = engine.generate_batch([[5] * 300], [SamplingParams(max_tokens=100, ignore_eos=True)])
    assert (len(cut.token_ids), cut.finish_reason) == (20, "length")


def test_a_server_that_dies_in_the_middle_of_a_batch(server) -> None:
    """Its requests end with an error that names it."""
    url, process = server
    engine = HTTPEngine([url], "small", eos_token_ids=(EOS,))
    os.killpg(process.pid, signal.SIGSTOP)  # on a busy machine it could be done before it is killed
    threads = ThreadPoolExecutor(4)
    running = [
        threads.submit(
            engine.generate_batch,
            [[5, 6]],
            [SamplingParams(max_tokens=300, seed=1, ignore_eos=True)],
        )
        for _ in range(4)
    ]
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    for one in running:
        with pytest.raises(RolloutError, match="no answer") as caught:
            one.result(60)
        assert url in str(caught.value)
