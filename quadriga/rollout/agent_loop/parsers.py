# SPDX-License-Identifier: Apache-2.0
"""How models write tool calls, by the name of the form (`multi_turn.format`).

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    qwen3_coder  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    glm          <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    gpt-oss      <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

A parser never raises: a call that cannot be read is one with a problem, whose text the model reads.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Schemas: TypeAlias = Mapping[
    str, Mapping[str, Any]
]  # by the name of a tool, the JSON schema of its arguments

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
# Each form takes what is not closed up to the end: were the next beginning tried in vain, time would be quadratic.
_FUNCTION = re.compile(r"<function=([^<>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)
_PAIR = re.compile(
    r"<arg_key>(.*?)(?:</arg_key>\s*+<arg_value>(.*?)(</arg_value>|\Z)|\Z)", re.DOTALL
)
_HARMONY = re.compile(
    r"to=functions\.([\w.\-]++).*?(?:(<\|message\|>)(.*?)(?:<\|call\|>|<\|end\|>|<\|return\|>|\Z)|\Z)",
    re.DOTALL,
)
_SHOWN = 200


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it."""

    name: str  # of the tool; "" where it could not be read
    arguments: dict[str, Any] = field(default_factory=dict)  # by name, where it could be read
    problem: str = ""  # why it could not be read; "": it could


Parser: TypeAlias = Callable[[str, Schemas], list[ToolCall]]


def hermes(text: str, schemas: Schemas) -> list[ToolCall]:
    """Calls as JSON objects between tags; Qwen and many others write them."""
    form = 'expected <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    calls = []
    for body, end in _BLOCK.findall(text):
        unclosed = None if end else _unreadable("the tool call is not closed", body, form)
        call = unclosed or _from_json(body, "the tool call is", form)
        if isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]:
            call = _with_arguments(call["name"], call.get("arguments", {}), form)
        calls.append(
            call
            if isinstance(call, ToolCall)
            else _unreadable("the tool call has no name", body, form)
        )
    return calls


def qwen3_coder(text: str, schemas: Schemas) -> list[ToolCall]:
    """Calls in tags for the function and for each parameter; Qwen3-Coder writes them."""
    form = "expected <tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>"
    calls = []
    for body, end in _BLOCK.findall(text):
        found = _FUNCTION.search(body)
        name = found[1].strip() if found else ""
        parameters = _PARAMETER.findall(found[2]) if found else []
        pairs = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in parameters]
        calls.append(_tagged_call(name, pairs, body, end, form, schemas))
    return calls


def glm(text: str, schemas: Schemas) -> list[ToolCall]:
    """Calls in tags for each key and value; GLM 4.5 and later write them."""
    form = "expected <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
    calls = []
    for body, end in _BLOCK.findall(text):
        name = body.partition("<arg_key>")[0].strip()
        pairs = [(key, value) for key, value, is_closed in _PAIR.findall(body) if is_closed]
        calls.append(_tagged_call("" if "\n" in name else name, pairs, body, end, form, schemas))
    return calls


def gpt_oss(text: str, schemas: Schemas) -> list[ToolCall]:
    """Calls as messages to `functions.NAME`; gpt-oss writes them."""
    form = "expected a message to=functions.NAME with a JSON object, ended by <|call|>"
    found = ((name, body or "{}") for name, mark, body in _HARMONY.findall(text) if mark)
    return [
        _with_arguments(name, _from_json(body, "the tool call is", form, name), form)
        for name, body in found
    ]


PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "gpt-oss": gpt_oss,
}
"""By `multi_turn.format`; a file of agent loops may add its own."""


def _unreadable(problem: str, text: str, form: str, name: str = "") -> ToolCall:
    text = text.strip()
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return ToolCall(name, problem=f"{problem}: {shown}; {form}")


def _from_json(text: str, what: str, form: str, name: str = "") -> Any:
    """The value of a text; a `ToolCall` with the problem where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return _unreadable(f"{what} not JSON ({error})", text, form, name)


def _with_arguments(name: str, arguments: Any, form: str) -> ToolCall:
    if isinstance(arguments, str):  # JSON inside JSON, as OpenAI's interface has it
        arguments = _from_json(arguments, "the arguments are", form, name)
    if isinstance(arguments, ToolCall):
        return arguments
    if not isinstance(arguments, dict):
        return _unreadable("the arguments are no object", json.dumps(arguments), form, name)
    return ToolCall(name, arguments)


def _tagged_call(
    name: str, pairs: list[tuple[str, str]], body: str, end: str, form: str, schemas: Schemas
) -> ToolCall:
    """Texts in the types that the schema names; where they do not fit, the check of the arguments says so."""
    if not end or not name:
        return _unreadable(
            f"the tool call {'names no function' if end else 'is not closed'}", body, form
        )
    properties = schemas.get(name, {}).get("properties", {})
    return ToolCall(
        name, {key.strip(): _value(text, properties.get(key.strip(), {})) for key, text in pairs}
    )


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    options = [schema, *schema.get("anyOf", ())]
    if (
        any(one.get("type") == "string" or "enum" in one for one in options)
        and text.strip() != "null"
    ):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
