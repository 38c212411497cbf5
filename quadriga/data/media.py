# SPDX-License-Identifier: Apache-2.0
"""Images and videos in the messages of a row: which there are, and where they stand.

Nothing here opens one, and nothing here needs torch: processes that count tokens import this file.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.config import DataConfig
from quadriga.data.pictures import as_list
from quadriga.data.tokenizing import Messages, as_messages
from quadriga.errors import DataError

IMAGE, VIDEO = "<image>", "<video>"
TAGS = {"image": IMAGE, "video": VIDEO}
_FILE_KEYS = ("path", "url", "bytes")
"""Keys of a content part under which its image or video may stand, besides those of its own name."""


def read_prompt(
    row: Mapping[str, Any], config: DataConfig, *, is_vision: bool, where: str
) -> tuple[Messages, list[list[Any]]]:
    """The messages of a row, and its images and its videos, in the order of their places in these.

    `is_vision`: whether the model takes images and videos.
    Raises DataError: it has no chat, other images or videos than places for them, or some for a text-only model."""
    at_prompt = f"{where}, column {config.prompt_key!r}"
    messages = as_messages(row.get(config.prompt_key), where=at_prompt)
    media = media_of(row, config)
    if not is_vision:
        refuse_media(messages, media, config, where=where)
        return messages, [[], []]
    messages, *given = with_parts(
        messages, media.get("image", ()), media.get("video"), where=at_prompt
    )
    return messages, given


def media_of(row: Mapping[str, Any], config: DataConfig) -> dict[str, list[Any]]:
    """The images and videos of a row's columns; without those whose key is null."""
    keys = {"image": config.image_key, "video": config.video_key}
    return {what: as_list(row.get(key)) for what, key in keys.items() if key is not None}


def with_parts(
    messages: Messages, images: Sequence[Any], videos: Sequence[Any] | None = (), *, where: str
) -> tuple[Messages, list[Any], list[Any]]:
    """Messages whose images and videos are content parts of their own, as chat templates want them, and both in order.

    A part is made of each `<image>` and `<video>` in a text, whose image or video is the next one of those given.
    Content that is a list of parts already may hold `{"type": "image"}`, likewise, or a part that brings its image:
    `{"type": "image", "image": ...}`, and so for videos. With None for videos `<video>` is text.
    Raises DataError: there are more or fewer places than the row has images, or videos."""
    tags = {"image": IMAGE} | ({} if videos is None else {"video": VIDEO})
    result = [
        {**message, "content": _parts(message.get("content"), tags, where)} for message in messages
    ]
    places = [part for one in result if isinstance(one["content"], list) for part in one["content"]]
    found = []
    for what, given in (("image", images), ("video", videos or ())):
        own = [part.pop(what, None) for part in places if part["type"] == what]
        if (count := own.count(None)) != len(given):
            got = f"{count} {TAGS[what]} in the prompt, and {len(given)} {what}s"
            place = f"Write {TAGS[what]} into the text for each {what}"
            fix = f"{place}, and set data.{what}_key to the column that holds them."
            raise DataError(where, got=got, expected="one for each, where it stands", fix=fix)
        rest = iter(given)
        found.append([next(rest) if one is None else one for one in own])
    return result, found[0], found[1]


def refuse_media(
    messages: Messages,
    media: Mapping[str, Sequence[Any]],
    config: DataConfig,
    *,
    where: str,
    column: str | None = None,
) -> None:
    """Raises a `DataError` where a row for a language model has images or videos, in a column or in a message.

    `media` are those of the columns, `image` and `video`; of what it leaves out the tag is text. `where` is the row,
    and `column` that of the messages, `data.prompt_key` if it is None."""
    contents = [message.get("content") for message in messages]
    text = " ".join(content for content in contents if isinstance(content, str))
    at_prompt, expected = (
        f"{where}, column {column or config.prompt_key!r}",
        "text, or a vision-language model",
    )
    for what, given in media.items():
        if given or TAGS[what] in text:
            got = f"{what}s" if given else TAGS[what]
            fix = f"Take one, or set data.{what}_key=null to train on the text alone."
            place = f"{where}, column {getattr(config, f'{what}_key')!r}" if given else at_prompt
            raise DataError(place, got=f"{got}, for a text-only model", expected=expected, fix=fix)
    if any(isinstance(content, list) for content in contents):
        got = "images or videos in a message, for a text-only model"
        raise DataError(at_prompt, got=got, expected=expected, fix="Take one, or leave them out.")


def _parts(content: Any, tags: Mapping[str, str], where: str) -> Any:
    if not isinstance(content, Sequence):
        return content
    parts: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        # A column of a parquet file gives each part the keys of all.
        own = (
            {key: value for key, value in part.items() if value is not None}
            if isinstance(part, Mapping)
            else {}
        )
        kind, text = (
            str(own.pop("type", None) or next(iter(own), None)).removesuffix("_url"),
            own.get("text"),
        )
        if kind == "text" and isinstance(text, str):
            kinds = {tag: what for what, tag in tags.items()}
            pieces = re.split(f"({'|'.join(kinds)})", text)
            parts += [
                {"type": kinds[one]} if one in kinds else {"type": "text", "text": one}
                for one in pieces
                if one
            ]
        elif kind in tags and (medium := _medium(kind, own)) is not None:
            parts.append({"type": kind, **medium})
        else:
            forms = "|".join(tags)
            expected = f'{{"type": "text", "text": ...}}, or {{"type": {forms}}}, which may bring its {forms}'
            fix = "It is a path, a file:// URL or the bytes of a file."
            raise DataError(
                where, got=f"the part {str(part)[:80]!r} of a message", expected=expected, fix=fix
            )
    return (
        content
        if isinstance(content, str) and not any(tag in content for tag in tags.values())
        else parts
    )


def _medium(kind: str, own: dict[str, Any]) -> dict[str, Any] | None:
    """The image or video of a part under its kind, empty where the part is a place for one; None: it has other keys."""
    given = [own[name] for name in own if name in (kind, f"{kind}_url", *_FILE_KEYS)]
    fps = {"fps": own["fps"]} if kind == "video" and "fps" in own else {}
    if len(given) > 1 or len(given) + len(fps) != len(own):
        return None
    return {kind: {"video": given[0], **fps} if fps else given[0]} if given else {}
