# SPDX-License-Identifier: Apache-2.0
"""What of SGLang's engine needs no SGLang: requests, answers, buckets, the receiving end, and bad beginnings."""

import asyncio
import base64
import io
import math
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from quadriga.config import load_config
from quadriga.errors import RolloutError, WeightSyncError
from quadriga.rollout.interface import Images, SamplingParams
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.sglang.connections import SGLangProcess, SGLangServer
from quadriga.rollout.sglang.engine import SGLangEngine, sglang_arguments
from quadriga.rollout.sglang.host import SGLangLibrary
from quadriga.rollout.sglang.receiver import FINGERPRINTS, load
from quadriga.weight_sync import CopiedWeights
from tests.limits import SOON_S
from tests.vision_folder import noise

APART = (
    "trainer.backend=ray",
    "trainer.placement={actor: train, ref: train, rollout: generate}",
)


class Model(nn.Module):
    """A model that takes weights by name, as SGLang's do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.Linear(3, 4, dtype=torch.bfloat16)

    def load_weights(self, weights: Any) -> None:
        """Copies them."""
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)


class Direct:
    """A connection to a model in this process; it keeps what it was asked, and answers what it is told."""

    version, num_processes = "0", 1
    takes_handles = False

    def __init__(self, answer: dict[str, Any] | None, *, has_seeds: bool) -> None:
        self.model, self.answer, self.has_seeds = Model(), answer, has_seeds
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, method: str, **arguments: Any) -> "Future[Any]":
        self.asked.append((method, arguments))
        future: Future[Any] = Future()
        future.set_result(self._result(method, arguments))
        return future

    def close(self) -> None:
        pass

    def _result(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "update_weights_from_tensor":
            load(self.model, pickle.loads(arguments["serialized_named_tensors"][0]))
        if method == "get_weights_by_name":
            return self.model.get_weights_by_name(arguments["name"])
        return self.answer


def _engine(
    answer: dict[str, Any] | None = None, *, has_seeds: bool = False
) -> tuple[SGLangEngine, Direct]:
    """With weights."""
    connection = Direct(answer, has_seeds=has_seeds)
    engine = SGLangEngine(connection, Manifest.of(Model()), 20, (1,), bucket_bytes=4 * 64)
    engine.weight_version = 0
    return engine, connection


def _answer(tokens: list[int], log_probs: list[float | None], reason: str) -> dict[str, Any]:
    numbers = [[one, token, None] for one, token in zip(log_probs, tokens, strict=False)]
    return {
        "output_ids": tokens,
        "meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": numbers},
    }


def test_weights_arrive_whole_and_are_vouched_for() -> None:
    """In several buckets, of two dtypes, and twice: the second load's fingerprints are its own."""
    engine, direct = _engine()
    for version in (1, 2):
        sent = Model()
        with torch.no_grad():
            sent.embed.weight.add_(version)
        CopiedWeights().publish(sent.named_parameters(), engine, version)
        assert all(
            torch.equal(one, own)
            for one, own in zip(sent.parameters(), direct.model.parameters(), strict=True)
        )
    methods = [method for method, _ in direct.asked]
    one = [
        "begin_weight_update",
        "update_weights_from_tensor",
        "update_weights_from_tensor",
        "end_weight_update",
    ]
    assert methods == [*one, "get_weights_by_name", "flush_cache"] * 2
    assert direct.model.get_weights_by_name(FINGERPRINTS) == [{}]


