# SPDX-License-Identifier: Apache-2.0
"""The two files beside the configuration: tools (`tool_config_path`), and user simulators (`interaction_config_path`).

    tools:                                       interaction:
      - class_name: bank.py:Account                - name: teacher
        config: {currency: EUR}                      class_name: teacher.py:Teacher
    mcp_servers:                                     config: {patience: 3}
      files: {command: python, args: [serve.py]}
      search: {url: "http://127.0.0.1:8000/mcp", tools: [find]}

A class is `file.py:Name`, the file seen from the folder of the YAML file, or `package.module.Name`.
"""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from quadriga.config.base import Name, Section, refuse
from quadriga.config.problems import combined
from quadriga.config.yaml_text import read_yaml
from quadriga.errors import ConfigError

FileSection = TypeVar("FileSection", bound=Section)


class ToolEntry(Section):
    """A class of tools."""

    class_name: Name
    """Where the class is."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its `__init__`."""
    tool_schema: dict[str, Any] | None = None
    """What the model reads instead of what `execute` says of itself."""


class ServerEntry(Section):
    """A server of tools: a program that is started, or an address."""

    command: Name | None = None
    """Program that speaks over its standard input and output."""
    args: list[str] = Field(default_factory=list)
    """Its arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Its environment, besides a few variables of ours."""
    cwd: str | None = None
    """Folder it is started in; null: that of the YAML file."""
    url: Name | None = None
    """Address of a server that runs already."""
    tools: list[str] | None = None
    """Names of the tools that are offered; null: all."""

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
    """A user simulator by name."""

    name: Name
    """What `interaction_kwargs.name` of a sample says."""
    class_name: Name
    """Where the class is."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its `__init__`."""


class InteractionFile(Section):
    """`multi_turn.interaction_config_path`."""

    interaction: list[InteractionEntry]


def read_tool_file(path: str) -> ToolFile:
    """The tools of a file.

    Raises:
        ConfigError: with everything that is wrong in it.
    """
    return _read(ToolFile, path)


def read_interaction_file(path: str) -> InteractionFile:
    """The user simulators of a file.

    Raises:
        ConfigError: with everything that is wrong in it.
    """
    return _read(InteractionFile, path)


def _read(section: type[FileSection], path: str) -> FileSection:
    problems: list[ConfigError] = []
    tree, places = read_yaml(Path(path).expanduser(), problems)
    if problems:
        raise combined(problems)
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        raise combined([_problem(one, path, places) for one in error.errors(include_url=False)]) from error


def _problem(one: Any, path: str, places: dict[str, str]) -> ConfigError:
    key = ".".join(map(str, one["loc"]))
    parts = [str(part) for part in one["loc"]]
    known = [place for end in range(len(parts), 0, -1) if (place := places.get(".".join(parts[:end])))]
    got = "nothing" if one["type"] == "missing" else repr(one["input"])[:120]
    return ConfigError(f"{known[0] if known else path}, {key}", got=got, expected=_expected(one))


def _expected(one: Any) -> str:
    if one["type"] == "extra_forbidden":
        return "a key that this file may have"
    return one["msg"].removeprefix("expected ").rstrip(". ")
