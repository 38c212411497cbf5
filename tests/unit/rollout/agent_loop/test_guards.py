# SPDX-License-Identifier: Apache-2.0
"""Loops of one's own that hang, block, leave or print without end: they cost their own conversation."""

import asyncio
import io
import logging
import os
import re
import sys
from typing import Any

import pytest

from quadriga.observe import watchdog
from quadriga.protocol import DataProto
from quadriga.rollout.agent_loop.guards import BoundedOutput, guard_users_code, num_printed
from quadriga.rollout.agent_loop.loops import REGISTRY


def _rows(output: DataProto, name: str) -> list[Any]:
    return list(output.non_tensor_batch[name])


LOOPS = """
@register("test_bad")
class Bad(AgentLoop):
    async def run(self, chat):
        turn = await chat.generate()
        if "wait" in turn.text:
            await asyncio.sleep(1000)
        if "sleep" in turn.text:
            time.sleep(1000)
        if "spin" in turn.text:
            while True:
                pass
        if "exit" in turn.text:
            raise SystemExit("enough")
        if "cancelled" in turn.text:
            raise asyncio.CancelledError
        if "print" in turn.text:
            print("x" * 10_000_000)
            sys.stdout.close()
            sys.stdout = open(os.devnull, "w")
            os.chdir("/")
        if "fork" in turn.text:
            await self.services.thread.call("fork", os.fork, {}, 10)
        if "copy" in turn.text:
            os.fork()
"""
ENDS = {
    "fine": "stop",
    "wait": "loop_error: TimeoutError: the loop took over 0.5 s by itself after turn 1",
    "sleep": "loop_error: TimeoutError: the loop blocks all conversations for 0.5 s, at .*bad.py:\\d+ in run",
    "spin": "loop_error: TimeoutError: the loop blocks all conversations for 0.5 s, at .*bad.py:\\d+ in run",
    "exit": "loop_error: SystemExit: enough",
    "cancelled": "loop_error: CancelledError",
    "print": "stop",
    "fork": "stop",
    "copy": "stop",
}


def test_a_loop_that_fails_ends_its_own_conversation(
    converse, make_prompts, recorder, tool_file, caplog
) -> None:
    """Whatever it does, hang and block included: the others go on, and the process is as it was before."""
    REGISTRY.pop("test_bad", None)
    path = tool_file("import os, sys\n" + LOOPS, "bad.py")
    before = (os.getcwd(), sys.stdout)
    prompts = make_prompts(list(ENDS), agent_name=["test_bad"] * len(ENDS))
    engine = recorder({name: name for name in ENDS})
    with caplog.at_level(logging.WARNING):
        output = converse(
            engine, prompts, mode="async", agent={"agent_loop_path": path, "timeout_s": 0.5}
        )
    for reason, expected in zip(_rows(output, "finish_reason"), ENDS.values(), strict=True):
        assert re.match(expected, reason), (reason, expected)
    assert output.meta_info["metrics"]["rollout/num_failures"].value == 5
    assert (os.getcwd(), sys.stdout) == before
    assert "conversations printed 9,995,905 more characters" in caplog.text
    assert "left the working directory" in caplog.text


def test_batches_that_overlap_restore_the_streams() -> None:
    """The first to begin ends first, as in a stream of rollouts."""
    before = (sys.stdout, sys.stderr)

    async def overlap() -> None:
        first = guard_users_code(60)
        first.__enter__()
        with guard_users_code(60):
            first.__exit__(None, None, None)
            assert isinstance(sys.stdout, BoundedOutput)

    asyncio.run(overlap())
    assert (sys.stdout, sys.stderr) == before


def test_prints_that_cannot_be_shown_are_counted() -> None:
    """They neither fail nor end the conversation; what others print fails as ever."""
    with (
        open("/dev/full", "wb", buffering=0) as disk,
        io.TextIOWrapper(disk, "ascii", write_through=True) as text,
    ):
        output = BoundedOutput(text)
        is_conversation = num_printed.set([0])
        print("é", file=output, flush=True)
        num_printed.reset(is_conversation)
        assert output.num_left_out == 2
        with pytest.raises(OSError, match="No space left"):
            print("e", file=output, flush=True)


def test_a_long_batch_says_what_its_conversations_are_at(
    converse, make_prompts, recorder, tool_file, capsys, monkeypatch
) -> None:
    """And a hung loop is among them until its limit."""
    monkeypatch.setattr(watchdog, "EVERY_S", 0.1)
    REGISTRY.pop("test_bad", None)
    path = tool_file("import os, sys\n" + LOOPS, "bad.py")
    prompts = make_prompts(["fine", "wait"], agent_name=["test_bad"] * 2)
    converse(
        recorder({"fine": "fine", "wait": "wait"}),
        prompts,
        mode="async",
        agent={"agent_loop_path": path, "timeout_s": 0.5},
    )
    assert "for 2 conversations: 1 ended, 1 in the loop after turn 1" in capsys.readouterr().out
