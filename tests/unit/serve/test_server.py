# SPDX-License-Identifier: Apache-2.0
"""The server over HTTP: what it answers, whom it refuses and why, and what it does when somebody leaves."""

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from quadriga.errors import ConfigError
from quadriga.serve.gate import MAX_BODY_BYTES
from quadriga.serve.server import require_address
from tests.limits import SOON_S
from tests.unit.serve.conftest import SERVE, Halves, Served

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
USER = {"role": "user", "content": "hello"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_generate(serve: Callable[..., Served], tmp_path: Path) -> None:
    """The wire has the log-probs that were sampled from, the record these and the unfiltered ones."""
    record = tmp_path / "calls.jsonl"
    served = serve(overrides=[f"{SERVE}.record_file={record}"])
    sampling = {"max_tokens": 5000, "top_p": 0.5, "stop_token_ids": [7], "logprobs": 1}
    body = {"model": "m", "token_ids": [9, 10], "sampling_params": sampling}
    [choice] = served.post(GENERATE, body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == [
        {"token": f"token_id:{token}", "logprob": -0.5} for token in choice["token_ids"]
    ]
    [[(prompt, params)]] = served.engine.batches
    assert prompt == [9, 10] and params.max_tokens == 998 and params.top_p == 0.5
    [line] = map(json.loads, record.read_text().splitlines())
    assert line["prompt_ids"] == [9, 10] and line["token_ids"] == choice["token_ids"]
    assert set(line["sampled_log_probs"]) == {-0.5} and set(line["log_probs"]) == {-1.0}
    assert set(line["versions"]) == {3} and line["seed"] == params.seed

    [model] = served.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("m", 1000)
    metrics = served.client.get("/metrics").text
    assert "quadriga_serve_answered_total 1\n" in metrics


def test_chat_with_tools_and_as_events(serve: Callable[..., Served]) -> None:
    """A call of a tool is read, its turn may come back, and events carry the same answer."""
    served = serve(Halves(f"Yes. {CALL}"))
    body = {"messages": [USER], "tools": [ADD], "logprobs": True, "return_token_ids": True}
    answer = served.post(CHAT, body).json()
    [choice] = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "Yes."
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]
    prompt = served.post("/tokenize", body).json()["tokens"]
    assert answer["prompt_token_ids"] == prompt

    result = {"role": "tool", "tool_call_id": call["id"], "content": "2<|im_end|>"}
    later = {**body, "messages": [USER, message, result], "stream": True}
    lines = [line for line in served.post(CHAT, later).text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    [_, content, end] = [event["choices"][0] for event in events]
    assert content["token_ids"] == choice["token_ids"]
    assert content["delta"]["tool_calls"][0]["function"] == call["function"]
    assert end["finish_reason"] == "tool_calls"
    # A tool cannot end its own turn.
    text = served.engine.tokenizer.decode(events[0]["prompt_token_ids"])
    assert "2< |im_end|>" in text


def test_arguments_of_calls_cannot_end_a_turn(serve: Callable[..., Served]) -> None:
    """Special tokens in them are broken in two, like those in texts."""
    engine = Halves()
    engine.tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments['a'] }}{% endfor %}{% endfor %}"
    )
    function = {"name": "add", "arguments": '{"a": "1<|im_end|>"}'}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    tokens = serve(engine).post("/tokenize", {"messages": [message]}).json()["tokens"]
    assert engine.tokenizer.decode(tokens) == "1< |im_end|>"


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (CHAT, {"model": "other"}, "model: got 'other', expected 'm'"),
        (CHAT, {"messages": []}, "messages: got an empty list"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content: got null"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "content[0].type: got a part of type 'image_url', expected 'text'. Leave the part out: m takes no others",
        ),
        (CHAT, {"messages": [USER] * 200}, "the prompt: got"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function: got nothing"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters: got [1], expected an object",
        ),
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "tool_calls[0].function.arguments: got no JSON",
        ),
        (
            CHAT,
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a": {"anyOf": 1}}},
                        },
                    }
                ]
            },
            "properties.a.anyOf: got 1, expected a list",
        ),
        (CHAT, {"tool_choice": "required"}, "tool_choice: got 'required', expected 'auto'"),
        (CHAT, {"n": 2}, "n: got 2, expected 1. Send the call again"),
        (CHAT, {"previous_response_id": "r"}, "previous_response_id: got 'r', expected nothing"),
        (CHAT, {"store": True}, "store: got True, expected False"),
        (CHAT, {"temperature": -1}, "temperature: got -1"),
        (CHAT, {"temperature": 10**400}, "temperature: got 1000"),
        (CHAT, {"stop": [1]}, "stop: got 1, expected a text"),
        (GENERATE, {"token_ids": [1, 10**9]}, "token_ids[1]: got 1000000000"),
        (GENERATE, {"token_ids": []}, "the prompt: got 0 tokens"),
        (
            GENERATE,
            {"token_ids": [1], "sampling_params": {"stop_token_ids": [10**30]}},
            "sampling_params.stop_token_ids[0]: got 1000",
        ),
        (
            "/v1/responses",
            {},
            "path: got POST '/v1/responses', expected a method of one of /health",
        ),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 3}}, "sampling_params.n: got 3"),
        (GENERATE, [], "body: got [], expected an object"),
        ("/tokenize", {}, "prompt: got nothing, expected a text"),
    ],
)
def test_wrong_calls_get_one_sentence(
    serve: Callable[..., Served], path: str, change: Any, message: str
) -> None:
    """A refusal names the field, and repeating the call would not help."""
    served = serve()
    body = {"messages": [USER], **change} if path == CHAT else change
    response = served.client.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (400, 404)
    assert message in response.json()["error"]["message"]
    assert not served.engine.batches


