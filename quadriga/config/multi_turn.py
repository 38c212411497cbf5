# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.multi_turn` and `.agent`: multi-turn responses with tools or a user simulator.

Tools that are classes or MCP servers stand in a YAML file of their own (`examples/tools/tools.yaml`), user simulators
in another one (`examples/tools/interactions.yaml`). A class is `file.py:Name`, the file seen from the folder of the
YAML file, or `package.module.Name`.
"""

import re
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from quadriga.config.base import Section, refuse
from quadriga.config.types import Count, Name, PathText
from quadriga.config.yaml_text import combined, read_yaml
from quadriga.errors import ConfigError

FORMATS = ("hermes", "qwen3_coder", "glm", "gpt-oss")
LOOPS = ("single_turn_agent", "tool_agent")
FileSection = TypeVar("FileSection", bound=Section)


class ToolEntry(Section):
    """A class of tools: where it is, arguments of its `__init__`, a schema instead of what `execute` says of itself."""

    class_name: Name
    config: dict[str, Any] = Field(default_factory=dict)
    tool_schema: dict[str, Any] | None = None


class ServerEntry(Section):
    """An MCP server: the `url` of one that runs, or a program that speaks over its standard input and output. It is
    started in the folder `cwd`, null for that of the YAML file. `tools` names those that are offered; null: all."""

    command: Name | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None
    url: Name | None = None
    tools: list[str] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "ServerEntry":
        if (self.command is None) == (self.url is None):
            raise refuse("either command or url", "A server is started, or it runs already.")
        return self


class ToolFile(Section):
    """`multi_turn.tool_config_path`."""

    tools: list[ToolEntry] = Field(default_factory=list)
    mcp_servers: dict[str, ServerEntry] = Field(default_factory=dict)


class InteractionEntry(Section):
    """A user simulator: its name in `interaction_kwargs` of a row, where its class is, arguments of its `__init__`."""

    name: str = ""
    class_name: Name
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Without a name it is called like its class, in small letters and without the ending "Interaction"."""
        if (
            not isinstance(given, dict)
            or given.get("name")
            or not isinstance(given.get("class_name"), str)
        ):
            return given
        return {
            **given,
            "name": re.split(r"[.:]", given["class_name"])[-1].removesuffix("Interaction").lower(),
        }


class InteractionFile(Section):
    """`multi_turn.interaction_config_path`."""

    interaction: list[InteractionEntry]


class LoopEntry(Section):
    """An agent loop: its name in the column `agent_name`, where its class is, arguments of its `__init__`."""

    model_config = ConfigDict(extra="allow")

    name: Name
    target: Name = Field(alias="_target_")


def read_tool_file(path: str, section: type[FileSection] = ToolFile) -> FileSection:
    """The tools of a file, or its user simulators; raises one ConfigError with everything that is wrong in it."""
    problems: list[ConfigError] = []
    tree, places = read_yaml(Path(path).expanduser(), problems)
    if problems:
        raise combined(problems)
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            parts = [str(part) for part in one["loc"]]
            known = (places.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
            where = next((place for place in known if place), path)
            got = "nothing" if one["type"] == "missing" else repr(one["input"])[:120]
            expected = one["msg"].removeprefix("expected ").rstrip(". ")
            if one["type"] == "extra_forbidden":
                expected = "a key that this file may have"
            problems.append(ConfigError(f"{where}, {'.'.join(parts)}", got=got, expected=expected))
        raise combined(problems) from error


class MultiTurnConfig(Section):
    """Turns, tools and user simulators of a multi-turn response."""

    enable: bool = False
    """Whether responses may take several turns (multi-turn); `rollout.mode` is then `async`."""
    max_assistant_turns: Count | None = None
    """Turns that the model writes, at most. null: as many as fit into `data.max_response_length`."""
    max_user_turns: Count | None = None
    """Turns of tools or user simulators, at most. null: as many as fit."""
    max_parallel_calls: Count = 1
    """Tool calls of one turn that are made, in parallel; later ones of the turn are answered with a refusal."""
    max_tool_response_length: Count = 256
    """Longest result of a tool call, in characters; the rest is cut off."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Where a longer result loses characters."""
    tool_timeout_s: PositiveFloat = 30.0
    """Seconds that one tool call may take."""
    function_tool_path: PathText | None = None
    """Python file whose `@function_tool` functions are offered to the model."""
    tool_config_path: PathText | None = None
    """YAML file with tools that are classes, and with MCP servers."""
    interaction_config_path: PathText | None = None
    """YAML file with the user simulators that `interaction_kwargs` of a row may name."""
    format: Name = "hermes"
    """How the model writes tool calls: `hermes`, `qwen3_coder`, `glm`, `gpt-oss`, or a parser of your own."""


class AgentConfig(Section):
    """Which agent loop generates a response."""

    default_agent_loop: Name = "single_turn_agent"
    """Agent loop of rows that name none in the column `agent_name`: `single_turn_agent`, `tool_agent`, or your own."""
    agent_loop_path: PathText | None = None
    """Python file that registers agent loops of your own; or a YAML list of them: `name`, `_target_`, arguments."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that a loop of your own may take between two responses of the engine; then its conversation fails."""
