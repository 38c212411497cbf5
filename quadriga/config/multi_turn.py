# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.multi_turn` and `.agent`: multi-turn responses with tools or a user simulator.

Tools that are classes or MCP servers are listed in a YAML file (`examples/tools/tools.yaml`), user
simulators in another one (`examples/tools/interactions.yaml`). A class is `package.module.Name`, or
`file.py:Name` with a path relative to the folder of the YAML file.
"""

import re
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from quadriga.config.base import Section, refuse
from quadriga.config.types import Count, Name, PathText
from quadriga.config.yaml_text import combine_errors, read_yaml
from quadriga.errors import ConfigError

FORMATS = ("hermes", "qwen3_coder", "glm", "gpt-oss")
ENVIRONMENT = "environment"
LOOPS = ("single_turn_agent", "tool_agent", ENVIRONMENT)
FileSection = TypeVar("FileSection", bound=Section)


class ToolEntry(Section):
    """A class of tools, the arguments of its `__init__`, and a schema to replace the one of `execute`."""

    class_name: Name
    config: dict[str, Any] = {}
    tool_schema: dict[str, Any] | None = None


class ServerEntry(Section):
    """An MCP server: the `url` of a running one, or a program that uses its standard input and output.

    The program is started in the folder `cwd`; null means the folder of the YAML file. `tools` names
    the tools to offer; null means all.
    """

    command: Name | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: Name | None = None
    tools: list[str] | None = None

    @model_validator(mode="after")
    def _require_command_or_url(self) -> "ServerEntry":
        """Require exactly one of `command` and `url`."""
        if (self.command is None) == (self.url is None):
            raise refuse("either command or url", "A server either runs already, or is started.")
        return self


class ToolFile(Section):
    """`multi_turn.tool_config_path`."""

    tools: list[ToolEntry] = []
    mcp_servers: dict[str, ServerEntry] = {}


class InteractionEntry(Section):
    """A user simulator: its name in `interaction_kwargs` of a row, its class, and its arguments."""

    name: str = ""
    class_name: Name
    config: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _derive_name(cls, values: Any) -> Any:
        """Set a missing name to that of the class: `SearchInteraction` is called `search`."""
        if not isinstance(values, dict) or values.get("name"):
            return values
        class_name = values.get("class_name")
        if not isinstance(class_name, str):
            return values
        name = re.split(r"[.:]", class_name)[-1].removesuffix("Interaction").lower()
        return {**values, "name": name}


class InteractionFile(Section):
    """`multi_turn.interaction_config_path`."""

    interaction: list[InteractionEntry]


class LoopEntry(Section):
    """An agent loop: its name in the column `agent_name`, its class, and its arguments."""

    model_config = ConfigDict(extra="allow")

    name: Name
    target: Name = Field(alias="_target_")


def read_tool_file(path: str, section: type[FileSection] = ToolFile) -> FileSection:
    """Read a file of tools or of user simulators.

    Args:
        path: the YAML file.
        section: the schema of the file.

    Raises:
        ConfigError: everything that is wrong in the file, in one error.
    """
    problems = []
    tree, places = read_yaml(Path(path).expanduser(), problems)
    if problems:
        raise combine_errors(problems)
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            parts = [str(part) for part in detail["loc"]]
            where = path
            # A missing key has no line of its own, so the nearest key above it gives the place.
            for end in range(1, len(parts) + 1):
                where = places.get(".".join(parts[:end]), where)
            got = "nothing" if detail["type"] == "missing" else repr(detail["input"])[:120]
            # pydantic's message begins with "expected" if a validator of ours has refused the value.
            expected = detail["msg"].removeprefix("expected ").rstrip(". ")
            if detail["type"] == "extra_forbidden":
                expected = "a key that exists in this file"
            problems.append(ConfigError(f"{where}, {'.'.join(parts)}", got=got, expected=expected))
        raise combine_errors(problems) from error


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
    """Side on which a longer result is cut."""
    tool_timeout_s: PositiveFloat = 30.0
    """Seconds that one tool call may take."""
    function_tool_path: PathText | None = None
    """Python file whose `@function_tool` functions are offered to the model."""
    tool_config_path: PathText | None = None
    """YAML file with tools that are classes, and with MCP servers."""
    interaction_config_path: PathText | None = None
    """YAML file with the user simulators that `interaction_kwargs` of a row may name."""
    format: Name = "hermes"
    """Format of the model's tool calls: `hermes`, `qwen3_coder`, `glm`, `gpt-oss`, or a parser of your own."""


class AgentConfig(Section):
    """Choice of the agent loop that generates a response."""

    default_agent_loop: Name = "single_turn_agent"
    """Agent loop of rows that name none in the column `agent_name`: `single_turn_agent`, `tool_agent`, or your own."""
    agent_loop_path: PathText | None = None
    """Python file that registers agent loops of your own; or a YAML list of them: `name`, `_target_`, arguments."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that a loop of your own may take between two responses of the engine; then its conversation fails."""
