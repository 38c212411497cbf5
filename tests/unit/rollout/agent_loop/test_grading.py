# SPDX-License-Identifier: Apache-2.0
"""Conversations that are graded as they end, while others go on."""

import asyncio
from typing import Any

import pytest

from quadriga.errors import RolloutError
from quadriga.rewards.outcome import Outcome

ADD = '''
@function_tool
def add(a: int, b: int, *, bonus: int = 0) -> int:
    """Add two numbers."""
    return a + b + bonus
'''
CALL = 'to: <tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>'


def test_graded_while_others_talk(converse, make_prompts, recorder, tool_file) -> None:
    """A conversation is graded with what is known of how it went; grades stand in the rows' order."""
    seen: list[dict[str, Any]] = []

    async def grade(row: dict[str, Any]) -> Outcome:
        seen.append(row)
        await asyncio.sleep(0.05 if "tool" in row["solution_str"] else 0)
        return Outcome(float(row["ground_truth"]), {}, "", "graded")

    prompts = make_prompts(
        ["use it", "say it"],
        data_source=["sums", "sums"],
        reward_model=[{"ground_truth": 1}, {"ground_truth": 2}],
        extra_info=[{"index": 7}, None],
    )
    engine = recorder({"tool\n42<|im_end|>": "done", "use it": CALL, "say it": "42"})
    output = converse(engine, prompts, {"function_tool_path": tool_file(ADD)}, grade=grade)
    assert [outcome.score for outcome in output.non_tensor_batch["reward_outcome"]] == [1.0, 2.0]
    assert seen[0]["solution_str"] == "42"
    (used,) = [row for row in seen if row["extra_info"].get("index") == 7]
    assert used["solution_str"].startswith("to: <tool_call>") and used["solution_str"].endswith(
        "done"
    )
    assert used["extra_info"]["num_turns"] == 3 and used["data_source"] == "sums"
    # The policy's own words, and who said what.
    assert used["policy_str"].startswith("to: <tool_call>") and used["policy_str"].endswith(
        "\ndone"
    )
    assert "42" not in used["policy_str"].splitlines()
    assert [message["role"] for message in used["solution_messages"]] == [
        "assistant",
        "tool",
        "assistant",
    ]
    assert used["solution_messages"][0]["tool_calls"][0]["function"]["name"] == "add"
    assert (used["solution_messages"][1]["name"], used["solution_messages"][1]["content"]) == (
        "add",
        "42",
    )


def test_an_error_of_the_grader_stops_the_run(converse, make_prompts, recorder) -> None:
    """Grading is not the conversation's business: its errors are not recorded as the sample's."""

    async def grade(row: dict[str, Any]) -> Outcome:
        raise RolloutError("grader", got="nothing")

    with pytest.raises(RolloutError, match="grader: got nothing"):
        converse(recorder(["x"]), make_prompts(["?"]), grade=grade, mode="async")
