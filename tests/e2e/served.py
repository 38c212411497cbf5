# SPDX-License-Identifier: Apache-2.0
"""An agent that reaches the policy only through the server of its run, and trains on what it gets there."""

import json
import zlib
from pathlib import Path
from typing import Any

LOOP = """import json
from pathlib import Path

import httpx2

from quadriga.rollout.agent_loop import AgentLoop, Turn, register


@register("AGENT_NAME")
class Outside(AgentLoop):
    async def run(self, chat):
        server = json.loads(Path(SERVER_FILE).read_text())
        headers = {"x-api-key": server["key"], "x-session-id": chat.sample.uid}
        body = {"model": server["model"], "token_ids": chat.prompt_ids}
        body["sampling_params"] = {"max_tokens": 8, "logprobs": 1}
        async with httpx2.AsyncClient(timeout=100) as client:
            url = server["url"] + "/inference/v1/generate"
            reply = await client.post(url, json=body, headers=headers)
        reply.raise_for_status()
        [choice] = reply.json()["choices"]
        tokens = choice["token_ids"]
        log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        turn = Turn("assistant", tokens, chat.encoder.decode(tokens, with_special=True), 0.0)
        chat.append_turn(turn, 1, log_probs, choice["weight_versions"])
"""
ROLLOUT = "actor_rollout_ref.rollout"


def options(folder: Path, run: Path) -> tuple[str, ...]:
    """Overrides of a run whose agent asks the server.

    Args:
        folder: where the agent and the record are written.
        run: directory of the run.
    """
    # Names of agents are registered once in a process.
    name = f"outside_{zlib.crc32(str(run).encode())}"
    text = LOOP.replace("SERVER_FILE", repr(str(run / "server.json"))).replace("AGENT_NAME", name)
    (folder / "outside.py").write_text(text, encoding="utf-8")
    return (
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.agent.agent_loop_path={folder / 'outside.py'}",
        f"{ROLLOUT}.agent.default_agent_loop={name}",
        f"{ROLLOUT}.serve.enable=True",
        f"{ROLLOUT}.serve.record_file={folder / 'calls.jsonl'}",
        "data.return_raw_chat=True",
        "trainer.total_training_steps=2",
    )


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The record of a run."""
    lines = (folder / "calls.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def first_tokens(folder: Path) -> dict[tuple[str, int], tuple[int, list[int]]]:
    """Seed and tokens of each call that the first weights answered, by session and number."""
    first = [call for call in recorded(folder) if set(call["versions"]) == {0}]
    return {(call["session"], call["number"]): (call["seed"], call["token_ids"]) for call in first}
