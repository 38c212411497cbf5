# SPDX-License-Identifier: Apache-2.0
"""Tools, partners and loops out of users' files."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quadriga.config.tool_files import ToolEntry, read_interaction_file, read_tool_file
from quadriga.errors import ConfigError
from quadriga.rollout.agent_loop.interactions import Interaction, PartnerSource
from quadriga.rollout.agent_loop.tool_schema import Signature, signature_of
from quadriga.rollout.agent_loop.tools import SIGNATURE, ClassSource, FunctionSource, Tool, ToolSource
from quadriga.user_file import import_file, member_of

_KEY = "actor_rollout_ref.rollout.multi_turn"
Invoke = Callable[..., Any]


def function_tools(path: str, invoke: Invoke) -> list[FunctionSource]:
    """The functions of a file that `@function_tool` has marked.

    Raises:
        ConfigError: no such file, it cannot be imported, or it has none.
    """
    where = f"{_KEY}.function_tool_path"
    members = vars(import_file(path, where)).values()
    marked = [one for one in members if isinstance(getattr(one, SIGNATURE, None), Signature)]
    if not marked:
        fix = "Write @function_tool (from quadriga.rollout.agent_loop) above each function that is a tool."
        raise ConfigError(where, got=f"{path}, in which no function is a tool", expected="at least one", fix=fix)
    return [FunctionSource(one, getattr(one, SIGNATURE), invoke) for one in marked]


def class_tools(path: str, invoke: Invoke) -> list[ClassSource]:
    """The classes of a YAML file of tools.

    Raises:
        ConfigError: the file or a class is not as it must be.
    """
    folder = Path(path).expanduser().resolve().parent
    return [_class_tool(entry, folder, invoke) for entry in read_tool_file(path).tools]


def partners(path: str) -> dict[str, PartnerSource]:
    """The partners of a YAML file, by name.

    Raises:
        ConfigError: the file or a class is not as it must be.
    """
    where = f"{_KEY}.interaction_config_path"
    folder = Path(path).expanduser().resolve().parent
    found: dict[str, PartnerSource] = {}
    for entry in read_interaction_file(path).interaction:
        if entry.name in found:
            raise ConfigError(where, got=f"two partners with the name {entry.name!r}", expected="a name for each")
        cls = _class_named(entry.class_name, folder, Interaction, where)
        found[entry.name] = PartnerSource(entry.name, cls, entry.config)
    return found


def by_name(sources: Sequence[ToolSource]) -> dict[str, ToolSource]:
    """The tools by name.

    Raises:
        ConfigError: two have the same name.
    """
    named: dict[str, ToolSource] = {}
    for source in sources:
        name = source.signature.name
        if name in named:
            raise ConfigError(f"{_KEY}, tools", got=f"two with the name {name!r}", expected="a name for each")
        named[name] = source
    return named


def _class_tool(entry: ToolEntry, folder: Path, invoke: Invoke) -> ClassSource:
    where = f"{_KEY}.tool_config_path, {entry.class_name}"
    cls = _class_named(entry.class_name, folder, Tool, where)
    if entry.tool_schema is not None:
        function = entry.tool_schema.get("function", entry.tool_schema)
        if not isinstance(function, dict) or not {"name", "description", "parameters"} <= set(function):
            raise ConfigError(
                where,
                got=f"the tool_schema {entry.tool_schema}"[:300],
                expected='{"type": "function", "function": {"name", "description", "parameters"}}',
            )
        return ClassSource(cls, entry.config, Signature({"type": "function", "function": function}), invoke)
    said = "" if cls.execute.__doc__ else (cls.__doc__ or "").strip()
    signature = signature_of(cls.execute, name=cls.name or cls.__name__.lower(), description=said)
    return ClassSource(cls, entry.config, signature, invoke)


def _class_named(reference: str, folder: Path, base: type, where: str) -> Any:
    """`file.py:Name`, `package.module.Name` or `package.module:Name`, which must be a subclass of `base`."""
    place, _, name = reference.rpartition(":") if ":" in reference else reference.rpartition(".")
    if not place or not name:
        raise ConfigError(where, got=repr(reference), expected="file.py:Name or package.module.Name")
    if place.endswith(".py"):
        path = Path(place).expanduser()
        module = import_file(path if path.is_absolute() else folder / path, where)
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise ConfigError(where, got=f"{place!r} ({error})", expected="a module that can be imported") from error
    found = member_of(module, name, where, base=base)
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(
            where,
            got=f"{name}, a class without {', '.join(missing)}",
            expected=f"each method that {base.__name__} leaves open",
            fix=f"Write {name}.{missing[0]}; see the docstring of {base.__name__}.{missing[0]}.",
        )
    return found
