# SPDX-License-Identifier: Apache-2.0
"""How models write tool calls, by the name of the form (`multi_turn.format`).

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    qwen3_coder  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    glm          <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    gpt-oss      <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

A parser never raises: a call that cannot be read is one with a problem, which the model is told.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from quadriga.errors import RolloutError

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By the name of a tool, the JSON schema of its arguments."""

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_HARMONY = re.compile(
    r"to=functions\.([\w.\-]+)((?:(?!<\|message\|>).)*?)<\|message\|>(.*?)(<\|call\|>|<\|end\|>|<\|return\|>|\Z)",
    re.DOTALL,
)
_SHOWN = 200


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it.

    Attributes:
        name: of the tool; "" where it could not be read.
        arguments: by name, where it could be read.
        problem: why it could not be read; "": it could.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


Parser: TypeAlias = Callable[[str, Schemas], list[ToolCall]]


def hermes(text: str, schemas: Schemas) -> list[ToolCall]:
    """Calls as JSON objects between tags; Qwen and many others write them."""
    return [_hermes_call(found[1], found[2]) for found in _BLOCK.finditer(text)]


def _hermes_call(body: str, end: str) -> ToolCall:
    form = 'expected <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    if not end:
        return _unreadable(f"the tool call is not closed: {_shown(body)}; {form}")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _unreadable(f"the tool call is not JSON ({error}): {_shown(body)}; {form}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return _unreadable(f"the tool call has no name: {_shown(body)}; {form}")
    return _with_arguments(call["name"], call.get("arguments", {}), form)


def qwen3_coder(text: str, schemas: Schemas) -> list[ToolCall]:
    """Calls in tags for the function and for each parameter; Qwen3-Coder writes them."""
    form = "expected <tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>"
    calls = []
    for block in _BLOCK.finditer(text):
        found = _FUNCTION.search(block[1])
        if not block[2] or found is None or not found[1].strip():
            why = "names no function" if block[2] else "is not closed"
            calls.append(_unreadable(f"the tool call {why}: {_shown(block[1])}; {form}"))
            continue
        name = found[1].strip()
        pairs = [
            (one[1].strip(), one[2].removeprefix("\n").removesuffix("\n")) for one in _PARAMETER.finditer(found[2])
        ]
        calls.append(ToolCall(name, _typed(pairs, schemas.get(name, {}))))
    return calls


def glm(text: str, schemas: Schemas) -> list[ToolCall]:
    """Calls in tags for each key and value; GLM 4.5 and later write them."""
    form = "expected <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
    calls = []
    for block in _BLOCK.finditer(text):
        name = block[1].partition("<arg_key>")[0].strip()
        if not block[2] or not name or "\n" in name:
            why = "names no function" if block[2] else "is not closed"
            calls.append(_unreadable(f"the tool call {why}: {_shown(block[1])}; {form}"))
            continue
        pairs = [(one[1].strip(), one[2]) for one in _PAIR.finditer(block[1])]
        calls.append(ToolCall(name, _typed(pairs, schemas.get(name, {}))))
    return calls


def gpt_oss(text: str, schemas: Schemas) -> list[ToolCall]:
    """Calls as messages to `functions.NAME`; gpt-oss writes them."""
    form = "expected a message to=functions.NAME with a JSON object, ended by <|call|>"
    calls = []
    for found in _HARMONY.finditer(text):
        try:
            arguments = json.loads(found[3] or "{}")
        except (ValueError, RecursionError) as error:
            calls.append(_unreadable(f"the tool call is not JSON ({error}): {_shown(found[3])}; {form}", found[1]))
            continue
        calls.append(_with_arguments(found[1], arguments, form))
    return calls


PARSERS: dict[str, Parser] = {"hermes": hermes, "qwen3_coder": qwen3_coder, "glm": glm, "gpt-oss": gpt_oss}


def parser_named(name: str) -> Parser:
    """The parser of `multi_turn.format`.

    Raises:
        RolloutError: there is none of that name.
    """
    if name not in PARSERS:
        raise RolloutError(
            "actor_rollout_ref.rollout.multi_turn.format", got=name, expected=f"one of {', '.join(PARSERS)}"
        )
    return PARSERS[name]


def _unreadable(problem: str, name: str = "") -> ToolCall:
    return ToolCall(name, problem=problem)


def _with_arguments(name: str, arguments: Any, form: str) -> ToolCall:
    if isinstance(arguments, str):  # JSON inside JSON, as OpenAI's interface has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return _unreadable(f"the arguments are not JSON ({error}): {_shown(arguments)}; {form}", name)
    if not isinstance(arguments, dict):
        return _unreadable(f"the arguments are no object: {_shown(json.dumps(arguments))}; {form}", name)
    return ToolCall(name, arguments)


def _typed(pairs: list[tuple[str, str]], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Texts in the types that the schema asks for; where they do not fit, the check of the arguments says so."""
    properties = schema.get("properties", {})
    return {name: _value(text, properties.get(name, {})) for name, text in pairs}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    options = [schema, *schema.get("anyOf", ())]
    if any(one.get("type") == "string" or "enum" in one for one in options) and text.strip() != "null":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
