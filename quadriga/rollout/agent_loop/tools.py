# SPDX-License-Identifier: Apache-2.0
"""Tools that a model may call, and what it reads about them.

    @function_tool                                  class Account(Tool):
    def add(a: int, b: int = 0) -> int:                 '''A bank account, one for each conversation.'''
        '''Add two numbers.
                                                        def create(self, balance: int = 0) -> None:
        Args:                                               self.balance = balance
            a: the first number.
        '''                                             def execute(self, amount: int) -> str:
        return a + b                                        '''Pay in.'''
                                                            self.balance += amount
                                                            return f"You have {self.balance}."

Every tool is a class whose objects live as long as a conversation: `Account` as it stands, `add` as a class whose
`execute` is the function, and a tool of an MCP server as a class whose `execute` calls the server. Methods may be
`async`. Text is returned to the model as it is, bytes are decoded, anything else is written as JSON.
"""

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any, NotRequired, Required, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict  # pydantic takes no other one before Python 3.12

from quadriga.config.multi_turn import read_tool_file
from quadriga.errors import ConfigError, RolloutError
from quadriga.user_file import PACKAGE, import_file, member_of

Function = TypeVar("Function", bound=Callable[..., Any])

_SPEC = "quadriga_tool"  # the attribute of a function that `function_tool` has marked
_KEY = "actor_rollout_ref.rollout.multi_turn"
_METHODS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_SECTION = re.compile(
    r"(?m)^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*$"
)
_ARGUMENT = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_TYPES = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": None,
}


class ToolError(RolloutError):
    """Raised by a tool for the model to read: the message is the tool's response, and the conversation goes on.

    Anything else that a tool raises ends the conversation.
    """


@dataclass(frozen=True)
class WithImages:
    """What a tool returns that shows images to a vision-language model.
    `images`: `PIL.Image.Image`s, paths, or the bytes of files; they stand before the text.
    `text`: or anything that a tool may return alone."""

    images: Sequence[Any]
    text: Any = ""


class Tool(ABC):
    """A tool. A conversation that may call it gets an object of its own.

    Its name is the class's, in small letters, unless `name` says otherwise; what the model reads is made of `execute`'s
    type hints and docstring. `config` of the configuration file has the arguments of `__init__`. Every method may be
    `async`; the `*_kwargs` of a sample's `tools_kwargs` add keyword arguments to the method of that name.
    """

    name: str = ""

    @classmethod
    def tool_spec(
        cls, config: Mapping[str, Any], schema: dict[str, Any] | None, where: str
    ) -> "ToolSpec":
        """The class as a file of tools lists it; `where` is named by a ConfigError about the schema."""
        if schema is None:
            said = "" if cls.execute.__doc__ else (cls.__doc__ or "").strip()
            schema, validate = describe(
                cls.execute, name=cls.name or cls.__name__.lower(), description=said
            )
            return ToolSpec(partial(cls, **config), schema, validate)
        function = schema.get("function", schema)
        if not isinstance(function, dict) or not {"name", "description", "parameters"} <= set(
            function
        ):
            expected = '{"type": "function", "function": {"name", "description", "parameters"}}'
            raise ConfigError(where, got=f"the tool_schema {schema}"[:300], expected=expected)
        described, validate = (
            {"type": "function", "function": function},
            validator_of(function["parameters"]),
        )
        return ToolSpec(partial(cls, **config), described, validate)

    def create(self) -> Any:
        """Begins a conversation."""
        return None

    @abstractmethod
    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """The response to one call; its parameters are what the model writes."""

    def calc_reward(self) -> Any:
        """What the use of the tool earned, a number or None; called once, at the end."""
        return None

    def release(self) -> Any:
        """Frees what `create` took; called once, however the conversation ended."""
        return None


