# SPDX-License-Identifier: Apache-2.0
"""Rollouts with several rows in whole runs: rows stay together, and each way to them gives the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Every second rollout of a prompt has a second agent, and so a second row.
LOOP = """
from quadriga.rollout.agent_loop import AgentLoop, register

@register("writer_and_reader")
class WriterAndReader(AgentLoop):
    async def run(self, chat):
        chat.agent = "writer"
        await chat.generate(max_tokens=7)
        if chat.sample.columns["sample_index"] == 1:
            reader = chat.another("reader")
            reader.begin([{"role": "user", "content": chat.turns[-1].text}])
            await reader.generate(max_tokens=3)
"""
AGENT = "actor_rollout_ref.rollout.agent"
LOCKSTEP = ("async_training.enable=True", "async_training.max_staleness=0")
SKIP = "actor_rollout_ref.rollout.skip"


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    """Options of a run with this loop, two mini-batches a step, and rows in files."""
    (tmp_path / "loop.py").write_text(LOOP)
    return (
        "actor_rollout_ref.rollout.mode=async",
        "data.return_raw_chat=True",
        f"{AGENT}.agent_loop_path={tmp_path / 'loop.py'}",
        f"{AGENT}.default_agent_loop=writer_and_reader",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.test_freq=1",
    )


def test_rows_of_a_rollout_stay_together(
    options: tuple[str, ...],
    train: Callable[..., Path],
    metric_lines: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """Dumps name rollouts and agents; a replay and a run that generates ahead learn the same numbers."""
    dump = f"trainer.rollout_data_dir={tmp_path / 'rows'}"
    cache = (f"{SKIP}.enable=True", f"{SKIP}.dump_dir={tmp_path / 'cache'}")
    lines = metric_lines(train(*options, *cache, dump, run="first"))

    rows = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    agents: dict[str, list[str]] = {}
    scores: dict[str, set[float]] = {}
    for row in rows:
        agents.setdefault(row["rollout_id"], []).append(row["agent"])
        scores.setdefault(row["rollout_id"], set()).add(row["score"])
    assert list(agents.values()) == [["writer"], ["writer", "reader"]] * 4
    # The reader has the grade of the rollout.
    assert all(len(values) == 1 for values in scores.values())
    assert len(lines) == 2 and lines[0]["actor/computed_sequences"] <= len(rows)

    def numbers(run: Path) -> list[dict[str, float]]:
        learned = ("actor/", "critic/", "val")
        return [
            {name: value for name, value in line.items() if name.startswith(learned)}
            for line in metric_lines(run)
        ]

    first = numbers(tmp_path / "first")
    assert numbers(train(*options, *cache, run="replayed")) == first
    assert numbers(train(*options, *LOCKSTEP, run="ahead")) == first
