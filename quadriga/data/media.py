# SPDX-License-Identifier: Apache-2.0
"""Finds the images and videos of a row, and their places in its messages.

No image or video is opened here. This module does not import torch, because processes that only
count tokens import it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.config import DataConfig
from quadriga.data.pictures import as_list
from quadriga.data.tokenizing import Messages, as_messages, without_nulls
from quadriga.errors import DataError
from quadriga.protocol.chats import IMAGE

VIDEO = "<video>"
"""Place of a video in the text of a message."""
TAGS = {"image": IMAGE, "video": VIDEO}
"""The tag in a text that marks the place of an image or video, by kind of media."""
_FILE_KEYS = ("path", "url", "bytes")
"""Keys of a content part that may hold its image or video, besides `image`, `image_url`, `video`
and `video_url`."""


def read_prompt(
    row: Mapping[str, Any], config: DataConfig, *, is_vision: bool, where: str
) -> tuple[Messages, list[list[Any]]]:
    """Read the messages of a row, and its images and videos.

    Args:
        row: values by column.
        config: the section `data`, which names the columns.
        is_vision: whether the model takes images and videos.
        where: file and row, for errors.

    Returns:
        The messages, and a list of two lists: the images, and the videos, each in the order in
        which the messages show them.

    Raises:
        DataError: the prompt is no chat; the number of images or videos differs from the number of
            their places in the messages; or there are some, and the model takes text only.
    """
    prompt_place = f"{where}, column {config.prompt_key!r}"
    messages = as_messages(row.get(config.prompt_key), where=prompt_place)
    media = media_of(row, config)
    if not is_vision:
        # Without this error, images would be left out, and the model would read "<image>" as text.
        refuse_media(messages, media, config, where=where)
        return messages, [[], []]
    # `<image>` always stands for an image, but `<video>` is text if `data.video_key` is null.
    messages, images, videos = with_parts(
        messages, media.get("image", ()), media.get("video"), where=prompt_place
    )
    return messages, [images, videos]


def media_of(row: Mapping[str, Any], config: DataConfig) -> dict[str, list[Any]]:
    """The images and videos in the columns of a row.

    Args:
        row: values by column.
        config: the section `data`, which names the columns.

    Returns:
        Lists under "image" and "video"; no entry for a kind whose key (`data.image_key`,
        `data.video_key`) is null.
    """
    media = {}
    if config.image_key is not None:
        media["image"] = as_list(row.get(config.image_key))
    if config.video_key is not None:
        media["video"] = as_list(row.get(config.video_key))
    return media


def with_parts(
    messages: Messages, images: Sequence[Any], videos: Sequence[Any] | None = (), *, where: str
) -> tuple[Messages, list[Any], list[Any]]:
    """Give each image and video a content part of its own, as chat templates expect.

    Each `<image>` and `<video>` in a text becomes a part, which stands for the next of `images` or
    `videos`. Content that is already a list of parts may have parts that stand for the next of
    these too, `{"type": "image"}`, and parts that hold an image or video themselves,
    `{"type": "image", "image": ...}`.

    Args:
        messages: the chat.
        images: images from the columns of the row.
        videos: videos from the columns of the row. None: `<video>` is text.
        where: the row, for errors.

    Returns:
        The messages with parts; all images; and all videos. The images, and the videos, are in the
        order of their parts.

    Raises:
        DataError: the number of places differs from the number of images or of videos, or a part
            has an unknown form.
    """
    tags = {"image": IMAGE}
    if videos is not None:
        tags["video"] = VIDEO
    new_messages = []
    parts = []
    for message in messages:
        content = _as_parts(message.get("content"), tags, where)
        new_messages.append({**message, "content": content})
        if isinstance(content, list):
            parts += content
    # The images of a row belong to the whole chat, so they are counted over all of its messages.
    all_images = _take_media(parts, "image", images, where)
    all_videos = _take_media(parts, "video", videos or (), where)
    return new_messages, all_images, all_videos


def _take_media(
    parts: list[dict[str, Any]], kind: str, row_media: Sequence[Any], where: str
) -> list[Any]:
    """List the images or videos of a chat, which come from its parts and from the row's columns.

    Args:
        parts: the content parts of a chat. Images and videos that they hold are removed in place.
        kind: "image" or "video".
        row_media: images or videos from the columns, for the parts that hold none.
        where: the row, for errors.

    Returns:
        The media in the order of their parts.

    Raises:
        DataError: `row_media` are fewer or more than the parts that hold none.
    """
    # Removed from the parts, because chat templates expect parts that only mark the places. None:
    # the part holds none.
    media = [part.pop(kind, None) for part in parts if part["type"] == kind]
    # Not `media.count(None)`: to compare an array with `==` gives no single truth value.
    num_from_columns = sum(medium is None for medium in media)
    if num_from_columns != len(row_media):
        tag = TAGS[kind]
        raise DataError(
            where,
            got=f"{num_from_columns} {tag} in the prompt, and {len(row_media)} {kind}s",
            expected=f"as many {tag} as {kind}s",
            fix=f"Write {tag} into the text for each {kind}, and set data.{kind}_key to their column.",
        )
    remaining = iter(row_media)
    return [next(remaining) if medium is None else medium for medium in media]


def refuse_media(
    messages: Messages,
    media: Mapping[str, Sequence[Any]],
    config: DataConfig,
    *,
    where: str,
    column: str | None = None,
) -> None:
    """Raise an error if a row for a text-only model has images or videos.

    Args:
        messages: the chat.
        media: images and videos of the columns, by kind (`media_of`). The tag of a kind that has no
            entry is plain text.
        config: the section `data`, which names the columns.
        where: file and row, for errors.
        column: column of the messages. None: `data.prompt_key`.

    Raises:
        DataError: an image or video stands in a column or in a message.
    """
    contents = [message.get("content") for message in messages]
    text = " ".join(content for content in contents if isinstance(content, str))
    prompt_place = f"{where}, column {column or config.prompt_key!r}"
    expected = "text, or a vision-language model"
    for kind, row_media in media.items():
        if not row_media and TAGS[kind] not in text:
            continue
        name = TAGS[kind]
        place = prompt_place
        if row_media:
            name = f"{kind}s"
            place = f"{where}, column {getattr(config, f'{kind}_key')!r}"
        raise DataError(
            place,
            got=f"{name}, for a text-only model",
            expected=expected,
            fix=f"Use such a model, or set data.{kind}_key=null to train on the text alone.",
        )
    # `as_messages` has joined content whose parts are all text, so a list has other parts.
    if any(isinstance(content, list) for content in contents):
        raise DataError(
            prompt_place,
            got="images or videos in a message, for a text-only model",
            expected=expected,
            fix="Use a vision-language model, or leave them out.",
        )


def _as_parts(content: Any, tags: Mapping[str, str], where: str) -> Any:
    """Convert the content of a message to a list of parts; text without tags stays text.

    Args:
        content: text, or a list of parts in any of the forms that rows have.
        tags: the tag of each kind of media that the row may have. Other tags are plain text.
        where: the row, for errors.

    Returns:
        Text without tags, or a list of parts. A part of a kind in `tags` that holds its own image
        or video has it under its kind, as in {"type": "image", "image": ...}; one that only marks a
        place has no such key.

    Raises:
        DataError: a part has none of the forms.
    """
    # A message with tool calls alone has no content.
    if not isinstance(content, Sequence):
        return content
    kinds = {tag: kind for kind, tag in tags.items()}
    if isinstance(content, str):
        has_tags = any(tag in content for tag in kinds)
        return _split_at_tags(content, kinds) if has_tags else content
    parts = []
    for part in content:
        fields = {}
        if isinstance(part, Mapping):
            fields = without_nulls(part)
        # A part without a type is {kind: value}. OpenAI's form has the type `image_url`.
        kind = fields.pop("type", None) or next(iter(fields), None)
        kind = str(kind).removesuffix("_url")
        text = fields.get("text")
        if kind == "text" and isinstance(text, str):
            parts += _split_at_tags(text, kinds)
            continue
        # None for kinds that the row cannot have, and for parts with other keys.
        medium = _medium_of_part(kind, fields) if kind in tags else None
        if medium is None:
            forms = "|".join(tags)
            raise DataError(
                where,
                got=f"the part {str(part)[:80]!r} of a message",
                expected=(
                    f'{{"type": "text", "text": ...}}, or {{"type": {forms}}}, optionally with a'
                    f" key {forms}"
                ),
                fix="Give that key a path, a file:// URL or the bytes of a file.",
            )
        parts.append({"type": kind, **medium})
    return parts


def _split_at_tags(text: str, kinds: Mapping[str, str]) -> list[dict[str, Any]]:
    """Split a text into content parts: one for each tag, and one for each stretch of text between.

    Args:
        text: the text.
        kinds: the kind of media of each tag.
    """
    parts = []
    # With a group in its expression, `split` returns the separators too.
    for piece in re.split(f"({'|'.join(kinds)})", text):
        if piece in kinds:
            parts.append({"type": kinds[piece]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _medium_of_part(kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """Find the image or video in a content part.

    Args:
        kind: "image" or "video".
        fields: the part without its type.

    Returns:
        A dictionary with the image or video under its kind; empty if the part only marks the place
        of one. None: the part has other keys, or several images or videos.
    """
    value_keys = {kind, f"{kind}_url", *_FILE_KEYS}
    values = [value for key, value in fields.items() if key in value_keys]
    has_fps = kind == "video" and "fps" in fields
    if len(values) > 1 or len(values) + has_fps != len(fields):
        return None
    if not values:
        return {}
    # A list of frames has no rate of its own, so `fps` stays beside it.
    if has_fps:
        return {kind: {"video": values[0], "fps": fields["fps"]}}
    return {kind: values[0]}
