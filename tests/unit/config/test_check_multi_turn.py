# SPDX-License-Identifier: Apache-2.0
"""Conversations that cannot be held are refused before anything starts; keys without effect are named."""

from pathlib import Path
from typing import Any

import pytest

from quadriga.config import Config
from quadriga.config.checks import check_multi_turn
from quadriga.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"


def _check(rollout: dict[str, Any], *, return_raw_chat: bool = True) -> tuple[list[ConfigError], list[str]]:
    """Problems and notices."""
    tree = {"data": {"return_raw_chat": return_raw_chat}, "actor_rollout_ref": {"rollout": rollout}}
    found = list(check_multi_turn(Config.model_validate(tree)))
    return [one for one in found if isinstance(one, ConfigError)], [one for one in found if isinstance(one, str)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files that are there: `tools.py`, `good` and `bad` YAML of tools, and YAML of user simulators."""
    texts = {
        "tools.py": "",
        "good.yaml": "mcp_servers: {a: {url: 'http://127.0.0.1:1/mcp'}}",
        "bad.yaml": "tools: [{class_nam: x.py:X}]",
        "users.yaml": "interaction: [{name: a, class_name: x.py:X}]",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in texts}


def test_a_run_without_conversations() -> None:
    """Nothing to say of the defaults, nor of samples as tasks of their own."""
    for mode in ("sync", "async"):
        assert _check({"mode": mode}, return_raw_chat=False) == ([], [])


def test_tools_that_are_all_there(files: dict[str, str]) -> None:
    """A whole configuration passes without a word."""
    turns = {
        "enable": True,
        "function_tool_path": files["tools.py"],
        "tool_config_path": files["good.yaml"],
        "interaction_config_path": files["users.yaml"],
        "format": "glm",
    }
    rollout = {"mode": "async", "multi_turn": turns, "agent": {"default_agent_loop": "tool_agent"}}
    assert _check(rollout) == ([], [])


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({"multi_turn": {"enable": True}}, f"Set {_ROLLOUT}.mode=async."),
        ({"mode": "async", "agent": {"default_agent_loop": "tool_agent"}}, f"Set {_ROLLOUT}.multi_turn.enable=True."),
        ({"mode": "async", "agent": {"default_agent_loop": "tol_agent"}}, "Did you mean tool_agent?"),
        ({"mode": "async", "agent": {"default_agent_loop": "zzz"}}, "agent.agent_loop_path"),
        ({"mode": "async", "agent": {"agent_loop_path": "no.py"}}, "There is no such file"),
        ({"mode": "async", "multi_turn": {"enable": True, "format": "qwen3"}}, "Did you mean qwen3_coder?"),
        ({"mode": "async", "multi_turn": {"enable": True, "function_tool_path": "no.py"}}, "There is no such file"),
        (
            {"mode": "async", "multi_turn": {"enable": True}, "agent": {"default_agent_loop": "tool_agent"}},
            "got neither tools nor user simulators",
        ),
    ],
)
def test_what_is_refused(rollout: dict[str, Any], expected: str) -> None:
    """One problem each, which says what to set."""
    (problem,) = _check(rollout)[0]
    assert expected in str(problem)


def test_the_messages_of_prompts_are_needed() -> None:
    """Tools are rendered out of them."""
    (problem,) = _check({"mode": "async", "multi_turn": {"enable": True}}, return_raw_chat=False)[0]
    assert str(problem).startswith("data.return_raw_chat: got false")


def test_a_yaml_file_with_a_mistake(files: dict[str, str]) -> None:
    """Its file, line and key are named, with everything else."""
    (problem,) = _check({"mode": "async", "multi_turn": {"enable": True, "tool_config_path": files["bad.yaml"]}})[0]
    assert "bad.yaml, line 1" in str(problem) and "class_name: got nothing" in str(problem)


def test_keys_without_effect() -> None:
    """Named in a notice, for what they are not used."""
    (turns, agent, trace) = _check(
        {"multi_turn": {"format": "glm"}, "agent": {"default_agent_loop": "tool_agent"}, "trace_dir": "x"}
    )[1]
    assert turns == f"{_ROLLOUT}.multi_turn.format: not used, for {_ROLLOUT}.mode is sync."
    assert agent.startswith(f"{_ROLLOUT}.agent.default_agent_loop: not used")
    assert trace.startswith(f"{_ROLLOUT}.trace_dir: not used")
    (unused,) = _check({"mode": "async", "multi_turn": {"max_user_turns": 3}})[1]
    assert unused == f"{_ROLLOUT}.multi_turn.max_user_turns: not used, for {_ROLLOUT}.multi_turn.enable is false."
    (single,) = _check({"mode": "async", "multi_turn": {"enable": True}})[1]
    assert "agent_name" in single