def test_what_travels_is_only_lent() -> None:
    """A buffer that is used for one weight after the other arrives as each of them."""
    (engine, direct), sent = _engine(), Model()
    shared = torch.empty(64)

    def stream() -> Any:
        for name, tensor in sent.named_parameters():
            lent = (
                shared[: tensor.numel()].to(tensor.dtype)
                if tensor.dtype != shared.dtype
                else shared
            )
            lent = lent[: tensor.numel()].view(tensor.shape)
            lent.copy_(tensor.detach())
            yield name, lent

    engine.load_weights(stream(), 1)
    assert all(
        torch.equal(one, own)
        for one, own in zip(sent.parameters(), direct.model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("num_weights", "last"), [(1, "end_weight_update"), (2, "get_weights_by_name")]
)
def test_a_stream_that_breaks_off_leaves_no_session_open(num_weights: int, last: str) -> None:
    """Before the first bucket or after it: the next load can begin, and has fingerprints of its own only."""
    engine, direct = _engine()
    pairs = [(name, tensor.detach()) for name, tensor in Model().named_parameters()]
    with pytest.raises(WeightSyncError, match=f"a stream without {3 - num_weights} of 3"):
        engine.load_weights(pairs[:num_weights], 1)
    assert "end_weight_update" in [method for method, _ in direct.asked]
    assert direct.asked[-1][0] == last
    assert engine.weight_version == -1
    CopiedWeights().publish(pairs, engine, 2)
    assert engine.weight_version == 2


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            SamplingParams(4, temperature=0.7, top_k=3, seed=9),
            {"temperature": 0.7, "top_k": 3, "sampling_seed": 9},
        ),
        (
            SamplingParams(4, temperature=0.7, top_k=3, do_sample=False),
            {"temperature": 0.0, "top_k": -1},
        ),
        (SamplingParams(4, stop_token_ids=(7,)), {"stop_token_ids": [1, 7], "ignore_eos": False}),
        (
            SamplingParams(4, ignore_eos=True, stop=("x",)),
            {"stop_token_ids": [], "ignore_eos": True, "stop": ["x"]},
        ),
    ],
)
def test_requests(params: SamplingParams, words: dict[str, Any]) -> None:
    """In SGLang's words; the model's own end is a stop token like others."""
    engine, direct = _engine(_answer([2, 3, 4, 1], [-1.0] * 4, "stop"), has_seeds=True)
    engine.generate_batch([[5]], [params])
    asked = direct.asked[0][1]["sampling_params"]
    assert {name: asked[name] for name in words} == words


def test_without_seeds_none_is_sent() -> None:
    """SGLang would take it and draw as it likes."""
    engine, direct = _engine(_answer([2], [-1.0], "stop"))
    engine.generate_batch([[5]], [SamplingParams(4, seed=3)])
    assert "sampling_seed" not in direct.asked[0][1]["sampling_params"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_answer([2, 3], [-1.0], "stop"), "1 log-probabilities of 2 tokens"),
        (_answer([2, 3], [-1.0, math.nan], "stop"), "not a number"),
        (_answer([2, 3], [-1.0, None], "stop"), "not a number"),
        (_answer([2, 3], [-1.0, -1.0], "length"), "cut at 2 of 4 tokens"),
        (_answer([2], [-1.0], "abort"), "a response that ended with"),
        (_answer([2], [-1.0], "bored"), "bored"),
    ],
)
def test_answers_that_are_none(answer: dict[str, Any], message: str) -> None:
    """Each is an error, and not an answer of which something is left out."""
    with pytest.raises(RolloutError, match=message):
        _engine(answer)[0].generate_batch([[5]], [SamplingParams(4)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 20}, "at most 20 together"),
        ({"ignore_eos": True, "stop_token_ids": (3,)}, "ignores stop_token_ids, too"),
        ({"min_p": 0.1}, "sampling with seeds does not support it"),
    ],
)
def test_requests_that_are_refused(changes: dict[str, Any], message: str) -> None:
    """Before SGLang does something else."""
    engine, direct = _engine(has_seeds=True)
    with pytest.raises(RolloutError, match=message):
        engine.generate_batch([[5]], [replace(SamplingParams(4), **changes)])
    assert direct.asked == []


def test_a_server_that_is_not_there() -> None:
    """Told at once, with its address."""
    with pytest.raises(
        RolloutError, match=r"http://127\.0\.0\.1:1/server_info: got a server that does not answer"
    ):
        SGLangServer("http://127.0.0.1:1", max_model_len=20)


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is here")
def test_without_sglang() -> None:
    """The error says how to get it, and no process is left."""
    with pytest.raises(
        RolloutError, match=r"no SGLang in this environment.*scripts/install-sglang"
    ):
        SGLangProcess({})


def test_the_host_passes_on_the_length_of_the_expanded_prompt() -> None:
    """Else images that SGLang expands into other tokens than the data would go unnoticed."""

    class SGLang:
        async def async_generate(self) -> dict[str, Any]:
            reply = _answer([2], [-1.0], "stop")
            reply["meta_info"]["prompt_tokens"] = 3
            return reply

    library = SGLangLibrary.__new__(SGLangLibrary)
    library.engine = SGLang()
    engine, _ = _engine(asyncio.run(library.call("generate", {})))
    with pytest.raises(RolloutError, match="a prompt of 3 tokens, expected 4"):
        engine.generate_batch([[3, 4, 4, 4]], [SamplingParams(4)])


