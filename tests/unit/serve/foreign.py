# SPDX-License-Identifier: Apache-2.0
"""Clients of others, unchanged, against a server: `foreign.py renderers|openai|gateway URL`. Runs without Quadriga."""

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from typing import Any

KEY = "sesame"
NUM_ANSWERS = 1000
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


class PlainRenderer:
    """The part of a renderer that `renderers.client.generate` needs for a prompt of token ids."""

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a turn."""
        return [1]

    def parse_response(self, token_ids: list[int], **options: Any) -> Any:
        """A response without any structure."""
        from renderers.base import ParsedResponse

        return ParsedResponse(content=str(token_ids), reasoning_content=None)


async def renderers(url: str) -> None:
    """Its client refuses an answer with a wrong string, count or number."""
    from openai import AsyncOpenAI
    from renderers.client import OverlongPromptError, generate

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
    places = asyncio.Semaphore(100)

    async def ask(number: int) -> dict[str, Any]:
        async with places:
            return await generate(
                client=client,
                renderer=PlainRenderer(),
                messages=[],
                model="m",
                prompt_ids=[5, 6 + number % 50],
                sampling_params={"max_tokens": 8, "temperature": 0.7, "top_p": 0.9},
            )

    answers = await asyncio.gather(*map(ask, range(NUM_ANSWERS)))
    for answer in answers:
        assert answer["completion_ids"] and answer["finish_reason"] == "stop"
        assert set(answer["completion_logprobs"]) == {-0.5}
    try:
        await generate(
            client=client, renderer=PlainRenderer(), messages=[], model="m", prompt_ids=[5] * 2000
        )
        raise AssertionError("an overlong prompt was sent")
    except OverlongPromptError as error:
        assert "1000" in str(error)


async def openai(url: str) -> None:
    """Its package reads messages, calls of tools, streams and errors."""
    from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    options: dict[str, Any] = {"model": "m", "tools": TOOLS, "logprobs": True}
    answer = await client.chat.completions.create(messages=messages, **options)
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"a": 1}
    assert choice.logprobs.content[0].logprob == -0.5
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    stream = await client.chat.completions.create(messages=messages, stream=True, **options)
    names = []
    async for event in stream:
        for part in event.choices[0].delta.tool_calls or []:
            names.append(part.function.name)
    assert names == ["add"]
    assert [model.id async for model in client.models.list()] == ["m"]
    wrong = {
        AuthenticationError: client.with_options(api_key="simsim").models.list(),
        NotFoundError: client.chat.completions.create(model="x", messages=messages),
        BadRequestError: client.chat.completions.create(model="m", messages=messages, n=2),
    }
    for error, call in wrong.items():
        try:
            await call
        except error:
            continue
        raise AssertionError(f"no {error.__name__}")


def gateway(url: str) -> None:
    """Its gateway finds token ids and log-probabilities in what it passes on."""
    port = 20000 + int(time.time() * 10) % 20000
    command = [sys.executable, "-m", "rllm_model_gateway", "--port", str(port), "--store", "memory"]
    process = subprocess.Popen([*command, "--worker", f"{url}/v1"])
    base = f"http://127.0.0.1:{port}"

    def send(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    try:
        for _ in range(300):
            try:
                send("/health")
                break
            except OSError:
                time.sleep(0.1)
        session = send("/sessions", {})["session_id"]
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        send(f"/sessions/{session}/v1/chat/completions", body)
        send("/admin/flush", {})
        [trace] = send(f"/sessions/{session}/traces")
        assert trace["prompt_token_ids"] and trace["completion_token_ids"], trace
        assert set(trace["logprobs"]) == {-0.5}, trace
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    program = {"renderers": renderers, "openai": openai, "gateway": gateway}[sys.argv[1]]
    work = program(sys.argv[2])
    if work is not None:
        asyncio.run(work)
