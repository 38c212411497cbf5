# SPDX-License-Identifier: Apache-2.0
"""Servers of small models, in processes of their own; and requests that come to an engine and go."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from quadriga.rollout.interface import Completion, RolloutEngine, SamplingParams

LIMIT_S = 240.0
END_S = 60.0

Server = tuple[str, "subprocess.Popen[bytes]"]
"""Its address, and its process."""


@contextmanager
def serving(
    module: str,
    options: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    end: signal.Signals,
) -> Iterator[Server]:
    """A server that answers.

    Args:
        module: that `python -m` runs; it is told its host and its port.
        options: further words of its command line.
        variables: of its environment, besides those of this process.
        log: where it writes.
        end: signal that ends it and its children, where it still runs.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=os.environ | variables,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await(url, process, log)
        yield url, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, end)
            process.wait(END_S)


def _await(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"no server answers at {url}: {log.read_text(errors='replace')[-3000:]}")


def require_coming_and_going(
    engine: RolloutEngine, prompts: Sequence[list[int]], long: SamplingParams, pause_s: float
) -> None:
    """A short one that comes later ends earlier; one is cancelled; abort ends the rest with what they have.

    Args:
        engine: computes beside this process.
        prompts: two of them.
        long: an answer that is not over before the others are.
        pause_s: after which long answers have begun.
    """

    async def scene() -> tuple[Completion, asyncio.Task[Completion], Completion]:
        slow, unwanted = (asyncio.create_task(engine.generate(prompts[0], long)) for _ in range(2))
        await asyncio.sleep(pause_s)
        short = await engine.generate(prompts[1], replace(long, max_tokens=2))
        assert not slow.done()
        unwanted.cancel()
        await asyncio.gather(unwanted, return_exceptions=True)
        await asyncio.to_thread(engine.abort)
        return short, unwanted, await slow

    short, unwanted, slow = asyncio.run(scene())
    assert (len(short.token_ids), short.finish_reason) == (2, "length")
    assert unwanted.cancelled()
    assert slow.finish_reason == "abort"
    assert 0 < len(slow.token_ids) == len(slow.log_probs) < long.max_tokens