@dataclass(frozen=True)
class ToolSpec:
    """A tool of the configuration: what the model reads about it, and how a conversation gets its object."""

    make: Callable[[], Tool]  # makes a conversation's `Tool`
    # As chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}.
    schema: dict[str, Any]
    # Checks the arguments of a call; the pydantic model that a function's return in their types.
    validate: Callable[[Any], Any]
    # What `tools_kwargs` of a sample may give, such as "execute_kwargs", and which names; None: any.
    options: Mapping[str, frozenset[str] | None] = field(
        default_factory=lambda: dict.fromkeys(_METHODS)
    )

    @property
    def name(self) -> str:
        """By which the model calls it."""
        return self.schema["function"]["name"]

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call in the types that the tool takes; else a ToolError, which shows the schema."""
        try:
            checked = self.validate(arguments)
        except ValidationError as error:
            found = (
                (".".join(map(str, one["loc"])), one["msg"])
                for one in error.errors(include_url=False)
            )
            wrong = "; ".join(f"{place}: {message}" for place, message in found)
            expected = f"arguments that fit {json.dumps(self.schema['function']['parameters'], ensure_ascii=False)}"
            raise ToolError(f"tool {self.name}", got=wrong, expected=expected) from error
        if isinstance(checked, BaseModel):
            return {name: getattr(checked, name) for name in checked.model_fields_set}
        return arguments

    def method_kwargs(self, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Keyword arguments for each method, out of a sample's `tools_kwargs`.

        A column of a parquet file gives each row the keys of all rows; those without a value are left out. Raises
        RolloutError: a key or an argument that the tool does not take, or a value that is no mapping."""
        where, kwargs = f"tools_kwargs.{self.name}", dict[str, dict[str, Any]]()
        for key, value in given.items():
            if value is None:
                continue
            if key not in self.options or not isinstance(value, Mapping):
                got = f"{key}={value!r}"[:200]
                expected = (
                    f"{' or '.join(self.options)} with keyword arguments"
                    if self.options
                    else "nothing"
                )
                raise RolloutError(
                    where,
                    got=got,
                    expected=expected,
                    fix="Correct extra_info.tools_kwargs of the row.",
                )
            kwargs[key] = {name: one for name, one in value.items() if one is not None}
            known = self.options[key]
            if known is not None and (unknown := sorted(kwargs[key].keys() - known)):
                expected = f"one of {', '.join(sorted(known))}" if known else "nothing"
                fix = "What tools_kwargs may set stands after a `*` in the function's parameters."
                raise RolloutError(
                    f"{where}.{key}", got=", ".join(unknown), expected=expected, fix=fix
                )
        return kwargs


@overload
def function_tool(function: Function) -> Function: ...
@overload
def function_tool(*, name: str = "", description: str = "") -> Callable[[Function], Function]: ...
def function_tool(
    function: Function | None = None, *, name: str = "", description: str = ""
) -> Any:
    """Decorator: offers a function to the model; it can still be called as before.
    Raises RolloutError: the function cannot be a tool; the error says why.
    `function`: with a type hint for each argument, and a docstring. What follows a `*` is hidden from the model and
    comes from `tools_kwargs[NAME]["execute_kwargs"]` of a sample.
    `name`: by which the model calls it; "": the function's.
    `description`: what the model reads; "": the docstring up to its first section."""
    if function is None:
        return partial(function_tool, name=name, description=description)
    setattr(function, _SPEC, spec_of(function, name=name, description=description))
    return function


def spec_of(function: Callable[..., Any], *, name: str = "", description: str = "") -> ToolSpec:
    """A function as a tool; see `function_tool`."""
    schema, validate = describe(function, name=name, description=description)
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    hidden = frozenset(one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY)
    return ToolSpec(
        as_tool(function), schema, validate, {"execute_kwargs": None if takes_any else hidden}
    )


def as_tool(execute: Callable[..., Any]) -> type[Tool]:
    """The class of tools that have nothing but a function."""
    return type("FunctionTool", (Tool,), {"execute": staticmethod(execute)})


def function_tools(path: str) -> list[ToolSpec]:
    """The functions of a file that `@function_tool` has marked; a ConfigError where there is none."""
    where = f"{_KEY}.function_tool_path"
    found = [getattr(member, _SPEC, None) for member in vars(import_file(path, where)).values()]
    if not (specs := [spec for spec in found if isinstance(spec, ToolSpec)]):
        fix = "Write @function_tool (from quadriga.rollout.agent_loop) above each function that is a tool."
        raise ConfigError(
            where, got=f"{path}, in which no function is a tool", expected="at least one", fix=fix
        )
    return specs


def class_tools(path: str) -> list[ToolSpec]:
    """The classes of a YAML file of tools; a ConfigError where the file or a class is not as it must be."""
    folder, specs = Path(path).expanduser().resolve().parent, []
    for entry in read_tool_file(path).tools:
        where = f"{_KEY}.tool_config_path, {entry.class_name}"
        cls: type[Tool] = class_named(entry.class_name, folder, Tool, where)
        specs.append(cls.tool_spec(entry.config, entry.tool_schema, where))
    return specs


