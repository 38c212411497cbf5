# SPDX-License-Identifier: Apache-2.0
"""Tools that a model may call, and their descriptions for the model.

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

Every tool is a class, of which each conversation has an object. A function such as `add` becomes a class whose
`execute` is the function, and a tool of an MCP server becomes a class whose `execute` calls the server. Methods may be
`async`. The model reads a result that is text unchanged, bytes decoded, and anything else as JSON.
"""

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from inspect import Parameter
from operator import or_
from pathlib import Path
from typing import Any, NotRequired, Required, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict  # pydantic takes no other one before Python 3.12

from quadriga.config.multi_turn import read_tool_file
from quadriga.errors import ConfigError, QuadrigaError, RolloutError
from quadriga.user_file import PACKAGE, import_file, member_of

Function = TypeVar("Function", bound=Callable[..., Any])

_SPEC = "quadriga_tool"  # attribute of a function with the `ToolSpec` that `function_tool` made
_KEY = "actor_rollout_ref.rollout.multi_turn"
# Keys that a sample's `tools_kwargs` may have for a tool: keyword arguments of its methods.
_KWARGS_KEYS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_MAX_SCHEMA_CHARACTERS = 300  # of a wrong schema, in an error
_MAX_VALUE_CHARACTERS = 200  # of a wrong value, in an error
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_SECTION = re.compile(
    r"(?m)^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*$"
)
_ARGUMENT = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
# Types of Python by the names that JSON schemas give them.
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
    """Error of a tool whose message is the tool's response; the conversation goes on.

    Any other exception of a tool ends the conversation.
    """


@dataclass(frozen=True)
class WithImages:
    """Result of a tool that shows images to a vision-language model."""

    images: Sequence[Any]  # `PIL.Image.Image`s, paths, or the bytes of files; shown before the text
    text: Any = ""  # text, or any other value that a tool may return without images


