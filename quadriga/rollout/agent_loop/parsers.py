# SPDX-License-Identifier: Apache-2.0
"""Parsers for the formats in which models write tool calls (`multi_turn.format`).

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    qwen3_coder  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    glm          <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    gpt-oss      <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

A parser never raises. For a call that cannot be read it returns a `ToolCall` with a problem, which the model reads.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# JSON schema of the arguments of each tool, by the name of the tool.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
# An element that is not closed ends with the text. If the search went on at the next beginning instead, a long text of
# beginnings would take quadratic time.
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
_MAX_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it."""

    name: str  # of the tool; "" if it cannot be read
    arguments: dict[str, Any] = field(default_factory=dict)  # by name; empty if they cannot be read
    problem: str = ""  # why the call cannot be read; "" if it can


Parser: TypeAlias = Callable[[str, Schemas], list[ToolCall]]


def hermes(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse calls that are JSON objects between tags, as Qwen and many others write them.

    Args:
        text: the model's turn.
        schemas: not used: JSON has types.

    Returns:
        The calls in their order.
    """
    expected_form = 'expected <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    calls = []
    for body, end in _BLOCK.findall(text):
        if not end:
            calls.append(_unreadable("the tool call is not closed", body, expected_form))
            continue
        content = _from_json(body, "the tool call is", expected_form)
        if isinstance(content, ToolCall):
            calls.append(content)
            continue
        name = content.get("name") if isinstance(content, dict) else None
        if name and isinstance(name, str):
            calls.append(_call_with_arguments(name, content.get("arguments", {}), expected_form))
        else:
            calls.append(_unreadable("the tool call has no name", body, expected_form))
    return calls


def qwen3_coder(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse calls with tags for the function and each parameter, as Qwen3-Coder writes them.

    Args:
        text: the model's turn.
        schemas: types of the arguments, by the name of the tool.

    Returns:
        The calls in their order.
    """
    expected_form = "expected <tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>"
    calls = []
    for body, end in _BLOCK.findall(text):
        name = ""
        pairs = []
        function = _FUNCTION.search(body)
        if function:
            name = function[1].strip()
            for key, value in _PARAMETER.findall(function[2]):
                # The model writes a value between two line breaks, which are not part of it.
                pairs.append((key, value.removeprefix("\n").removesuffix("\n")))
        calls.append(_tagged_call(name, pairs, body, end, expected_form, schemas))
    return calls


def glm(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse calls with tags for each key and value, as GLM 4.5 and later write them.

    Args:
        text: the model's turn.
        schemas: types of the arguments, by the name of the tool.

    Returns:
        The calls in their order.
    """
    expected_form = (
        "expected <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
    )
    calls = []
    for body, end in _BLOCK.findall(text):
        name = body.partition("<arg_key>")[0].strip()
        if "\n" in name:  # text, not a name
            name = ""
        pairs = [(key, value) for key, value, is_closed in _PAIR.findall(body) if is_closed]
        calls.append(_tagged_call(name, pairs, body, end, expected_form, schemas))
    return calls


def gpt_oss(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse calls that are messages to `functions.NAME`, as gpt-oss writes them.

    Args:
        text: the model's turn.
        schemas: not used: JSON has types.

    Returns:
        The calls in their order.
    """
    expected_form = "expected a message to=functions.NAME with a JSON object, ended by <|call|>"
    calls = []
    for name, has_body, body in _HARMONY.findall(text):
        # Without a body it is the model's mention of a recipient, and no call.
        if has_body:
            arguments = _from_json(body or "{}", "the tool call is", expected_form, name)
            calls.append(_call_with_arguments(name, arguments, expected_form))
    return calls


# By `multi_turn.format`. A file of agent loops may add parsers.
PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "gpt-oss": gpt_oss,
}


def _unreadable(problem: str, text: str, expected_form: str, name: str = "") -> ToolCall:
    """Make a call that cannot be read.

    Args:
        problem: why it cannot be read.
        text: the text that the model wrote, of which the problem shows the beginning.
        expected_form: the expected form, which the problem shows.
        name: name of the tool; "" if it is not known.
    """
    shown = text.strip()
    if len(shown) > _MAX_SHOWN_CHARACTERS:
        shown = f"{shown[:_MAX_SHOWN_CHARACTERS]}..."
    return ToolCall(name, problem=f"{problem}: {shown}; {expected_form}")


def _from_json(text: str, subject: str, expected_form: str, name: str = "") -> Any:
    """Decode JSON. A text that is no JSON becomes a `ToolCall` with the problem.

    Args:
        text: the text.
        subject: beginning of the problem, such as "the tool call is".
        expected_form: the expected form, for the problem.
        name: name of the tool; "" if it is not known.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return _unreadable(f"{subject} not JSON ({error})", text, expected_form, name)


def _call_with_arguments(name: str, arguments: Any, expected_form: str) -> ToolCall:
    """Make a tool call; if the arguments are not a JSON object, one with `problem` set.

    Args:
        name: name of the tool.
        arguments: decoded arguments, JSON text of them, or what `_from_json` returned for
            unreadable JSON (a `ToolCall` with the problem), which is returned as it is.
        expected_form: the expected form, for the problem.
    """
    if isinstance(arguments, str):  # JSON inside JSON, as in OpenAI's API
        arguments = _from_json(arguments, "the arguments are", expected_form, name)
    if isinstance(arguments, ToolCall):
        return arguments
    if not isinstance(arguments, dict):
        return _unreadable(
            "the arguments are no object", json.dumps(arguments), expected_form, name
        )
    return ToolCall(name, arguments)


def _tagged_call(
    name: str,
    pairs: list[tuple[str, str]],
    body: str,
    end: str,
    expected_form: str,
    schemas: Schemas,
) -> ToolCall:
    """Make a call that is written with tags. Its arguments get the types of the tool's schema.

    Args:
        name: name of the tool; "" if there is none.
        pairs: name and text of each argument.
        body: text of the call, for its problem.
        end: the closing tag; "" if it is missing.
        expected_form: the expected form, for the problem.
        schemas: schemas of the arguments, by the name of the tool.
    """
    if not end:
        return _unreadable("the tool call is not closed", body, expected_form)
    if not name:
        return _unreadable("the tool call names no function", body, expected_form)
    properties = schemas.get(name, {}).get("properties", {})
    arguments = {}
    for key, text in pairs:
        key = key.strip()
        arguments[key] = _typed_value(text, properties.get(key, {}))
    return ToolCall(name, arguments)


def _typed_value(text: str, schema: Mapping[str, Any]) -> Any:
    """Convert the text of an argument to the type that its schema names.

    A schema that allows texts takes the text as it is; another one takes its value as JSON.
    """
    options = [schema, *schema.get("anyOf", ())]
    may_be_text = any(option.get("type") == "string" or "enum" in option for option in options)
    # An optional text may be null.
    if may_be_text and text.strip() != "null":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # The check of the arguments reports that this is no value of the type.
        return text
