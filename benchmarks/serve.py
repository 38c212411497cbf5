# SPDX-License-Identifier: Apache-2.0
"""Times `quadriga serve`: sessions of several turns, all at the same time, by a client on the other core.

    .venv/bin/python benchmarks/serve.py scripted MODEL_FOLDER   # calls/s, the server's own time, its memory
    .venv/bin/python benchmarks/serve.py native MODEL_FOLDER     # tokens/s, against one batch of the same requests

`scripted` answers from a file, so that only the server itself is timed. Wanted: at least 150 calls/s, own time at most
250 ms for 99 % of the calls, and at most 20 MB more after 2,000 sessions than after 200. `native` generates 16 tokens a
turn, on both cores; then one batch of the same prompts and seeds runs in a process of its own. Wanted: at least 0.7 of
its tokens/s.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

SESSIONS = 200
TURNS = 5
TOKENS = 16
SERVER_CORE = 0
CLIENT_CORE = 1


async def session(port: int, number: int) -> None:
    """Lead a conversation of several turns over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{number}: what comes after {turn}?"})
        body = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": True}
        content = json.dumps({**body, "return_token_ids": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Session-Id: {number}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", answer, re.IGNORECASE)
        assert length is not None and " 200 " in answer.partition("\r\n")[0], answer
        choice = json.loads(await reader.readexactly(int(length[1])))["choices"][0]
        message = choice["message"]
        messages.append({"role": "assistant", "content": message["content"]})
    writer.close()


async def sessions(port: int, first: int, count: int) -> float:
    """Lead sessions at the same time. Returns the seconds that they took."""
    started = time.perf_counter()
    await asyncio.gather(*(session(port, first + number) for number in range(count)))
    return time.perf_counter() - started


def start_server(model: str, *options: str, core: int | None = None) -> subprocess.Popen[str]:
    """A server in a process of its own, once it listens."""
    command = [sys.executable, "-m", "quadriga", "serve", model, "--port", "0", *options]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def port_of(server: subprocess.Popen[str]) -> int:
    """Port that a server prints."""
    assert server.stdout is not None
    for line in server.stdout:
        address = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if address:
            return int(address[1])
    raise SystemExit("the server did not start")


def memory_mb(pid: int) -> float:
    """Resident memory of a process, in MB."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    resident = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert resident is not None
    return int(resident[1]) / 1000


def metric(port: int, name: str) -> float:
    """A metric of a server."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


def time_scripted(model: str, folder: Path) -> None:
    """Calls/s, own time and memory of the server."""
    responses = folder / "responses.jsonl"
    text = "The number that comes next is the one after it, as always."
    responses.write_text(json.dumps({"response": text}) + "\n", encoding="utf-8")
    rollout = "actor_rollout_ref.rollout"
    options = [f"{rollout}.name=scripted", f"+{rollout}.engine_kwargs.responses_file={responses}"]
    server = start_server(model, *options, core=SERVER_CORE)
    try:
        port = port_of(server)
        os.sched_setaffinity(0, {CLIENT_CORE})
        seconds = asyncio.run(sessions(port, 0, SESSIONS))
        own_s = metric(port, 'quadriga_serve_own_seconds{quantile="0.99"}')
        before = memory_mb(server.pid)
        print(f"{SESSIONS * TURNS / seconds:.0f} calls/s, own time p99 {1000 * own_s:.0f} ms")
        for first in range(SESSIONS, 10 * SESSIONS, SESSIONS):
            asyncio.run(sessions(port, first, SESSIONS))
        after = memory_mb(server.pid)
        print(f"memory {before:.0f} MB, after {10 * SESSIONS} sessions {after - before:+.1f} MB")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def time_native(model: str, folder: Path) -> None:
    """Tokens/s of the server and of one batch."""
    record = folder / "calls.jsonl"
    server = start_server(model, "--record", str(record), "--timeout", "3000")
    try:
        seconds = asyncio.run(sessions(port_of(server), 0, SESSIONS))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    num_tokens = SESSIONS * TURNS * TOKENS
    print(f"server: {num_tokens / seconds:.1f} tokens/s", flush=True)
    reply = subprocess.run(
        [sys.executable, __file__, "batch", model, "--record", str(record)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    batch_s = float(reply.stdout.split()[-1])
    print(f"batch:  {num_tokens / batch_s:.1f} tokens/s, so the server has {batch_s / seconds:.2f}")


def time_batch(model: str, record: Path) -> None:
    """Print the seconds that one batch of the recorded requests takes."""
    import torch

    from quadriga.config import load_config
    from quadriga.observe.machine import choose_dtype
    from quadriga.rollout import SamplingParams
    from quadriga.trainer.build import build_tokenizer
    from quadriga.workers.rollout_engines import make_rollout_engine

    calls = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    config = load_config(overrides=[f"actor_rollout_ref.model.path={model}"]).config
    device = torch.device("cpu")
    model_dtype = config.actor_rollout_ref.actor.fsdp_config.model_dtype
    dtype = choose_dtype(model_dtype, device).value
    engine = make_rollout_engine(config, build_tokenizer(config), device=device, dtype=dtype)
    sampling = [SamplingParams(TOKENS, seed=call["seed"], ignore_eos=True) for call in calls]
    engine.generate_batch([calls[0]["prompt_ids"]], sampling[:1])
    started = time.perf_counter()
    completions = engine.generate_batch([call["prompt_ids"] for call in calls], sampling)
    seconds = time.perf_counter() - started
    same = sum(
        completion.token_ids == call["token_ids"]
        for completion, call in zip(completions, calls, strict=True)
    )
    print(f"{same} of {len(calls)} answers are the server's", file=sys.stderr)
    print(seconds)


def main() -> None:
    """Run a benchmark."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=("scripted", "native", "batch"))
    parser.add_argument("model", help="a Hugging Face folder with a chat template")
    parser.add_argument("--record", type=Path, help="for batch: the server's record")
    arguments = parser.parse_args()
    if arguments.what == "batch":
        time_batch(arguments.model, arguments.record)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = time_scripted if arguments.what == "scripted" else time_native
        run(arguments.model, Path(folder))


if __name__ == "__main__":
    main()
