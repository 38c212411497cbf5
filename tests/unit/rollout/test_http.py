# SPDX-License-Identifier: Apache-2.0
"""Requests to servers: what is asked, what of an answer is taken, and what becomes of servers that fail."""

import asyncio
import base64
import io
import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from PIL import Image

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.rollout.http import HTTPEngine
from quadriga.rollout.interface import Images, SamplingParams
from tests.limits import HANGS_S
from tests.vision_folder import IMAGE, noise, tiny_tokenizer

Reply = Callable[[dict[str, Any]], tuple[int, Any]]


class Server:
    """A server of canned replies on a free port, in a thread; it notes what it was asked."""

    def __init__(self, reply: Reply) -> None:
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append((self.path, body))
                status, content = reply(body)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Listens no more."""
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], Server]]:
    """Start servers, which end with the test."""
    servers: list[Server] = []

    def start(reply: Reply) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for one in servers:
        one.stop()


def _choice(**changes: Any) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5, -1.5], "tokens": ["a", "b"]}
    return {
        "choices": [{"token_ids": [7, 8], "logprobs": logprobs, "finish_reason": "stop"} | changes]
    }


def _fine(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, _choice(token_ids=[body["prompt"][0], 8])


PARAMS = SamplingParams(max_tokens=4, seed=2**64 - 1, stop=("x",), stop_token_ids=(3,))


def test_what_is_asked_and_what_is_taken(serve) -> None:
    """Token ids both ways, stop tokens in our terms, and the answers in the prompts' order."""
    server = serve(_fine)
    engine = HTTPEngine([server.url + "/"], "small", eos_token_ids=(1,), max_num_seqs=3)
    answers = engine.generate_batch([[row] for row in range(9)], [PARAMS] * 9)
    assert [one.token_ids[0] for one in answers] == list(range(9))
    assert (answers[0].log_probs, answers[0].sampling_log_probs) == ([-0.5, -1.5], [-0.5, -1.5])
    path, body = server.asked[0]
    assert path == "/v1/completions"
    assert (body["model"], body["stop_token_ids"], body["ignore_eos"], body["stop"]) == (
        "small",
        [1, 3],
        True,
        ["x"],
    )
    assert (body["seed"], body["return_token_ids"]) == (2**63 - 1, True)


def test_greedy_asks_for_no_filter(serve) -> None:
    """Whatever else is set: the likeliest token."""
    server = serve(_fine)
    params = SamplingParams(
        max_tokens=4, do_sample=False, temperature=0.7, top_p=0.5, top_k=3, min_p=0.1
    )
    HTTPEngine([server.url], "small").generate_batch([[1]], [params])
    body = server.asked[0][1]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0, 1, -1, 0)


def test_a_number_that_is_not_known_is_not_made_up(serve) -> None:
    """The model's own log-probabilities are not those at temperature 0.5; said to be those after it, they are."""
    url, params = serve(_fine).url, SamplingParams(max_tokens=4, temperature=0.5)
    [raw] = HTTPEngine([url], "small").generate_batch([[1]], [params])
    assert all(map(math.isnan, raw.log_probs))
    assert raw.sampling_log_probs == []
    [processed] = HTTPEngine([url], "small", logprobs_mode="processed_logprobs").generate_batch(
        [[1]], [params]
    )
    assert processed.log_probs == [-0.5, -1.5]


def test_tokens_as_texts_of_ids(serve) -> None:
    """The other form in which servers give token ids."""
    logprobs = {"token_logprobs": [-0.5, -1.5], "tokens": ["token_id:41", "token_id:42"]}
    url = serve(lambda body: (200, _choice(token_ids=None, logprobs=logprobs))).url
    [answer] = HTTPEngine([url], "small").generate_batch([[1]], [PARAMS])
    assert answer.token_ids == [41, 42]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_choice(token_ids=None), "a response without token ids"),
        (_choice(logprobs=None), "2 tokens with 0 log-probabilities"),
        (_choice(logprobs={"token_logprobs": [-1.0]}), "2 tokens with 1 log-probabilities"),
        (_choice(logprobs={"token_logprobs": [-1.0, None]}), "2 tokens with 2 log-probabilities"),
        (_choice(finish_reason="tool_calls"), "ended with 'tool_calls'"),
    ],
)
def test_an_answer_that_lacks_something(serve, content: Any, message: str) -> None:
    """The error says what, from which server, and what a server must be able to do."""
    server = serve(lambda body: (200, content))
    with pytest.raises(RolloutError, match=message) as caught:
        HTTPEngine([server.url], "small").generate_batch([[1]], [PARAMS])
    assert server.url in str(caught.value)
    assert "return_token_ids" in str(caught.value)
    assert len(server.asked) == 1


def test_a_refusal_is_told_in_the_servers_words_and_not_tried_again(serve) -> None:
    """A prompt that is too long for one server is too long for all of them."""
    server = serve(
        lambda body: (400, {"error": {"message": "maximum context length is 16 tokens"}})
    )
    with pytest.raises(RolloutError, match=r"status 400.*maximum context length is 16"):
        HTTPEngine([server.url], "small").generate_batch([[1] * 20], [PARAMS])
    assert len(server.asked) == 1


def test_a_refusal_waits_for_no_other_request(serve) -> None:
    release = threading.Event()

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if body["prompt"] == [2]:
            return 400, {"error": {"message": "not this one"}}
        release.wait(HANGS_S)
        return _fine(body)

    with pytest.raises(RolloutError, match="not this one"):
        HTTPEngine([serve(reply).url], "small").generate_batch([[1], [2]], [PARAMS] * 2)
    release.set()


