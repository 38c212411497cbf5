# SPDX-License-Identifier: Apache-2.0
"""Checks of conversations: `rollout.multi_turn`, `rollout.agent` and `rollout.trace_dir`."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from quadriga.config.findings import Findings
from quadriga.config.multi_turn import AgentConfig, MultiTurnConfig
from quadriga.config.root import Config
from quadriga.config.tool_files import read_interaction_file, read_tool_file
from quadriga.errors import ConfigError

FORMATS = ("hermes", "qwen3_coder", "glm", "gpt-oss")
LOOPS = ("single_turn_agent", "tool_agent")
_ROLLOUT = "actor_rollout_ref.rollout"
_KEY = f"{_ROLLOUT}.multi_turn"


def check_multi_turn(config: Config, found: Findings) -> None:
    """Refuses conversations that cannot be held, and says which keys are not used."""
    rollout = config.actor_rollout_ref.rollout
    turns, agent = rollout.multi_turn, rollout.agent
    if rollout.mode == "sync":
        _check_sync(config, found)
        return
    _check_loop(agent, turns, found)
    if not turns.enable:
        _notice_unused(turns, _KEY, f"{_KEY}.enable is false", found)
        return
    if turns.format not in FORMATS:
        _refuse_name(f"{_KEY}.format", turns.format, FORMATS, found)
    if not config.data.return_raw_chat:
        found.refuse(
            "data.return_raw_chat",
            got=f"false, with {_KEY}.enable=True",
            expected="true",
            fix="The prompt is rendered with its tools, out of its messages.",
        )
    _check_files(turns, found)
    is_tool_agent = agent.default_agent_loop == "tool_agent"
    has_other_side = turns.function_tool_path or turns.tool_config_path or turns.interaction_config_path
    if is_tool_agent and not has_other_side:
        found.refuse(
            _KEY,
            got="neither tools nor user simulators, with agent.default_agent_loop=tool_agent",
            expected="function_tool_path, tool_config_path or interaction_config_path",
            fix=f"Set {_KEY}.function_tool_path to a Python file with @function_tool functions.",
        )
    if agent.default_agent_loop == "single_turn_agent":
        found.notice(
            f"{_ROLLOUT}.agent.default_agent_loop: only samples whose column agent_name says so take several turns; "
            "tool_agent would be all of them."
        )


def _check_sync(config: Config, found: Findings) -> None:
    rollout = config.actor_rollout_ref.rollout
    fix = f"Set {_ROLLOUT}.mode=async."
    if rollout.multi_turn.enable:
        found.refuse(f"{_KEY}.enable", got="true, with rollout.mode=sync", expected="rollout.mode=async", fix=fix)
        return
    because = f"{_ROLLOUT}.mode is sync"
    _notice_unused(rollout.multi_turn, _KEY, because, found)
    _notice_unused(rollout.agent, f"{_ROLLOUT}.agent", because, found)
    if rollout.trace_dir is not None:
        found.notice(f"{_ROLLOUT}.trace_dir: not used, for {because}.")


def _check_loop(agent: AgentConfig, turns: MultiTurnConfig, found: Findings) -> None:
    key = f"{_ROLLOUT}.agent"
    if agent.agent_loop_path is not None:
        _check_file(f"{key}.agent_loop_path", agent.agent_loop_path, "a Python file", found)
    elif agent.default_agent_loop not in LOOPS:
        _refuse_name(f"{key}.default_agent_loop", agent.default_agent_loop, LOOPS, found)
    if agent.default_agent_loop == "tool_agent" and not turns.enable:
        fix = f"Set {_KEY}.enable=True."
        found.refuse(f"{key}.default_agent_loop", got="tool_agent", expected="several turns to be allowed", fix=fix)


def _check_files(turns: MultiTurnConfig, found: Findings) -> None:
    if turns.function_tool_path is not None:
        _check_file(f"{_KEY}.function_tool_path", turns.function_tool_path, "a Python file", found)
    readers: tuple[tuple[str, str | None, Callable[[str], Any]], ...] = (
        ("tool_config_path", turns.tool_config_path, read_tool_file),
        ("interaction_config_path", turns.interaction_config_path, read_interaction_file),
    )
    for name, path, read in readers:
        if path is None or not _check_file(f"{_KEY}.{name}", path, "a YAML file", found):
            continue
        try:
            read(path)
        except ConfigError as error:
            found.problems.append(error)


def _check_file(key: str, path: str, what: str, found: Findings) -> bool:
    if os.path.isfile(os.path.expanduser(path)):
        return True
    fix = "There is no such file; relative paths start where the command is run."
    found.refuse(key, got=f"'{path}'", expected=what, fix=fix)
    return False


def _refuse_name(key: str, name: str, names: tuple[str, ...], found: Findings) -> None:
    close = get_close_matches(name, names, n=1)
    fix = f"Did you mean {close[0]}?" if close else "A loop of one's own needs rollout.agent.agent_loop_path."
    found.refuse(
        key, got=f"'{name}'", expected=f"one of {', '.join(names)}", fix=fix if names is LOOPS or close else ""
    )


def _notice_unused(section: MultiTurnConfig | AgentConfig, key: str, because: str, found: Findings) -> None:
    names = [name for name in type(section).model_fields if getattr(section, name) != getattr(type(section)(), name)]
    if names:
        found.notice(f"{', '.join(f'{key}.{name}' for name in names)}: not used, for {because}.")