class Tool(ABC):
    """Base class of tools. Each conversation that may call a tool gets its own object.

    The model calls the tool by `name`, by default the name of the class in lower case. It reads the
    type hints and the docstring of `execute`. `__init__` gets the entries of `config` in the file
    of tools. A sample's `tools_kwargs` may have `create_kwargs`, `execute_kwargs`,
    `calc_reward_kwargs` and `release_kwargs`: keyword arguments of these methods. Every method may
    be `async`.
    """

    name: str = ""

    @classmethod
    def tool_spec(
        cls, config: Mapping[str, Any], schema: dict[str, Any] | None, where: str
    ) -> "ToolSpec":
        """Describe the tool by an entry of a file of tools.

        Args:
            config: arguments of `__init__`.
            schema: schema for the model. None: it is derived from `execute`.
            where: the entry, for error messages.

        Returns:
            The description, by which objects of the tool are made.

        Raises:
            ConfigError: the schema lacks a part.
            RolloutError: there is no schema, and none can be derived from `execute`.
        """
        make = partial(cls, **config)
        if schema is None:
            # Without a docstring of `execute`, the model reads that of the class.
            description = "" if cls.execute.__doc__ else (cls.__doc__ or "").strip()
            name = cls.name or cls.__name__.lower()
            schema, validate = describe(cls.execute, name=name, description=description)
            return ToolSpec(make, schema, validate)
        # The entry may have the schema of the function alone, without {"type": "function", ...}.
        function = schema.get("function", schema)
        needed_keys = {"name", "description", "parameters"}
        if not isinstance(function, dict) or not needed_keys <= set(function):
            raise ConfigError(
                where,
                got=f"the tool_schema {schema}"[:_MAX_SCHEMA_CHARACTERS],
                expected='{"type": "function", "function": {"name", "description", "parameters"}}',
            )
        validate = validator_of(function["parameters"])
        return ToolSpec(make, {"type": "function", "function": function}, validate)

    def create(self) -> Any:
        """Begin a conversation."""
        return None

    @abstractmethod
    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Respond to one call. The model writes the arguments."""

    def calc_reward(self) -> Any:
        """Reward for the use of the tool, a number or None; called once, at the end."""
        return None

    def release(self) -> Any:
        """Free what `create` took; called once, however the conversation ends."""
        return None


@dataclass(frozen=True)
class ToolSpec:
    """A tool of the configuration: its description for the model, and how to make its objects."""

    make: Callable[[], Tool]  # makes the object of a conversation
    # For chat templates: {"type": "function", "function": {"name", "description", "parameters"}}.
    schema: dict[str, Any]
    # Checks the arguments of a call. If it returns a pydantic model, this has the arguments in the
    # types of the function; otherwise the arguments are used as they are.
    validate: Callable[[Any], Any]
    # Keys that a sample's `tools_kwargs` may have for this tool, such as "execute_kwargs", each with
    # the names that its arguments may have. None instead of names: any.
    options: Mapping[str, frozenset[str] | None] = field(
        default_factory=lambda: dict.fromkeys(_KWARGS_KEYS)
    )

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        return self.schema["function"]["name"]

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.schema["function"]["parameters"]

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check the arguments of a call, and convert them to the types that the tool takes.

        Raises:
            ToolError: an argument is wrong; the message shows the schema.
        """
        try:
            checked = self.validate(arguments)
        except ValidationError as error:
            expected = f"arguments that fit {json.dumps(self.parameters, ensure_ascii=False)}"
            got = "; ".join(faults_of(error))
            raise ToolError(f"tool {self.name}", got, expected) from error
        if isinstance(checked, BaseModel):
            # Only the arguments that the call names: the function has its defaults for the others.
            return {name: getattr(checked, name) for name in checked.model_fields_set}
        return arguments

    def method_kwargs(self, tool_kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Check a sample's keyword arguments for the methods of this tool.

        Args:
            tool_kwargs: the entry of the sample's `tools_kwargs` for this tool.

        Returns:
            Keyword arguments by key, such as "execute_kwargs", without arguments that are None.

        Raises:
            RolloutError: the tool does not take a key or an argument, or a value is no mapping.
        """
        where = f"tools_kwargs.{self.name}"
        kwargs: dict[str, dict[str, Any]] = {}
        for key, value in without_none(tool_kwargs).items():
            if key not in self.options or not isinstance(value, Mapping):
                expected = "nothing"
                if self.options:
                    expected = f"{' or '.join(self.options)} with keyword arguments"
                raise RolloutError(
                    where,
                    got=f"{key}={value!r}"[:_MAX_VALUE_CHARACTERS],
                    expected=expected,
                    fix="Correct extra_info.tools_kwargs of the row.",
                )
            kwargs[key] = without_none(value)
            known_names = self.options[key]
            if known_names is None:  # any name
                continue
            unknown_names = kwargs[key].keys() - known_names
            if unknown_names:
                known = ", ".join(sorted(known_names))
                raise RolloutError(
                    f"{where}.{key}",
                    got=", ".join(sorted(unknown_names)),
                    expected=f"one of {known}" if known else "nothing",
                    fix="Write the parameters that tools_kwargs sets after a `*` in the function.",
                )
        return kwargs


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys whose value is None.

    In a parquet file each row has the keys of all rows, and None for those that it does not set.
    """
    return {key: value for key, value in values.items() if value is not None}


def faults_of(error: ValidationError) -> list[str]:
    """Say for each wrong argument where it is, and what is wrong."""
    details = error.errors(include_url=False)
    return [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details]


@overload
def function_tool(function: Function) -> Function: ...
@overload
def function_tool(*, name: str = "", description: str = "") -> Callable[[Function], Function]: ...
def function_tool(
    function: Function | None = None, *, name: str = "", description: str = ""
) -> Any:
    """Decorator that marks a function as a tool. The function itself does not change.

    Args:
        function: a function with a docstring and a type hint for each argument. Parameters after a
            `*` are hidden from the model; a sample sets them by
            `tools_kwargs[NAME]["execute_kwargs"]`. None: the decorator has other arguments.
        name: name by which the model calls the tool. "": the function's name.
        description: description that the model reads. "": the docstring up to its first section.

    Returns:
        The function, or without a function a decorator.

    Raises:
        RolloutError: the function cannot be a tool; the error says why.
    """
    if function is None:
        return partial(function_tool, name=name, description=description)
    setattr(function, _SPEC, function_spec(function, name=name, description=description))
    return function


def function_spec(
    function: Callable[..., Any], *, name: str = "", description: str = ""
) -> ToolSpec:
    """Describe a function as a tool of the configuration.

    Args:
        function: the function. Parameters after a `*` are hidden from the model.
        name: name by which the model calls it. "": the function's name.
        description: description that the model reads. "": the docstring up to its first section.

    Returns:
        The description of the tool.

    Raises:
        RolloutError: the function cannot be a tool.
    """
    schema, validate = describe(function, name=name, description=description)
    # A sample may set the hidden parameters: those after a `*`, or any with `**kwargs`.
    parameters = inspect.signature(function).parameters
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    hidden_names = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    takes_any_name = Parameter.VAR_KEYWORD in kinds.values()
    options = {"execute_kwargs": None if takes_any_name else frozenset(hidden_names)}
    return ToolSpec(as_tool(function), schema, validate, options)


def as_tool(execute: Callable[..., Any]) -> type[Tool]:
    """Make a subclass of `Tool` whose `execute` is a given function."""
    return type("FunctionTool", (Tool,), {"execute": staticmethod(execute)})


def function_tools(path: str) -> list[ToolSpec]:
    """Load the functions of a Python file that are marked by `@function_tool`.

    Raises:
        ConfigError: the file cannot be loaded, or has no such function.
    """
    where = f"{_KEY}.function_tool_path"
    specs = []
    for member in vars(import_file(path, where)).values():
        spec = getattr(member, _SPEC, None)
        # Some objects, such as mocks, have every attribute.
        if isinstance(spec, ToolSpec):
            specs.append(spec)
    if not specs:
        raise ConfigError(
            where,
            got=f"{path}, in which no function is a tool",
            expected="at least one tool",
            fix="Write @function_tool (from quadriga.rollout.agent_loop) above each function that is a tool.",
        )
    return specs


def class_tools(path: str) -> list[ToolSpec]:
    """Load the classes of a YAML file of tools.

    Raises:
        ConfigError: the file or a class is invalid.
    """
    folder = Path(path).expanduser().resolve().parent
    specs = []
    for entry in read_tool_file(path).tools:
        where = f"{_KEY}.tool_config_path, {entry.class_name}"
        cls: type[Tool] = load_class(entry.class_name, folder, Tool, where)
        specs.append(cls.tool_spec(entry.config, entry.tool_schema, where))
    return specs


def load_class(reference: str, folder: Path, base: type, where: str) -> Any:
    """Load a user's class.

    Args:
        reference: `file.py:Name` or `package.module.Name`.
        folder: folder to which the path of a file is relative.
        base: class of which the user's must be a subclass.
        where: the key, for error messages.

    Returns:
        The class.

    Raises:
        ConfigError: there is no such class, or it lacks a method.
    """
    # `file.py:Name` has a colon, `package.module.Name` only dots.
    separator = ":" if ":" in reference else "."
    place, _, name = reference.rpartition(separator)
    if not place or not name:
        raise ConfigError(where, repr(reference), expected="file.py:Name or package.module.Name")
    is_file = place.endswith(".py")
    # `import_file` takes the path of a file, or the name of a module behind the prefix `PACKAGE`.
    source = folder / Path(place).expanduser() if is_file else f"{PACKAGE}{place}"
    user_class = member_of(import_file(source, where), name, where, base=base)
    require_methods(user_class, base, where, ConfigError)
    return user_class


def require_methods(user_class: type, base: type, where: str, error: type[QuadrigaError]) -> None:
    """Refuse a user's class that lacks an abstract method of its base class.

    Args:
        user_class: the class.
        base: base class whose docstrings say what the methods do, for the error.
        where: where the user names the class, for the error.
        error: type of the error to raise.
    """
    missing = sorted(getattr(user_class, "__abstractmethods__", ()))
    if missing:
        name = user_class.__qualname__
        raise error(
            where,
            got=f"{name}, a class without {', '.join(missing)}",
            expected=f"each abstract method of {base.__name__}",
            fix=f"Write {name}.{missing[0]}; see the docstring of {base.__name__}.{missing[0]}.",
        )


def describe(
    function: Callable[..., Any], *, name: str = "", description: str = ""
) -> tuple[dict[str, Any], Callable[[Any], BaseModel]]:
    """Derive the description of a function for the model from its signature and its docstring.

    Args:
        function: the function.
        name: name by which the model calls it. "": the function's name.
        description: description that the model reads. "": the docstring up to its first section.

    Returns:
        The schema of the function, and a function that checks the arguments of a call.

    Raises:
        RolloutError: there is no docstring, a parameter has no type hint or is `*args`, or JSON
            cannot express a type.
    """
    name = name or function.__name__
    where = f"tool {name} ({inspect.getsourcefile(function)})"
    docstring, argument_texts = _read_docstring(inspect.getdoc(function) or "")
    description = description or docstring
    if not description:
        fix = (
            "Write a docstring that says in a sentence what the function does: the model reads it."
        )
        raise RolloutError(where, got="no docstring", expected="one", fix=fix)
    config = ConfigDict(extra="forbid", protected_namespaces=())
    try:
        model = create_model(name, __config__=config, **_argument_fields(function, where))
        schema_text = json.dumps(model.model_json_schema())
    except (PydanticUserError, NameError) as error:
        raise RolloutError(
            where,
            got=f"a parameter that has no JSON form ({str(error).splitlines()[0]})",
            expected="types of JSON",
            fix="Use str, int, float, bool, list, dict, Literal, or a pydantic model.",
        ) from error

    # `object_hook` is called with every object of the schema, nested ones included.
    parameters = json.loads(schema_text, object_hook=_without_title)
    properties = parameters.get("properties", {})
    for argument, text in argument_texts.items():
        if argument in properties:
            properties[argument].setdefault("description", text)
    parameters.setdefault("required", [])
    # The check still refuses unknown arguments, but the schema for the model need not say so.
    del parameters["additionalProperties"]
    return function_schema(name, description, parameters), model.model_validate


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Make the schema of a tool in the form that chat templates take.

    Args:
        name: name of the tool.
        description: description that the model reads.
        parameters: JSON schema of the arguments.
    """
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _without_title(part: dict[str, Any]) -> dict[str, Any]:
    """Remove the title from an object of a JSON schema, and return the object.

    Pydantic derives titles from names, so they cost tokens and say nothing. A property with the
    name `title` stays: its value is a schema, not a text.
    """
    if isinstance(part.get("title"), str):
        del part["title"]
    return part


def validator_of(parameters: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Make a function that checks arguments against the JSON schema of a server or a file.

    Args:
        parameters: JSON schema of the arguments.

    Returns:
        A function that raises a `ValidationError` if a name or an outermost type is wrong. Types
        within lists and objects are not checked.
    """
    # A schema may require an argument that it does not describe, which may then have any type.
    required = parameters.get("required", ())
    schemas: dict[str, Mapping[str, Any]] = {name: {} for name in required}
    schemas |= parameters.get("properties", {})

    # The arguments as a TypedDict, which pydantic checks.
    hints = {}
    for name, schema in schemas.items():
        type_names = schema.get("type") or []
        if isinstance(type_names, str):
            type_names = [type_names]
        types = [_TYPES.get(type_name, Any) for type_name in type_names]
        hint = reduce(or_, types) if types else Any
        marker: Any = Required if name in required else NotRequired
        hints[name] = marker[hint]
    arguments = cast(Any, TypedDict)("arguments", hints)

    # A schema without properties does not say which names there are.
    takes_any_name = not parameters.get("properties") or parameters.get("additionalProperties")
    extra: Any = "allow" if takes_any_name else "forbid"
    arguments.__pydantic_config__ = ConfigDict(strict=True, extra=extra)
    return TypeAdapter(arguments).validate_python


def _argument_fields(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Type and default of each argument that the model writes, as `pydantic.create_model` takes them.

    Args:
        function: the function that is a tool.
        where: the tool, for error messages.

    Returns:
        Pairs of type and default by the argument's name. A default of `...` means that the argument
        is required.

    Raises:
        RolloutError: a parameter is `*args` or has no type hint, or a hint cannot be resolved.
    """
    try:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
    except NameError as error:
        raise RolloutError(
            where,
            got=f"a type hint that is not known ({error})",
            expected="types that the tool's file knows",
            fix="Import the type in the tool's file.",
        ) from error
    parameters.pop("self", None)
    fields = {}
    for name, parameter in parameters.items():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            fix = "Name each argument: a model writes arguments by name."
            raise RolloutError(where, got=f"*{name}", expected="named parameters", fix=fix)
        # Hidden from the model: a sample's `tools_kwargs` set these.
        if parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD):
            continue
        if parameter.annotation is Parameter.empty:
            raise RolloutError(
                where,
                got=f"{name} without a type hint",
                expected="a type for each argument",
                fix=f"Write for instance `{name}: str`.",
            )
        default = ... if parameter.default is Parameter.empty else parameter.default
        fields[name] = (parameter.annotation, default)
    return fields


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring of Google's form.

    Returns:
        The description before the first section, and the text of each argument by its name.
    """
    # Splitting by a pattern with one group alternates the titles and bodies of the sections.
    description, *sections = _SECTION.split(text)
    texts = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title not in _ARGUMENT_SECTIONS:
            continue
        name = ""
        for line in inspect.cleandoc(body).splitlines():
            argument = _ARGUMENT.fullmatch(line)
            if argument:
                name = argument[1]
                texts[name] = argument[2].strip()
            elif name and line.strip():
                # A line without a name continues the argument before it.
                texts[name] = f"{texts[name]} {line.strip()}".strip()
    return description.strip(), texts