def test_requests_of_a_lost_server_move_to_another(serve) -> None:
    """One does not listen, one answers with errors, one with no JSON, one is well."""
    gone = serve(_fine)
    gone.stop()
    ill, odd, well = (
        serve(one) for one in (lambda body: (503, "busy"), lambda body: (200, b"<html>"), _fine)
    )
    urls = [one.url for one in (gone, ill, odd, well)]
    answers = HTTPEngine(urls, "small", max_num_seqs=4).generate_batch(
        [[row] for row in range(12)], [PARAMS] * 12
    )
    assert [one.token_ids[0] for one in answers] == list(range(12))
    assert len(well.asked) == 12
    assert len(ill.asked) <= 12


def test_when_all_are_lost_each_is_named(serve) -> None:
    """With what each of them said."""
    gone, ill = serve(_fine), serve(lambda body: (500, "out of memory"))
    gone.stop()
    with pytest.raises(RolloutError, match="no answer") as caught:
        HTTPEngine([gone.url, ill.url], "small").generate_batch([[1]], [PARAMS])
    assert gone.url in str(caught.value)
    assert "out of memory" in str(caught.value)
    assert len(ill.asked) == 2


def test_the_less_busy_one_is_asked(serve) -> None:
    """While one server thinks, the other gets what comes."""
    release = threading.Event()
    slow = serve(lambda body: (200, _choice()) if release.wait(HANGS_S) else (500, "late"))
    fast = serve(_fine)
    engine = HTTPEngine([slow.url, fast.url], "small", max_num_seqs=2)
    threading.Timer(0.5, release.set).start()
    engine.generate_batch([[1]] * 6, [PARAMS] * 6)
    assert (len(slow.asked), len(fast.asked)) == (1, 5)


def test_abort_and_cancel_wait_for_no_server(serve) -> None:
    """Both end the connection: nobody waits for the answer."""
    release = threading.Event()
    server = serve(lambda body: (200, _choice()) if release.wait(HANGS_S) else (500, "late"))
    engine = HTTPEngine([server.url], "small")
    threading.Timer(0.2, engine.abort).start()
    [answer] = engine.generate_batch([[1]], [PARAMS])
    assert (answer.token_ids, answer.finish_reason) == ([], "abort")

    async def cancelled() -> asyncio.Task[Any]:
        task = asyncio.create_task(engine.generate([1], PARAMS))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task

    assert asyncio.run(cancelled()).cancelled()
    release.set()


def test_weights_stay_with_the_server(serve) -> None:
    """Version 0 is taken on trust; a later one is refused, and then nothing is generated."""
    engine = HTTPEngine([serve(_fine).url], "small")
    weights = [("a", torch.ones(3))]
    engine.load_weights(iter(weights), 0)
    assert list(engine.fingerprint().tensors) == ["a"]
    with pytest.raises(WeightSyncError, match="keep the weights they were started with"):
        engine.load_weights(iter(weights), 1)
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch([[1]], [PARAMS])


@pytest.mark.parametrize("urls", [[], ["host:8000"], ["ftp://host"]])
def test_addresses(urls: list[str]) -> None:
    """At least one, and each with http or https."""
    with pytest.raises(RolloutError, match=r"engine_kwargs.urls"):
        HTTPEngine(urls, "small")


def test_closed(serve) -> None:
    """It refuses for good."""
    engine = HTTPEngine([serve(_fine).url], "small")
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.generate_batch([[1]], [PARAMS])


def test_images_go_as_a_chat_whose_tokens_are_compared(serve) -> None:
    """Text and images of a message in their order, with a template that writes the one and the token of the other: of
    these the server makes the tokens of the data, or the response is refused."""
    tokenizer, shown, prompt = tiny_tokenizer(), (noise(8, 8), noise(16, 8, 1)), []
    short = tokenizer("<user> w1 <|vision_start|><|image_pad|><|vision_end|><|image_pad|> ?")[
        "input_ids"
    ]
    prompt = [one for token in short for one in [token] * (2 if token == IMAGE else 1)]
    images = Images(shown, {}, torch.zeros(3, len(prompt)), tuple(short), "key")
    content = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -1.5}]
    told: dict[str, Any] = {"prompt_token_ids": prompt}

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {**_choice(logprobs={"content": content}), **told}

    server = serve(reply)
    engine = HTTPEngine([server.url], "small")
    engine.tokenizer, engine.image_token_id, engine.takes_images = tokenizer, IMAGE, True
    [done] = engine.generate_batch([prompt], [PARAMS], [images])
    assert (done.token_ids, done.log_probs) == ([7, 8], [-0.5, -1.5])
    path, body = server.asked[0]
    assert path == "/v1/chat/completions" and "prompt" not in body and body["stop_token_ids"] == [3]
    [message] = body["messages"]
    parts = message["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "text", "image_url", "text"]
    text = tokenizer.apply_chat_template(
        body["messages"], chat_template=body["chat_template"], tokenize=False
    )
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == short
    for part, picture in zip((parts[1], parts[3]), shown, strict=True):
        file = io.BytesIO(
            base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,"))
        )
        assert Image.open(file).tobytes() == picture.tobytes()
    for other, words in (
        (short, r"got \d+ other tokens of a prompt with images"),
        (None, "got no `prompt_token_ids`"),
    ):
        told["prompt_token_ids"] = other
        with pytest.raises(RolloutError, match=words):
            engine.generate_batch([prompt], [PARAMS], [images])
    with pytest.raises(
        RolloutError, match=r"http\.generate: got a prompt with videos, expected text and images"
    ):
        asyncio.run(engine.generate(prompt, PARAMS, replace(images, videos=((None, {}),))))
    with pytest.raises(
        RolloutError, match=r"http\.generate: got a prompt with images, expected text"
    ):
        HTTPEngine([server.url], "small").generate_batch([prompt], [PARAMS], [images])