def test_images_travel_beside_a_prompt_with_one_token_for_each() -> None:
    """SGLang repeats that token by itself: as often as the data did, or the response is refused."""
    reply = _answer([2, 1], [-1.0, -2.0], "stop")
    reply["meta_info"]["prompt_tokens"] = 4
    engine, direct = _engine(reply)
    images = Images((noise(8, 8),), {}, torch.zeros(3, 4), (3, 4), "key")
    text, shown = engine.generate_batch([[3, 4, 4, 4]] * 2, [SamplingParams(4)] * 2, [None, images])
    assert text.token_ids == shown.token_ids == [2, 1]
    (_, plain), (_, asked) = direct.asked
    assert (
        "image_data" not in plain
        and plain["input_ids"] == [3, 4, 4, 4]
        and asked["input_ids"] == [3, 4]
    )
    [url] = asked["image_data"]
    file = io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))
    assert Image.open(file).tobytes() == noise(8, 8).tobytes()
    with pytest.raises(
        RolloutError, match=r"sglang\.generate: got a prompt of 4 tokens, expected 3, as the data"
    ):
        asyncio.run(engine.generate([3, 4, 4], SamplingParams(4), images))
    with pytest.raises(
        RolloutError, match=r"sglang\.generate: got a prompt with videos, expected text and images"
    ):
        engine.generate_batch(
            [[3, 4, 4, 4]], [SamplingParams(4)], [replace(images, videos=((None, {}),))]
        )


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ((), 0.5),
        (APART, 0.9),
        ((*APART, "actor_rollout_ref.rollout.gpu_memory_utilization=0.6"), 0.6),
    ],
)
def test_memory_of_a_gpu(words: tuple[str, ...], share: float) -> None:
    """More where nothing is trained, unless it is given."""
    sizes = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.max_model_len=20")
    config = load_config([*sizes, *words]).config
    setup = EngineSetup(config, None, {}, torch.device("cuda", 0), torch.bfloat16)
    assert sglang_arguments(setup, None)["mem_fraction_static"] == share


class Unanswered(Direct):
    """A connection whose requests for responses end when they are aborted, and not by themselves."""

    def __init__(self) -> None:
        super().__init__(None, has_seeds=False)
        self.pending: list[Future[Any]] = []

    def ask(self, method: str, **arguments: Any) -> "Future[Any]":
        if method != "generate":
            return super().ask(method, **arguments)
        self.asked.append((method, arguments))
        self.pending.append(Future())
        return self.pending[-1]

    def end_all(self, reason: str) -> None:
        """Reply to every pending request."""
        for future in self.pending:
            if not future.done():
                future.set_result(_answer([2], [-1.0], reason))


def _unanswered_engine(connection: Unanswered) -> SGLangEngine:
    engine = SGLangEngine(connection, Manifest.of(Model()), 20, (1,), bucket_bytes=4 * 64)
    engine.weight_version = 0
    return engine


def test_abort_ends_a_batch_that_is_being_sent() -> None:
    """Also the requests that are sent after the call of `abort`: they are of a batch that had begun."""

    class Sending(Unanswered):
        def ask(self, method: str, **arguments: Any) -> "Future[Any]":
            future = super().ask(method, **arguments)
            if method == "abort_request":
                self.end_all("abort")
            elif len(self.pending) == 1:
                self.aborting = threading.Thread(target=engine.abort)
                self.aborting.start()
                self.aborting.join(0.2)
            elif not self.aborting.is_alive():
                # `abort` has returned without the batch, which nothing else would end.
                self.end_all("stop")
            return future

    engine = _unanswered_engine(Sending())
    completions = engine.generate_batch([[5], [6]], [SamplingParams(4)] * 2)
    assert [completion.finish_reason for completion in completions] == ["abort", "abort"]


def test_a_request_that_begins_during_an_abort_may_end_with_it() -> None:
    """SGLang may get it before the request that aborts all: that is no failure of the request."""

    class Overtaken(Unanswered):
        def ask(self, method: str, **arguments: Any) -> "Future[Any]":
            if method == "abort_request" and len(self.pending) == 1:
                later.append(pool.submit(engine.generate_batch, [[6]], [SamplingParams(4)]))
                assert both_sent.wait(SOON_S)
                self.end_all("abort")
            future = super().ask(method, **arguments)
            if len(self.pending) == 2:
                both_sent.set()
            elif method == "generate":
                first_sent.set()
            return future

    later: list[Future[Any]] = []
    first_sent = threading.Event()
    both_sent = threading.Event()
    engine = _unanswered_engine(Overtaken())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(engine.generate_batch, [[5]], [SamplingParams(4)])
        assert first_sent.wait(SOON_S)
        engine.abort()
        assert first.result(SOON_S)[0].finish_reason == "abort"
        assert later[0].result(SOON_S)[0].finish_reason == "abort"
