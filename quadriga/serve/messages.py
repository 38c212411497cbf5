# SPDX-License-Identifier: Apache-2.0
"""Render the messages and tools of a chat call to a prompt."""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from quadriga.errors import DataError, RolloutError
from quadriga.protocol.memory import images_key
from quadriga.rollout.interface import Images
from quadriga.serve.errors import CallError, JsonObject, format_value
from quadriga.serve.fields import Fields, read_json
from quadriga.serve.policy import ServedPolicy

MAX_IMAGES = 32
"""Most images of a call. `quadriga.data.pictures` limits the pixels of each."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class RenderedPrompt(NamedTuple):
    """A prompt for the engine.

    Attributes:
        token_ids: tokens of the prompt. An image has a token for each of its embeddings.
        schemas: JSON schemas of the arguments of tools, by name of the tool.
        images: the images; None if there are none.
    """

    token_ids: list[int]
    schemas: dict[str, Mapping[str, Any]]
    images: Images | None


def render_prompt(fields: Fields, policy: ServedPolicy) -> RenderedPrompt:
    """Render the messages and tools of a call by the chat template.

    Args:
        fields: body of the call.
        policy: the served policy.

    Raises:
        CallError: a field is wrong, the template refuses the messages, or an image cannot be read.
    """
    tools = _read_tools(fields)
    messages = []
    # Names of the functions that were called so far, by id of the call: messages with the response of a
    # tool may have only the id.
    names = {}
    for place, message in enumerate(fields.need("messages", "a list")):
        messages.append(_convert_message(Fields(message, f"messages[{place}]"), names, policy))
    if not messages:
        raise CallError("messages", got="an empty list", expected="at least one message")
    # Tools that the model must not call are checked above, but not rendered.
    if fields.values.get("tool_choice") == "none":
        tools = []
    # Special tokens in texts are escaped, so that no text can end the turn that contains it.
    messages, pictures = policy.encoder.escape_messages(messages)
    if len(pictures) > MAX_IMAGES:
        raise CallError("messages", got=f"{len(pictures)} images", expected=f"at most {MAX_IMAGES}")
    try:
        with policy.lock:
            token_ids = policy.encoder.encode_prompt(messages, tools)
            images = None
            if pictures:
                # Each image has a single token so far. It is replaced by one for each embedding.
                prompt = policy.processor.conversation(
                    token_ids, pictures, (), policy.encoder.encode, "messages"
                )
                images = Images(
                    pictures=prompt.pictures,
                    inputs=prompt.inputs,
                    position_ids=prompt.positions,
                    short_prompt=tuple(token_ids),
                    key=images_key(prompt.inputs),
                )
                token_ids = prompt.ids
    except (RolloutError, DataError) as error:
        raise CallError(error.where, error.got, error.expected, error.fix) from error
    functions = [tool["function"] for tool in tools]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    return RenderedPrompt(token_ids, schemas, images)


def _convert_message(fields: Fields, names: dict[str, str], policy: ServedPolicy) -> JsonObject:
    """Convert a message of a call to one for the chat template.

    Args:
        fields: the message.
        names: names of functions by id of the tool call. Those of this message are added.
        policy: the served policy.

    Raises:
        CallError: a field is wrong.
    """
    role = fields.need("role", "a text")
    if role == "tool":
        call_id = fields.need("tool_call_id", "a text")
        message = {"role": role, "tool_call_id": call_id}
        message["name"] = fields.get("name", "a text", names.get(call_id, ""))
    elif role in _ROLES:
        message = {"role": _ROLES[role]}
    else:
        raise CallError(
            fields.where("role"),
            got=format_value(role),
            expected=f"one of {', '.join(_ROLES)}, tool",
        )
    if role == "assistant":
        calls = []
        for place, call in enumerate(fields.get("tool_calls", "a list", [])):
            call_fields = Fields(call, fields.where(f"tool_calls[{place}]"))
            calls.append(_convert_tool_call(call_fields, names, policy))
        if calls:
            message["tool_calls"] = calls
        # A turn that only calls tools has no content.
        if fields.values.get("content") is None:
            message["content"] = ""
            return message
    message["content"] = _convert_content(fields, policy)
    return message


def _convert_content(fields: Fields, policy: ServedPolicy) -> Any:
    """Convert the content of a message for the chat template.

    Args:
        fields: the message.
        policy: the served policy.

    Returns:
        A text, or a list of parts if there are images.

    Raises:
        CallError: the content has another form, or an image for a model that takes none.
    """
    content = fields.values.get("content")
    if not isinstance(content, list):
        return fields.need("content", "a text")
    parts = []
    for place, value in enumerate(content):
        part = Fields(value, fields.where(f"content[{place}]"))
        kind = part.need("type", "a text")
        if kind == "text":
            parts.append({"type": "text", "text": part.need("text", "a text")})
        elif kind == "image_url" and policy.processor is not None:
            parts.append({"type": "image", "image": _decode_image(part)})
        else:
            raise CallError(
                part.where("type"),
                got=f"a part of type {format_value(kind)}",
                expected="'text'" if policy.processor is None else "'text' or 'image_url'",
                fix=f"Leave the part out: {policy.name} takes no others.",
            )
    if all(part["type"] == "text" for part in parts):
        # Templates of language models take no parts.
        return "".join(part["text"] for part in parts)
    return parts


def _decode_image(part: Fields) -> bytes:
    """Decode an image from its `data:` URL.

    Raises:
        CallError: it is another URL, which the server does not open, or not valid base64.
    """
    image = part.section("image_url")
    url = image.need("url", "a text")
    head, _, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise CallError(
            image.where("url"),
            got=format_value(url),
            expected="'data:image/...;base64,...'",
            fix="Send the image itself: the server opens no addresses.",
        )
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise CallError(image.where("url"), got=str(error), expected="base64") from error


def _convert_tool_call(fields: Fields, names: dict[str, str], policy: ServedPolicy) -> JsonObject:
    """Convert a tool call of an earlier turn to the form that chat templates take.

    Args:
        fields: the tool call.
        names: names of functions by id of the tool call, to which this one is added.
        policy: the served policy.

    Raises:
        CallError: a field is wrong.
    """
    function = fields.section("function")
    name = function.need("name", "a text")
    call_id = fields.get("id", "a text", "")
    names[call_id] = name
    arguments = function.values.get("arguments", "{}")
    if isinstance(arguments, str):
        arguments = read_json(arguments or "{}", function.where("arguments"))
    # `Fields` refuses arguments that are no object.
    arguments = Fields(arguments, function.where("arguments")).values
    # The template writes the arguments as text, so special tokens in them are escaped as in messages.
    escaped = policy.encoder.escape_text(json.dumps(dict(arguments), ensure_ascii=False))
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": json.loads(escaped)},
    }


def _read_tools(fields: Fields) -> list[JsonObject]:
    """Read the tools that a call offers. Schemas are checked as far as templates and parsers read them.

    Args:
        fields: body of the call.

    Returns:
        The tools as the client has sent them.

    Raises:
        CallError: a field is wrong.
    """
    tools = fields.get("tools", "a list", [])
    for place, value in enumerate(tools):
        tool = Fields(value, f"tools[{place}]")
        if tool.need("type", "a text") != "function":
            where = tool.where("type")
            raise CallError(where, got=format_value(tool.values["type"]), expected="'function'")
        function = tool.section("function")
        if not function.need("name", "a text"):
            raise CallError(function.where("name"), got="an empty text", expected="a name")
        function.get("description", "a text")
        parameters = function.section("parameters", {})
        if parameters.values.get("type", "object") != "object":
            raise CallError(
                function.where("parameters"),
                got=f"the type {format_value(parameters.values['type'])}",
                expected="a JSON schema of type 'object'",
            )
        # Parsers read the schema of each property, and the alternatives in `anyOf`. All must be objects,
        # which `Fields` checks.
        properties = parameters.get("properties", "an object", {})
        for name, schema in properties.items():
            schema_fields = Fields(schema, parameters.where(f"properties.{name}"))
            for number, option in enumerate(schema_fields.get("anyOf", "a list", [])):
                Fields(option, schema_fields.where(f"anyOf[{number}]"))
        parameters.get("required", "a list")
    return tools
