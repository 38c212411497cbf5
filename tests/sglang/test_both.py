# SPDX-License-Identifier: Apache-2.0
"""What holds of SGLang wherever it is: beside this process, or at a server. In float32, on a CPU."""

import pickle
from typing import Any

import pytest
import torch

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.sglang.engine import SGLangEngine
from quadriga.weight_sync import CopiedWeights
from small_models import EOS, greedy, model
from small_servers import require_coming_and_going

LONG = [2 + number * 7 % 250 for number in range(200)]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], LONG]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture(scope="module", params=["beside", "at_server"])
def engine(request: pytest.FixtureRequest) -> SGLangEngine:
    """One after the other; each test publishes the weights that it needs."""
    return request.getfixturevalue(request.param)


def publish(engine: SGLangEngine, seed: int, version: int) -> None:
    """The weights of a seed; whatever reaches SGLang in another form is an error."""
    CopiedWeights().publish(model(seed).named_parameters(), engine, version)


def require_greedy_of(engine: SGLangEngine, seed: int) -> None:
    """Tokens are transformers', log-probabilities close to those, in float32."""
    for prompt, found in zip(
        PROMPTS, engine.generate_batch(PROMPTS, [GREEDY] * len(PROMPTS)), strict=True
    ):
        tokens, log_probs = greedy(model(seed), prompt, 20)
        assert (found.token_ids, found.finish_reason) == (
            tokens,
            "stop" if tokens[-1] == EOS else "length",
        )
        torch.testing.assert_close(found.log_probs, log_probs, atol=1e-4, rtol=0)
        assert found.sampling_log_probs == found.log_probs


def test_without_weights_it_generates_nothing(engine: SGLangEngine) -> None:
    """SGLang's own are random, or of whoever started the server."""
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch(PROMPTS[:1], [GREEDY])


def test_new_weights_are_used(engine: SGLangEngine) -> None:
    """There and back; a prompt that was answered before is answered anew."""
    for version, seed in enumerate((0, 1, 0), start=1):
        publish(engine, seed, version)
        require_greedy_of(engine, seed)
        assert engine.weight_version == version


def test_log_probs_of_training(engine: SGLangEngine) -> None:
    """Also with a filter they are those of the logits divided by the temperature."""
    publish(engine, 0, 1)
    params = SamplingParams(max_tokens=24, temperature=0.7, top_k=5, ignore_eos=True)
    for prompt, found in zip(
        PROMPTS, engine.generate_batch(PROMPTS, [params] * len(PROMPTS)), strict=True
    ):
        with torch.no_grad():
            logits = model(0)(torch.tensor([prompt + found.token_ids])).logits[
                0, len(prompt) - 1 : -1
            ]
        chosen = torch.tensor(found.token_ids)[:, None]
        scaled = (logits / 0.7).log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(found.log_probs, scaled.tolist(), atol=3e-4, rtol=0)
        assert (logits.topk(5).indices == chosen).any(1).all()
        assert found.sampling_log_probs == []


def test_requests_come_and_go(engine: SGLangEngine) -> None:
    """See `require_coming_and_going`; the engine goes on as before."""
    publish(engine, 0, 1)
    endless = SamplingParams(max_tokens=950, ignore_eos=True)
    require_coming_and_going(engine, PROMPTS, endless, pause_s=0.3)
    require_greedy_of(engine, 0)


def test_incomplete_streams_are_refused(engine: SGLangEngine) -> None:
    """SGLang would go on with what it has; we do not, and the next whole set is fine."""
    pairs = [(name, tensor.detach()) for name, tensor in model(1).named_parameters()]
    streams = {
        "a stream without 3 of": pairs[:-3],
        "weight model.extra": [*pairs, ("model.extra", torch.zeros(2))],
        "expected shape": [(pairs[0][0], torch.zeros(3)), *pairs[1:]],
    }
    for message, stream in streams.items():
        with pytest.raises(WeightSyncError, match=message):
            engine.load_weights(stream, 4)
        with pytest.raises(RolloutError, match="not loaded completely"):
            engine.generate_batch(PROMPTS[:1], [GREEDY])
    publish(engine, 1, 5)
    require_greedy_of(engine, 1)


def test_a_changed_tensor_is_named(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of one tensor changes on its way: both sides' fingerprints differ, and nothing is generated."""
    send = engine.connection.ask
    name = "model.layers.1.mlp.down_proj.weight"

    def meddle(method: str, **arguments: Any) -> Any:
        if method == "update_weights_from_tensor":
            arguments["serialized_named_tensors"] = [
                changed(payload, name) for payload in arguments["serialized_named_tensors"]
            ]
        return send(method, **arguments)

    monkeypatch.setattr(engine.connection, "ask", meddle)
    with pytest.raises(WeightSyncError, match=rf"1 of \d+ weights that differ: {name}"):
        publish(engine, 1, 6)
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch(PROMPTS[:1], [GREEDY])
    monkeypatch.undo()
    publish(engine, 0, 7)
    require_greedy_of(engine, 0)


def changed(payload: bytes, name: str) -> bytes:
    """The payload with one number of the named tensor changed, if it is in there."""
    bucket = pickle.loads(payload)
    for found, tensor in bucket:
        if found == name:
            tensor[3, 5] += 1
    return pickle.dumps(bucket)


def test_nan_is_an_error(engine: SGLangEngine) -> None:
    """And what it left in the cache does not reach the answers of good weights."""
    bad = [
        (name, torch.full_like(tensor, torch.nan).detach())
        for name, tensor in model(0).named_parameters()
    ]
    engine.load_weights(bad, 1)
    with pytest.raises(RolloutError, match="not a number"):
        engine.generate_batch(
            PROMPTS, [SamplingParams(max_tokens=8, ignore_eos=True)] * len(PROMPTS)
        )
    publish(engine, 0, 2)
    require_greedy_of(engine, 0)
