# SPDX-License-Identifier: Apache-2.0
"""What a model reads about a tool, and whether its arguments fit: out of a function's signature and docstring.

    @function_tool
    def multiply(a: float, b: float = 1.0, *, limit: float = 1e9) -> float:
        '''Multiply two numbers.                {"type": "function", "function": {"name": "multiply",
                                                  "description": "Multiply two numbers.",
        Args:                              ->     "parameters": {"type": "object", "properties": {
            a: the first factor.                    "a": {"type": "number", "description": "the first factor."},
        '''                                         "b": {"type": "number", "default": 1.0}}, "required": ["a"]}}}

What follows a `*` is not shown to the model: `tools_kwargs` of a sample may set it.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from quadriga.errors import RolloutError

_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SECTION = re.compile(r"(?m)^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_ARGUMENT = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}


class ArgumentError(RolloutError):
    """Arguments of a tool call that do not fit; the model reads why."""


class Signature:
    """The arguments of a tool: what the model is told of them, and what it may write.

    Args:
        schema: as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}.
        model: checks and converts arguments; None: the schema alone decides.
    """

    def __init__(self, schema: Mapping[str, Any], model: type[BaseModel] | None = None) -> None:
        self.schema = dict(schema)
        self.model = model

    @property
    def name(self) -> str:
        """Of the tool."""
        return self.schema["function"]["name"]

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.schema["function"]["parameters"]

    def check(self, arguments: Any) -> dict[str, Any]:
        """The arguments in the types that the tool takes.

        Raises:
            ArgumentError: what does not fit, in words for the model.
        """
        if not isinstance(arguments, dict):
            raise self._refused(f"the arguments are {_kind(arguments)}, not an object")
        if self.model is None:
            if wrong := _mistakes(self.parameters, arguments):
                raise self._refused("; ".join(wrong))
            return arguments
        try:
            checked = self.model.model_validate(arguments)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
            raise self._refused("; ".join(wrong)) from error
        return {name: getattr(checked, name) for name in checked.model_fields_set}

    def _refused(self, why: str) -> ArgumentError:
        expected = json.dumps(self.parameters, ensure_ascii=False)
        return ArgumentError(f"tool {self.name}", got=why, expected=f"arguments that fit {expected}")


def signature_of(function: Callable[..., Any], *, name: str = "", description: str = "") -> Signature:
    """Of a function with type hints and a docstring.

    Args:
        function: its positional parameters are the tool's arguments, `self` aside.
        name: of the tool; "": the function's.
        description: "": the docstring up to its first section.

    Raises:
        RolloutError: no docstring, a parameter without a type hint, `*args`, or a type that JSON cannot express.
    """
    name = name or function.__name__
    where = f"tool {name} ({inspect.getsourcefile(function)})"
    said, argument_texts = _read_docstring(inspect.getdoc(function) or "")
    if not (description or said):
        fix = "Write under its `def` in a sentence what it does: the model reads it."
        raise RolloutError(where, got="no docstring", expected="one", fix=fix)
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    model = _arguments_model(name, _fields(function, parameters, where), where)
    schema = _untitled(model.model_json_schema())
    for argument, text in argument_texts.items():
        if argument in schema.get("properties", {}):
            schema["properties"][argument].setdefault("description", text)
    schema.setdefault("required", [])
    schema.pop("additionalProperties", None)
    described = {"name": name, "description": description or said, "parameters": schema}
    return Signature({"type": "function", "function": described}, model)


def options_of(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the keyword-only parameters: what `tools_kwargs` may set. "**": anything."""
    parameters = inspect.signature(function).parameters.values()
    names = {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    return frozenset(names | ({"**"} if takes_any else set()))


def _fields(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], where: str) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        fix = "Import the type in the tool's file."
        raise RolloutError(where, got=f"a type hint that is not known ({error})", expected="types", fix=fix) from error
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            fix = "Name each argument: a model writes arguments by name."
            raise RolloutError(where, got=f"*{name}", expected="named parameters", fix=fix)
        if parameter.kind not in _KINDS:
            continue
        if name not in hints:
            fix = f"Write for instance `{name}: str`."
            raise RolloutError(where, got=f"{name} without a type hint", expected="a type for each argument", fix=fix)
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[name] = (hints[name], default)
    return fields


def _arguments_model(name: str, fields: dict[str, Any], where: str) -> type[BaseModel]:
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
        model.model_json_schema()
    except (PydanticUserError, NameError) as error:
        reason = str(error).partition("\n")[0]
        fix = "Take str, int, float, bool, list, dict, Literal, or a pydantic model."
        raise RolloutError(
            where, got=f"a parameter that has no JSON form ({reason})", expected="types of JSON", fix=fix
        ) from error
    return model


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description before the first section, and the text for each argument."""
    parts = _SECTION.split(text)
    texts: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            texts |= _argument_texts(body)
    return parts[0].strip(), texts


def _argument_texts(body: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    lines = inspect.cleandoc(body).splitlines()
    last = ""
    for line in lines:
        found = _ARGUMENT.fullmatch(line)
        if found:
            last = found[1]
            texts[last] = found[2].strip()
        elif last and line.strip():
            texts[last] = f"{texts[last]} {line.strip()}".strip()
    return texts


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic makes up of names: they cost tokens and say nothing."""
    if isinstance(schema, list):
        return [_untitled(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: _untitled(one) for name, one in value.items()}
        elif not (key == "title" and isinstance(value, str)):
            kept[key] = _untitled(value)
    return kept


def _mistakes(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """What a schema of somebody else's says against the arguments: names, and types at the top."""
    properties = parameters.get("properties", {})
    wrong = [f"{name} is missing" for name in parameters.get("required", ()) if name not in arguments]
    for name, value in arguments.items():
        if name not in properties:
            if properties and not parameters.get("additionalProperties", False):
                wrong.append(f"{name} is not one of {', '.join(properties)}")
            continue
        wanted = properties[name].get("type")
        wanted = [wanted] if isinstance(wanted, str) else wanted or []
        if wanted and not any(_is_of(value, one) for one in wanted):
            wrong.append(f"{name} is {_kind(value)}, not {' or '.join(wanted)}")
    return wrong


def _is_of(value: Any, wanted: str) -> bool:
    if wanted == "null":
        return value is None
    if isinstance(value, bool):
        return wanted == "boolean"
    return isinstance(value, _TYPES.get(wanted, (object,)))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return next((f"of type {name}" for name in ("boolean", *_TYPES) if _is_of(value, name)), type(value).__name__)
