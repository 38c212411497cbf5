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
from functools import partial
from typing import Any, TypeAlias

# JSON schema of the arguments of each tool, by the name of the tool.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]

# A call, and its closing tag: "" if the next call or the end of the text comes first.
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
# An element that is not closed ends with the text. If the search went on at the next beginning instead, a long text of
# beginnings would take quadratic time.
_FUNCTION = re.compile(r"<function=([^<>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)
# Key, value, and the closing tag of the value: "" if the text ends before it.
_PAIR = re.compile(
    r"<arg_key>(.*?)(?:</arg_key>\s*+<arg_value>(.*?)(</arg_value>|\Z)|\Z)", re.DOTALL
)
# Name of the tool, the tag before the body, and the body; "" for both if the text ends before it.
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

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False, default=str)


Parser: TypeAlias = Callable[[str, Schemas], list[ToolCall]]


class _UnreadableError(Exception):
    """A call cannot be read.

    Its `args` are the name of the tool ("" if it is not known), the problem, and the text to show.
    """


def _parse_blocks(
    parse: Callable[[str, Schemas], ToolCall], expected_form: str, text: str, schemas: Schemas
) -> list[ToolCall]:
    """Parse the calls between the tags `<tool_call>` and `</tool_call>`.

    Args:
        parse: reads a call from the text between the tags, or raises an `_UnreadableError`.
        expected_form: what the model should have written, for the problem of a call.
        text: the model's turn.
        schemas: schemas of the arguments, by the name of the tool.

    Returns:
        The calls in their order.
    """
    calls = []
    for body, closing_tag in _BLOCK.findall(text):
        try:
            if not closing_tag:
                raise _UnreadableError("", "the tool call is not closed", body)
            calls.append(parse(body, schemas))
        except _UnreadableError as error:
            calls.append(_call_with_problem(error, expected_form))
    return calls


def _call_with_problem(error: _UnreadableError, expected_form: str) -> ToolCall:
    """Make the `ToolCall` of a call that cannot be read. Its problem quotes the text, cut short."""
    name, problem, text = error.args
    shown = text.strip()
    if len(shown) > _MAX_SHOWN_CHARACTERS:
        shown = f"{shown[:_MAX_SHOWN_CHARACTERS]}..."
    return ToolCall(name, problem=f"{problem}: {shown}; {expected_form}")


def _parse_hermes(body: str, schemas: Schemas) -> ToolCall:
    """Parse a call that is a JSON object, as Qwen and many others write it."""
    content = _from_json("", body, "the tool call is")
    name = content.get("name") if isinstance(content, dict) else None
    if not name or not isinstance(name, str):
        raise _UnreadableError("", "the tool call has no name", body)
    return _call_with_arguments(name, content.get("arguments", {}))


def _parse_qwen3_coder(body: str, schemas: Schemas) -> ToolCall:
    """Parse a call with tags for the function and each parameter, as Qwen3-Coder writes it."""
    function = _FUNCTION.search(body)
    if function is None:
        raise _UnreadableError("", "the tool call names no function", body)
    # The model writes a value between two line breaks, which are not part of it.
    pairs = [
        (key, value.removeprefix("\n").removesuffix("\n"))
        for key, value in _PARAMETER.findall(function[2])
    ]
    return _tagged_call(function[1].strip(), pairs, body, schemas)


def _parse_glm(body: str, schemas: Schemas) -> ToolCall:
    """Parse a call with tags for each key and value, as GLM 4.5 and later write it."""
    name = body.partition("<arg_key>")[0].strip()
    if "\n" in name:  # text, not a name
        name = ""
    # An argument without its closing tag is left out; the check of the arguments may report it.
    pairs = [(key, value) for key, value, closing_tag in _PAIR.findall(body) if closing_tag]
    return _tagged_call(name, pairs, body, schemas)


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
    for name, message_tag, body in _HARMONY.findall(text):
        # Without a body, the text only mentions a recipient, and is no call.
        if not message_tag:
            continue
        try:
            arguments = _from_json(name, body or "{}", "the tool call is")
            calls.append(_call_with_arguments(name, arguments))
        except _UnreadableError as error:
            calls.append(_call_with_problem(error, expected_form))
    return calls


# Parsers by `multi_turn.format`. A file of agent loops may add its own.
PARSERS: dict[str, Parser] = {
    "hermes": partial(
        _parse_blocks,
        _parse_hermes,
        'expected <tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    ),
    "qwen3_coder": partial(
        _parse_blocks,
        _parse_qwen3_coder,
        "expected <tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>",
    ),
    "glm": partial(
        _parse_blocks,
        _parse_glm,
        "expected <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
    ),
    "gpt-oss": gpt_oss,
}


def _from_json(name: str, text: str, subject: str) -> Any:
    """Decode JSON that the model has written.

    Args:
        name: name of the tool, for the problem; "" if it is not known.
        text: the text.
        subject: beginning of the problem, such as "the tool call is".

    Raises:
        _UnreadableError: the text is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(name, f"{subject} not JSON ({error})", text) from error


def _call_with_arguments(name: str, arguments: Any) -> ToolCall:
    """Make a tool call of a format whose arguments are JSON.

    Args:
        name: name of the tool.
        arguments: the decoded arguments, or a text with the arguments as JSON.

    Raises:
        _UnreadableError: the arguments are not a JSON object.
    """
    if isinstance(arguments, str):  # JSON inside JSON, as in OpenAI's API
        arguments = _from_json(name, arguments, "the arguments are")
    if not isinstance(arguments, dict):
        raise _UnreadableError(name, "the arguments are no object", json.dumps(arguments))
    return ToolCall(name, arguments)


def _tagged_call(name: str, pairs: list[tuple[str, str]], body: str, schemas: Schemas) -> ToolCall:
    """Make a call that is written with tags. Its arguments get the types of the tool's schema.

    Args:
        name: name of the tool; "" if there is none.
        pairs: name and text of each argument.
        body: text of the call, for its problem.
        schemas: schemas of the arguments, by the name of the tool.

    Raises:
        _UnreadableError: there is no name.
    """
    if not name:
        raise _UnreadableError("", "the tool call names no function", body)
    properties = schemas.get(name, {}).get("properties", {})
    arguments = {}
    for key, text in pairs:
        key = key.strip()
        arguments[key] = _typed_value(text, properties.get(key, {}))
    return ToolCall(name, arguments)


def _typed_value(text: str, schema: Mapping[str, Any]) -> Any:
    """Convert the text of an argument to the type that its schema names.

    If the schema allows a text, the text stays as it is. Otherwise it is decoded as JSON.
    """
    options = [schema, *schema.get("anyOf", ())]
    # A type is a name or a list of names. An enum may have texts, and values of other types.
    may_be_text = any(
        "string" in (option.get("type") or ()) or text in option.get("enum", ())
        for option in options
    )
    # "null" stands for the absence of an optional argument, so it is decoded to None.
    if may_be_text and text.strip() != "null":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # The tool's check of its arguments reports that a text has the wrong type.
        return text