def class_named(reference: str, folder: Path, base: type, where: str) -> Any:
    """A user's subclass of `base` by `file.py:Name`, seen from a folder, or by `package.module.Name`.
    Raises ConfigError: there is no such class, or it lacks a method; `where` names the key."""
    place, _, name = reference.rpartition(":") if ":" in reference else reference.rpartition(".")
    if not place or not name:
        raise ConfigError(
            where, got=repr(reference), expected="file.py:Name or package.module.Name"
        )
    is_file = place.endswith(".py")
    module = import_file(
        folder / Path(place).expanduser() if is_file else f"{PACKAGE}{place}", where
    )
    found = member_of(module, name, where, base=base)
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        got = f"{name}, a class without {', '.join(missing)}"
        fix = f"Write {name}.{missing[0]}; see the docstring of {base.__name__}.{missing[0]}."
        raise ConfigError(
            where, got=got, expected=f"each method that {base.__name__} leaves open", fix=fix
        )
    return found


def describe(
    function: Callable[..., Any], *, name: str = "", description: str = ""
) -> tuple[dict[str, Any], Callable[[Any], BaseModel]]:
    """What a model reads about a function, out of its signature and docstring, and the check of a call's arguments.
    Raises RolloutError: no docstring, a parameter without a type hint, `*args`, or a type that JSON cannot express."""
    name = name or function.__name__
    where = f"tool {name} ({inspect.getsourcefile(function)})"
    said, argument_texts = _read_docstring(inspect.getdoc(function) or "")
    if not (description or said):
        fix = "Write under its `def` in a sentence what it does: the model reads it."
        raise RolloutError(where, got="no docstring", expected="one", fix=fix)
    config = ConfigDict(extra="forbid", protected_namespaces=())
    try:
        model = create_model(name, __config__=config, **_fields(function, where))
        text = json.dumps(model.model_json_schema())
    except (PydanticUserError, NameError) as error:
        got = f"a parameter that has no JSON form ({str(error).splitlines()[0]})"
        fix = "Take str, int, float, bool, list, dict, Literal, or a pydantic model."
        raise RolloutError(where, got=got, expected="types of JSON", fix=fix) from error

    # Pydantic makes titles up of names: they cost tokens and say nothing. A property may be named so, though.
    parameters = json.loads(
        text,
        object_hook=lambda part: {
            key: value
            for key, value in part.items()
            if key != "title" or not isinstance(value, str)
        },
    )
    for argument, text in argument_texts.items():
        if argument in parameters.get("properties", {}):
            parameters["properties"][argument].setdefault("description", text)
    parameters.setdefault("required", [])
    del parameters["additionalProperties"]
    described = {"name": name, "description": description or said, "parameters": parameters}
    return {"type": "function", "function": described}, model.model_validate


def validator_of(parameters: Mapping[str, Any]) -> Callable[[Any], Any]:
    """The check of arguments by a schema that a server or a file gives: their names, and types at the top."""
    required, fields = parameters.get("required", ()), dict[str, Any]()
    for name, schema in {
        **{name: {} for name in required},
        **parameters.get("properties", {}),
    }.items():
        kinds = schema.get("type") or []
        types = tuple(
            _TYPES.get(kind, Any) for kind in ([kinds] if isinstance(kinds, str) else kinds)
        )
        hint = reduce(or_, types) if types else Any
        marker: Any = Required if name in required else NotRequired
        fields[name] = marker[hint]
    is_open = not parameters.get("properties") or parameters.get("additionalProperties", False)
    arguments = cast(Any, TypedDict)("arguments", fields)
    arguments.__pydantic_config__ = ConfigDict(strict=True, extra="allow" if is_open else "forbid")
    return TypeAdapter(arguments).validate_python


def _fields(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """The type and default of each argument, as `pydantic.create_model` takes them."""
    try:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
    except NameError as error:
        fix = "Import the type in the tool's file."
        raise RolloutError(
            where, got=f"a type hint that is not known ({error})", expected="types", fix=fix
        ) from error
    parameters.pop("self", None)
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            fix = "Name each argument: a model writes arguments by name."
            raise RolloutError(where, got=f"*{name}", expected="named parameters", fix=fix)
        if parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
            continue
        if parameter.annotation is inspect.Parameter.empty:
            fix = f"Write for instance `{name}: str`."
            raise RolloutError(
                where,
                got=f"{name} without a type hint",
                expected="a type for each argument",
                fix=fix,
            )
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[name] = (parameter.annotation, default)
    return fields


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description before the first section, and the text for each argument."""
    description, *sections = _SECTION.split(text)
    texts: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        name = ""
        for line in inspect.cleandoc(body).splitlines() if title in _ARGUMENT_SECTIONS else ():
            if found := _ARGUMENT.fullmatch(line):
                name = found[1]
                texts[name] = found[2].strip()
            elif name and line.strip():
                texts[name] = f"{texts[name]} {line.strip()}".strip()
    return description.strip(), texts