def test_only_callers_with_the_key_come_in(serve: Callable[..., Served]) -> None:
    """The key in a header, a host of ours, JSON; bodies and headers within limits; health is open."""
    served = serve(key="sesame")
    key = {"x-api-key": "sesame"}
    plain = {**key, "Content-Type": "application/json"}
    large = bytes(MAX_BODY_BYTES + 1)
    bomb = {**plain, "Content-Encoding": "gzip"}
    calls: list[tuple[int, dict[str, str], bytes]] = [
        (401, {"Content-Type": "application/json"}, b"{}"),
        (401, {"Authorization": "Basic sesame", "Content-Type": "application/json"}, b"{}"),
        (401, {"Authorization": "Bearer simsim", "Content-Type": "application/json"}, b"{}"),
        (403, {**plain, "Host": "evil.example"}, b"{}"),
        (415, {**key, "Content-Type": "text/plain"}, b"{}"),
        (413, plain, large),
        (413, bomb, gzip.compress(large)),
        (400, bomb, b"no gzip"),
        (400, bomb, gzip.compress(b"{}") + gzip.compress(b"{}")),
        (431, {**plain, "X-Large": "x" * 16384}, b"{}"),
        (400, plain, b"[" * 100_000),
    ]
    for status, headers, content in calls:
        response = served.client.post("/tokenize", content=content, headers=headers)
        assert response.status_code == status, response.text
        assert "sesame" not in response.text
    assert served.client.get("/health").status_code == 200
    assert served.client.get("/metrics").status_code == 401
    assert served.client.get("/v1/models", params={"api_key": "sesame"}).status_code == 401
    bearer = {"Authorization": "Bearer sesame"}
    assert served.client.get("/v1/models", headers=bearer).status_code == 200


def test_what_has_arrived_is_the_next_batch(serve: Callable[..., Served]) -> None:
    """Calls during a batch form the next one, and one that fails does not spoil the others."""
    served = serve()
    served.engine.goes_on.clear()
    statuses: list[tuple[int, int]] = []

    def ask(token: int) -> None:
        response = served.post(GENERATE, {"token_ids": [token]})
        statuses.append((token, response.status_code))

    threads = [threading.Thread(target=ask, args=(token,)) for token in (5, 6, 0, 7)]
    threads[0].start()
    _until(lambda: served.engine.batches)
    for thread in threads[1:]:
        thread.start()
    _until(lambda: "in_flight 4" in served.client.get("/metrics").text)
    # The calls are on their way to the engine, whose thread is blocked.
    time.sleep(0.2)
    served.engine.goes_on.set()
    for thread in threads:
        thread.join(SOON_S)
    assert sorted(len(batch) for batch in served.engine.batches[:2]) == [1, 3]
    assert sorted(statuses) == [(0, 500), (5, 200), (6, 200), (7, 200)]


@pytest.mark.parametrize(
    ("path", "body"),
    [(GENERATE, {"token_ids": [5]}), (CHAT, {"messages": [USER], "stream": True})],
)
def test_a_client_that_leaves_gives_its_seed_back(
    serve: Callable[..., Served], path: str, body: Any
) -> None:
    """The call is given up, and the one that repeats it is sampled with the same seed."""
    served = serve()
    served.engine.goes_on.clear()
    with pytest.raises(httpx2.ReadTimeout):
        served.post(path, body, timeout=0.3)
    _until(lambda: "in_flight 0" in served.client.get("/metrics").text)
    served.engine.goes_on.set()
    assert served.post(path, body).status_code == 200
    seeds = [params.seed for batch in served.engine.batches for _, params in batch]
    assert len(seeds) == 2 and len(set(seeds)) == 1


def test_calls_wait_until_the_engine_is_free(serve: Callable[..., Served]) -> None:
    """Between two generations calls wait; the end of a generation waits for those in the engine."""
    served = serve(overrides=[f"{SERVE}.timeout_s=0.5"])
    with served.queue.opened():
        assert served.post(GENERATE, {"token_ids": [5]}).status_code == 200
    response = served.post(GENERATE, {"token_ids": [5]})
    assert response.status_code == 504 and "no answer within 0.5 s" in response.text
    with served.queue.opened():
        assert served.post(GENERATE, {"token_ids": [5]}).status_code == 200


def test_closing_tells_those_who_wait_to_try_again(serve: Callable[..., Served]) -> None:
    """No client waits for a server that has gone."""
    served = serve()
    served.engine.goes_on.clear()
    responses: list[httpx2.Response] = []
    thread = threading.Thread(
        target=lambda: responses.append(served.post(GENERATE, {"token_ids": [5]}))
    )
    thread.start()
    _until(lambda: served.engine.batches)
    served.server.close()
    thread.join(SOON_S)
    served.engine.goes_on.set()
    assert responses[0].status_code == 503 and "shutdown" in responses[0].text


def test_addresses_that_cannot_be_served(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A port in use, other machines without a key, and a record that cannot be written."""
    monkeypatch.delenv("QUADRIGA_SERVE_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=r"port: got .*, expected a free port\. Set"):
            serve(overrides=[f"{SERVE}.port={port}"])
    config = serve(overrides=[f"{SERVE}.host=0.0.0.0"]).config
    with pytest.raises(ConfigError, match="without a key"):
        require_address(config)
    config = serve(overrides=[f"{SERVE}.record_file={tmp_path}"]).config
    with pytest.raises(ConfigError, match=r"record_file: got .* \(Is a directory\)"):
        require_address(config)
