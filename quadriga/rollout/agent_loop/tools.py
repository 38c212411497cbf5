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

import importlib
import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from quadriga.config.multi_turn import read_tool_file
from quadriga.errors import ConfigError, RolloutError
from quadriga.user_file import import_file, member_of

Function = TypeVar("Function", bound=Callable[..., Any])

_SPEC = "quadriga_tool"  # the attribute of a function that `function_tool` has marked
_KEY = "actor_rollout_ref.rollout.multi_turn"
_METHODS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_SECTION = re.compile(r"(?m)^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_ARGUMENT = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
}


class ToolError(RolloutError):
    """Raised by a tool for the model to read: the message is the tool's response, and the conversation goes on.

    Anything else that a tool raises ends the conversation.
    """


class Tool(ABC):
    """A tool. A conversation that may call it gets an object of its own.

    Its name is the class's, in small letters, unless `name` says otherwise; what the model reads is made of `execute`'s
    type hints and docstring. `config` of the configuration file has the arguments of `__init__`. Every method may be
    `async`; the `*_kwargs` of a sample's `tools_kwargs` add keyword arguments to the method of that name.
    """

    name: ClassVar[str] = ""

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
    """A tool of the configuration: what the model reads about it, and how a conversation gets its object.

    Attributes:
        make: makes a conversation's `Tool`.
        schema: as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}.
        model: checks and converts the arguments of a call; None: `schema` alone decides.
        methods: what `tools_kwargs` of a sample may give it, such as "execute_kwargs".
        hidden: names that "execute_kwargs" may have; None: any.
    """

    make: Callable[[], Tool]
    schema: dict[str, Any]
    model: type[BaseModel] | None = None
    methods: tuple[str, ...] = _METHODS
    hidden: frozenset[str] | None = None

    @property
    def name(self) -> str:
        """By which the model calls it."""
        return self.schema["function"]["name"]

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.schema["function"]["parameters"]

    def check(self, arguments: Any) -> dict[str, Any]:
        """The arguments of a call in the types that the tool takes.

        Raises:
            ToolError: they do not fit; the message shows the schema.
        """
        values: dict[str, Any] = {}
        if not isinstance(arguments, dict):
            wrong = [f"the arguments are {_kind(arguments)}, not an object"]
        elif self.model is None:
            values, wrong = arguments, _mistakes(self.parameters, arguments)
        else:
            try:
                checked = self.model.model_validate(arguments)
                values, wrong = {name: getattr(checked, name) for name in checked.model_fields_set}, []
            except ValidationError as error:
                wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        if wrong:
            expected = f"arguments that fit {json.dumps(self.parameters, ensure_ascii=False)}"
            raise ToolError(f"tool {self.name}", got="; ".join(wrong), expected=expected)
        return values

    def method_kwargs(self, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Keyword arguments for each of `methods`, out of a sample's `tools_kwargs`.

        A column of a parquet file gives each row the keys of all rows; those without a value are left out.

        Raises:
            RolloutError: a key that the tool does not have, or a value that is no mapping.
        """
        where = f"tools_kwargs.{self.name}"
        kwargs: dict[str, dict[str, Any]] = {}
        for key, value in given.items():
            if value is None:
                continue
            if key not in self.methods or not isinstance(value, Mapping):
                raise RolloutError(
                    where,
                    got=f"{key}={value!r}"[:200],
                    expected=f"{' or '.join(self.methods)} with keyword arguments" if self.methods else "nothing",
                    fix="Correct extra_info.tools_kwargs of the row.",
                )
            kwargs[key] = {name: one for name, one in value.items() if one is not None}
        unknown = [] if self.hidden is None else sorted(kwargs.get("execute_kwargs", {}).keys() - self.hidden)
        if unknown:
            raise RolloutError(
                f"{where}.execute_kwargs",
                got=", ".join(unknown),
                expected=f"one of {', '.join(sorted(self.hidden or ()))}" if self.hidden else "nothing",
                fix="What tools_kwargs may set stands after a `*` in the function's parameters.",
            )
        return kwargs


@overload
def function_tool(function: Function) -> Function: ...
@overload
def function_tool(*, name: str = "", description: str = "") -> Callable[[Function], Function]: ...
def function_tool(function: Function | None = None, *, name: str = "", description: str = "") -> Any:
    """Decorator: offers a function to the model; it can still be called as before.

    Args:
        function: with a type hint for each argument, and a docstring. What follows a `*` is hidden from the model and
            comes from `tools_kwargs[NAME]["execute_kwargs"]` of a sample.
        name: by which the model calls it; "": the function's.
        description: what the model reads; "": the docstring up to its first section.

    Raises:
        RolloutError: the function cannot be a tool; the error says why.
    """
    if function is None:
        return partial(function_tool, name=name, description=description)
    setattr(function, _SPEC, spec_of(function, name=name, description=description))
    return function


def spec_of(function: Callable[..., Any], *, name: str = "", description: str = "") -> ToolSpec:
    """A function as a tool; see `function_tool`."""
    schema, model = describe(function, name=name, description=description)
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    hidden = frozenset(one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY)
    return ToolSpec(as_tool(function), schema, model, ("execute_kwargs",), None if takes_any else hidden)


def as_tool(execute: Callable[..., Any]) -> type[Tool]:
    """The class of tools that have nothing but a function."""
    return type("FunctionTool", (Tool,), {"execute": staticmethod(execute)})


def function_tools(path: str) -> list[ToolSpec]:
    """The functions of a file that `@function_tool` has marked.

    Raises:
        ConfigError: no such file, it cannot be imported, or it has none.
    """
    where = f"{_KEY}.function_tool_path"
    found = [getattr(member, _SPEC, None) for member in vars(import_file(path, where)).values()]
    specs = [spec for spec in found if isinstance(spec, ToolSpec)]
    if not specs:
        fix = "Write @function_tool (from quadriga.rollout.agent_loop) above each function that is a tool."
        raise ConfigError(where, got=f"{path}, in which no function is a tool", expected="at least one", fix=fix)
    return specs


def class_tools(path: str) -> list[ToolSpec]:
    """The classes of a YAML file of tools.

    Raises:
        ConfigError: the file or a class is not as it must be.
    """
    folder, specs = Path(path).expanduser().resolve().parent, []
    for entry in read_tool_file(path).tools:
        where = f"{_KEY}.tool_config_path, {entry.class_name}"
        cls = class_named(entry.class_name, folder, Tool, where)
        schema, model = entry.tool_schema, None
        if schema is None:
            said = "" if cls.execute.__doc__ else (cls.__doc__ or "").strip()
            schema, model = describe(cls.execute, name=cls.name or cls.__name__.lower(), description=said)
        function = schema.get("function", schema)
        if not isinstance(function, dict) or not {"name", "description", "parameters"} <= set(function):
            raise ConfigError(
                where,
                got=f"the tool_schema {schema}"[:300],
                expected='{"type": "function", "function": {"name", "description", "parameters"}}',
            )
        specs.append(ToolSpec(partial(cls, **entry.config), {"type": "function", "function": function}, model))
    return specs


def class_named(reference: str, folder: Path, base: type, where: str) -> Any:
    """A user's class.

    Args:
        reference: `file.py:Name`, `package.module.Name` or `package.module:Name`.
        folder: where a relative file is looked for.
        base: what it must be a subclass of.
        where: the key to name in an error.

    Raises:
        ConfigError: there is no such class, or it lacks a method.
    """
    place, _, name = reference.rpartition(":") if ":" in reference else reference.rpartition(".")
    if not place or not name:
        raise ConfigError(where, got=repr(reference), expected="file.py:Name or package.module.Name")
    if place.endswith(".py"):
        module = import_file(folder / Path(place).expanduser(), where)
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


def describe(
    function: Callable[..., Any], *, name: str = "", description: str = ""
) -> tuple[dict[str, Any], type[BaseModel]]:
    """What a model reads about a function, out of its signature and docstring.

    Args:
        function: its positional parameters are the tool's arguments, `self` aside.
        name: of the tool; "": the function's.
        description: "": the docstring up to its first section.

    Returns:
        the schema that chat templates take, and the pydantic model that checks arguments.

    Raises:
        RolloutError: no docstring, a parameter without a type hint, `*args`, or a type that JSON cannot express.
    """
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
    parameters = json.loads(text, object_hook=_without_title)
    for argument, text in argument_texts.items():
        if argument in parameters.get("properties", {}):
            parameters["properties"][argument].setdefault("description", text)
    parameters.setdefault("required", [])
    del parameters["additionalProperties"]
    described = {"name": name, "description": description or said, "parameters": parameters}
    return {"type": "function", "function": described}, model


def _without_title(schema: dict[str, Any]) -> dict[str, Any]:
    """Pydantic makes titles up of names: they cost tokens and say nothing. A property may be named so, though."""
    return {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}


def _fields(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """The type and default of each argument, as `pydantic.create_model` takes them."""
    try:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
    except NameError as error:
        fix = "Import the type in the tool's file."
        raise RolloutError(where, got=f"a type hint that is not known ({error})", expected="types", fix=fix) from error
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
            raise RolloutError(where, got=f"{name} without a type hint", expected="a type for each argument", fix=fix)
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


def _mistakes(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """What a server's schema says against the arguments: names, and types at the top."""
    properties = parameters.get("properties", {})
    wrong = [f"{name} is missing" for name in parameters.get("required", ()) if name not in arguments]
    for name, value in arguments.items():
        if name not in properties:
            if properties and not parameters.get("additionalProperties", False):
                wrong.append(f"{name} is not one of {', '.join(properties)}")
            continue
        wanted = properties[name].get("type") or []
        wanted = [wanted] if isinstance(wanted, str) else wanted
        if wanted and not any(_is_of(value, one) for one in wanted):
            wrong.append(f"{name} is {_kind(value)}, not {' or '.join(wanted)}")
    return wrong


def _is_of(value: Any, wanted: str) -> bool:
    if value is None or isinstance(value, bool):
        return wanted == ("null" if value is None else "boolean")
    return wanted not in ("null", "boolean") and isinstance(value, _TYPES.get(wanted, (object,)))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return next((f"of type {name}" for name in ("boolean", *_TYPES) if _is_of(value, name)), type(value).__name__)
