# SPDX-License-Identifier: Apache-2.0
"""From the messages and tools of a call to a prompt."""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from quadriga.errors import DataError, RolloutError
from quadriga.protocol.memory import images_key
from quadriga.rollout.interface import Images
from quadriga.serve.errors import CallError, shown
from quadriga.serve.fields import Fields, read_json
from quadriga.serve.policy import ServedPolicy

MAX_IMAGES = 32
"""Images of a call. Each is decoded, to as many pixels as `quadriga.data.pictures` takes."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class RenderedPrompt(NamedTuple):
    """A prompt as the engine takes it.

    Attributes:
        token_ids: its tokens, with one for each embedding of an image.
        schemas: JSON schema of the arguments of each tool, by its name.
        images: the images; None if there are none.
    """

    token_ids: list[int]
    schemas: dict[str, Mapping[str, Any]]
    images: Images | None


def rendered_prompt(fields: Fields, policy: ServedPolicy) -> RenderedPrompt:
    """Render the messages and tools of a call by the chat template.

    Raises:
        CallError: a field is wrong, the template refuses the messages, or an image cannot be read.
    """
    tools = _tools(fields)
    messages = []
    names: dict[str, str] = {}  # of the functions, by the id of the call
    for place, message in enumerate(fields.need("messages", "a list")):
        messages.append(_message(Fields(message, f"messages[{place}]"), names, policy))
    if not messages:
        raise CallError("messages", got="an empty list", expected="at least one message")
    if fields.values.get("tool_choice") == "none":
        tools = []
    # No text can hold a special token, and so end its turn.
    messages, pictures = policy.encoder.plain_messages(messages)
    if len(pictures) > MAX_IMAGES:
        raise CallError("messages", got=f"{len(pictures)} images", expected=f"at most {MAX_IMAGES}")
    try:
        with policy.lock:
            token_ids = policy.encoder.prompt(messages, tools)
            images = None
            if pictures:
                token_ids, images = _with_images(token_ids, pictures, policy)
    except (RolloutError, DataError) as error:
        raise CallError(error.where, error.got, error.expected, error.fix) from error
    functions = [tool["function"] for tool in tools]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    return RenderedPrompt(token_ids, schemas, images)


def _with_images(
    token_ids: list[int], pictures: list[bytes], policy: ServedPolicy
) -> tuple[list[int], Images]:
    """A prompt with one token for each image, as the engine takes it, and the images."""
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
    return prompt.ids, images


def _message(fields: Fields, names: dict[str, str], policy: ServedPolicy) -> dict[str, Any]:
    """A message for the chat template."""
    role = fields.need("role", "a text")
    if role == "tool":
        call_id = fields.need("tool_call_id", "a text")
        message = {"role": role, "tool_call_id": call_id}
        message["name"] = fields.get("name", "a text", names.get(call_id, ""))
    elif role in _ROLES:
        message = {"role": _ROLES[role]}
    else:
        expected = f"one of {', '.join(_ROLES)}, tool"
        raise CallError(fields.where("role"), got=shown(role), expected=expected)
    calls = fields.get("tool_calls", "a list", []) if role == "assistant" else []
    if calls:
        message["tool_calls"] = [
            _tool_call(Fields(call, fields.where(f"tool_calls[{place}]")), names, policy)
            for place, call in enumerate(calls)
        ]
    if role == "assistant" and fields.values.get("content") is None:
        message["content"] = ""
    else:
        message["content"] = _content(fields, policy)
    return message


def _content(fields: Fields, policy: ServedPolicy) -> Any:
    """Content of a message: a text, or parts that are texts and images."""
    content = fields.values.get("content")
    if not isinstance(content, list):
        return fields.need("content", "a text")
    parts: list[dict[str, Any]] = []
    for place, value in enumerate(content):
        part = Fields(value, fields.where(f"content[{place}]"))
        kind = part.need("type", "a text")
        if kind == "text":
            parts.append({"type": "text", "text": part.need("text", "a text")})
        elif kind == "image_url" and policy.processor is not None:
            parts.append({"type": "image", "image": _image(part)})
        else:
            expected = "'text'" if policy.processor is None else "'text' or 'image_url'"
            raise CallError(
                part.where("type"),
                got=f"a part of type {shown(kind)}",
                expected=expected,
                fix=f"{policy.name} takes no others.",
            )
    if all(part["type"] == "text" for part in parts):
        # Templates of language models take no parts.
        return "".join(part["text"] for part in parts)
    return parts


def _image(part: Fields) -> bytes:
    """Bytes of an image, which are in its URL: the server opens neither addresses nor files."""
    image = Fields(part.need("image_url", "an object"), part.where("image_url"))
    url = image.need("url", "a text")
    head, _, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        expected = "'data:image/...;base64,...'"
        fix = "Send the image itself: the server opens no addresses."
        raise CallError(image.where("url"), got=shown(url), expected=expected, fix=fix)
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise CallError(image.where("url"), got=str(error), expected="base64") from error


def _tool_call(fields: Fields, names: dict[str, str], policy: ServedPolicy) -> dict[str, Any]:
    """A call of a tool in an earlier turn, with its arguments as an object."""
    function = Fields(fields.need("function", "an object"), fields.where("function"))
    name = function.need("name", "a text")
    call_id = fields.get("id", "a text", "")
    names[call_id] = name
    arguments = function.values.get("arguments", "{}")
    if isinstance(arguments, str):
        arguments = read_json(arguments or "{}", function.where("arguments"))
    arguments = Fields(arguments, function.where("arguments")).values
    # The template writes them as text, which can hold a special token like that of a message.
    plain = policy.encoder.plain(json.dumps(dict(arguments), ensure_ascii=False))
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": json.loads(plain)},
    }


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Schemas of the tools that a call offers."""
    tools = fields.get("tools", "a list", [])
    for place, value in enumerate(tools):
        tool = Fields(value, f"tools[{place}]")
        if tool.need("type", "a text") != "function":
            where = tool.where("type")
            raise CallError(where, got=shown(tool.values["type"]), expected="'function'")
        function = Fields(tool.need("function", "an object"), tool.where("function"))
        if not function.need("name", "a text"):
            raise CallError(function.where("name"), got="an empty text", expected="a name")
        function.get("description", "a text")
        parameters = Fields(
            function.get("parameters", "an object", {}), function.where("parameters")
        )
        if parameters.values.get("type", "object") != "object":
            got = f"the type {shown(parameters.values['type'])}"
            expected = "a JSON schema of type 'object'"
            raise CallError(function.where("parameters"), got=got, expected=expected)
        properties = parameters.get("properties", "an object", {})
        for name, schema in properties.items():
            choice = Fields(schema, parameters.where(f"properties.{name}"))
            for number, option in enumerate(choice.get("anyOf", "a list", [])):
                Fields(option, choice.where(f"anyOf[{number}]"))
        parameters.get("required", "a list")
    return tools
