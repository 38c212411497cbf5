# SPDX-License-Identifier: Apache-2.0
"""Prompts of vision-language models: from `<image>` in a text to pixels, repeated image tokens and 3-D positions.

    "Which? <image>"  ──>  [text, image]  ──chat template──>  Which? <start>▪<end>      one image token: raw_prompt_ids
                                                              Which? <start>▪▪▪▪<end>   expanded: input_ids

An image is cut into patches, time by height by width of them; the model makes one embedding of each square of
`merge_size` by `merge_size` patches, and each embedding takes the place of one image token. This holds for the models
in `VISION_TYPES`, and for no others.

Shapes: P tokens of the expanded prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig, ProcessorMixin

from quadriga.config.actor import VISION_TYPES
from quadriga.data.pictures import require_pillow
from quadriga.data.tokenizing import Messages
from quadriga.errors import DataError

IMAGE, VIDEO = "<image>", "<video>"
_OWN_IMAGE = ("image", "image_url", "path", "url", "bytes")
"""Keys of a content part under which its image may stand."""


@dataclass(frozen=True)
class VisionPrompt:
    """A tokenized prompt and its images.

    Attributes:
        short_ids: token ids with one for each image.
        ids: P token ids, with as many for each image as the model has embeddings of it.
        positions: [3, P] int64, along time, height and width.
        pictures: `PIL.Image.Image`s in RGB.
        inputs: what the model takes of them, from `VisionProcessor.inputs`. Empty without images.
    """

    short_ids: list[int]
    ids: list[int]
    positions: torch.Tensor
    pictures: tuple[Any, ...]
    inputs: dict[str, torch.Tensor]

    def columns(self) -> dict[str, Any]:
        """The non-tensor columns of the batch, in addition to tokens and positions."""
        return {
            "raw_prompt_ids": self.short_ids,
            "multi_modal_data": {"images": list(self.pictures)} if self.pictures else {},
            "multi_modal_inputs": dict(self.inputs),
        }


@dataclass(frozen=True)
class VisionProcessor:
    """From images to patches, tokens and positions, for one vision-language model.

    Attributes:
        image_processor: of transformers: images to patches.
        image_token_id: stands in a prompt for an embedding of an image.
        video_token_id: the same of a video; prompts that have it are refused.
        name: the model's folder or name, for errors.
    """

    image_processor: Any
    image_token_id: int
    video_token_id: int | None
    name: str

    def __post_init__(self) -> None:
        kind, known = type(self.image_processor).__name__, "Qwen2VLImageProcessor"
        if not kind.startswith(known):
            expected = f"{known}, that of {', '.join(VISION_TYPES)}"
            raise DataError(f"image processor of {self.name}", got=kind, expected=expected)

    @property
    def merge_size(self) -> int:
        """Patches, along height and along width, that make one embedding."""
        return int(self.image_processor.merge_size)

    def inputs(self, pictures: Sequence[Any], *, where: str) -> dict[str, torch.Tensor]:
        """What the model takes of images: `pixel_values` [patches, values] float32, `image_grid_thw` [images, 3] int64.

        DataError: the processor refuses one of them.
        """
        try:
            found = self.image_processor(images=list(pictures), return_tensors="pt")
        except ValueError as error:
            raise self._refused(error, where) from error
        return {"pixel_values": found["pixel_values"].float(), "image_grid_thw": found["image_grid_thw"].long()}

    def num_tokens(self, height: int, width: int, *, where: str) -> int:
        """Embeddings, and so tokens, of an image of `height` by `width` pixels; its pixels are not read."""
        try:
            num_patches = self.image_processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise self._refused(error, where) from error
        return num_patches // self.merge_size**2

    def _refused(self, error: Exception, where: str) -> DataError:
        got = f"an image that the processor of {self.name} refuses ({str(error).partition(chr(10))[0]})"
        return DataError(where, got=got, expected="one that it takes", fix="Crop or leave out the image.")

    def prompt(self, ids: list[int], pictures: Sequence[Any], limit: int, *, where: str) -> VisionPrompt:
        """A tokenized prompt and its images, ready for the model.

        `ids` have one token for each image; `limit` counts tokens, those of images included.

        Raises:
            DataError: ids and images do not belong together, or the prompt is too long. One with images is not cut.
        """
        count = ids.count(self.image_token_id)
        if count != len(pictures):
            got = f"{count} image tokens in the rendered prompt, for {len(pictures)} images"
            fix = "Take a chat template that renders content of type image, and no text with the token itself."
            raise DataError(where, got=got, expected="one for each", fix=fix)
        if self.video_token_id in ids:
            raise DataError(where, got="a video token", expected="text and images", fix="Leave videos out.")
        if pictures and ids[-1] == self.image_token_id:
            got = "a prompt that ends with an image"
            fix = "Set add_generation_prompt in data.apply_chat_template_kwargs, or end the prompt with text."
            raise DataError(where, got=got, expected="text behind it, as chat templates write it", fix=fix)
        inputs = self.inputs(pictures, where=where) if pictures else {}
        grids = inputs.get("image_grid_thw")
        expanded = self.expand(ids, grids)
        if pictures and len(expanded) > limit:
            got = f"{len(expanded)} tokens, {expanded.count(self.image_token_id)} of them of images"
            expected = f"at most data.max_prompt_length={limit}, for a prompt with images is not cut"
            how = "leave such rows out with data.filter_overlong_prompts=true"
            fix = f"Raise that length, lower data.mm_processor_kwargs.max_pixels, or {how}."
            raise DataError(where, got=got, expected=expected, fix=fix)
        return VisionPrompt(ids, expanded, self.positions(expanded, grids), tuple(pictures), inputs)

    def expand(self, ids: list[int], grids: torch.Tensor | None) -> list[int]:
        """Each image token of `ids` as often as its image has embeddings; `grids` [images, 3] counts patches."""
        counts = iter([] if grids is None else (grids.prod(-1) // self.merge_size**2).tolist())
        repeated = ([one] * (next(counts) if one == self.image_token_id else 1) for one in ids)
        return [token for tokens in repeated for token in tokens]

    def positions(self, ids: list[int], grids: torch.Tensor | None) -> torch.Tensor:
        """The position of each of P expanded tokens along time, height and width: [3, P] int64.

        Text counts on by one in all three. An embedding of an image has the position where the image begins, plus its
        place in the image along each axis; text behind the image goes on from the largest of these. `grids` [images, 3]
        counts patches; it is None without images.
        """
        parts, place, start = [], 0, 0
        for grid in [] if grids is None else grids.tolist():
            time, height, width = grid[0], grid[1] // self.merge_size, grid[2] // self.merge_size
            begin = ids.index(self.image_token_id, place)
            parts.append((torch.arange(begin - place) + start).expand(3, -1))
            start += begin - place
            axes = [torch.arange(size) + start for size in (time, height, width)]
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1))
            place, start = begin + time * height * width, start + max(time, height, width)
        parts.append((torch.arange(len(ids) - place) + start).expand(3, -1))
        return torch.cat(parts, dim=1)


def with_parts(messages: Messages, images: Sequence[Any], *, where: str) -> tuple[Messages, list[Any]]:
    """Messages whose images are content parts of their own, as chat templates want them, and the images in that order.

    A part is made of each `<image>` in a text, whose image is the next one of `images`. Content that is a list of parts
    already may hold `{"type": "image"}`, likewise, or a part that brings its image: `{"type": "image", "image": ...}`.

    Raises:
        DataError: there are more or fewer places than the row has images, or a place for a video.
    """
    result = [{**message, "content": _parts(message.get("content"), where)} for message in messages]
    places = [part for one in result if isinstance(one["content"], list) for part in one["content"]]
    own = [part.pop("image", None) for part in places if part["type"] == "image"]
    count = own.count(None)
    if count != len(images):
        got = f"{count} {IMAGE} in the prompt, and {len(images)} images"
        fix = f"Write {IMAGE} into the text for each image, and set data.image_key to the column that holds them."
        raise DataError(where, got=got, expected="one for each image, where it stands", fix=fix)
    rest = iter(images)
    return result, [next(rest) if one is None else one for one in own]


def refuse_images(messages: Messages, images: Sequence[Any], *, where: str) -> None:
    """Raises a `DataError` where a row for a language model has images, in their column or in a message."""
    if images or any(isinstance(message.get("content"), list) for message in messages):
        got, expected = "images, for a text-only model", "text, or a vision-language model"
        fix = "Take one, or set data.image_key=null to train on the text alone."
        raise DataError(where, got=got, expected=expected, fix=fix)


def refuse_videos(videos: Any, *, where: str) -> None:
    """Raises a `DataError` where a row has videos."""
    if videos:
        raise DataError(where, got="videos", expected="text and images", fix="Leave it out: video is not read.")


def _parts(content: Any, where: str) -> Any:
    if not isinstance(content, Sequence):
        return content
    parts: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        # A column of a parquet file gives each part the keys of all.
        own = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
        kind, text = own.pop("type", None) or next(iter(own), None), own.get("text")
        images = [value for name, value in own.items() if name in _OWN_IMAGE]
        if kind == "text" and isinstance(text, str):
            if VIDEO in text:
                got = f"{VIDEO} in the prompt"
                raise DataError(where, got=got, expected="text and images", fix="Video is not read.")
            for number, piece in enumerate(text.split(IMAGE)):
                parts += [{"type": "image"}] if number else []
                parts += [{"type": "text", "text": piece}] if piece else []
        elif kind in ("image", "image_url") and len(images) == len(own) <= 1:
            parts += [{"type": "image", "image": image} for image in images or [None]]
        else:
            expected = '{"type": "text", "text": ...}, {"type": "image"} or {"type": "image", "image": ...}'
            fix = "An image is a path, a file:// URL or the bytes of a file; video is not read."
            raise DataError(where, got=f"the part {str(part)[:80]!r} of a message", expected=expected, fix=fix)
    return content if isinstance(content, str) and IMAGE not in content else parts


def load_processor(
    path: str | Path, *, trust_remote_code: bool = False, options: Mapping[str, Any] | None = None
) -> VisionProcessor | None:
    """The processor of a vision-language model; None of a text-only model, or of another kind of vision model.

    transformers' own needs torchvision even where nothing is a video; this one is its image half. The image processor's
    `options`, `min_pixels` and `max_pixels`, replace its own.

    Raises:
        DataError: Pillow or the processor's file is missing, or there are options for a text-only model.
    """
    kind = "" if Path(path).is_file() else PretrainedConfig.get_config_dict(path)[0].get("model_type", "")
    if kind not in VISION_TYPES:
        if options:
            got = f"{dict(options)} for {path}, a model of type {kind or 'unknown'}"
            expected = f"a vision-language model: {', '.join(VISION_TYPES)}"
            raise DataError("data.mm_processor_kwargs", got=got, expected=expected, fix="Leave the key out.")
        return None
    where = f"image processor of {path}"
    require_pillow(where)
    settings = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        loaded = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code, **(options or {}))
    except (OSError, ValueError, KeyError, ImportError) as error:
        got, fix = str(error).strip().partition("\n")[0], "Copy it from the model that this one was made of."
        raise DataError(where, got=got, expected="preprocessor_config.json in the model's folder", fix=fix) from error
    return VisionProcessor(loaded, settings.image_token_id, settings.video_token_id, str(path))


def as_vision(processor: Any) -> VisionProcessor | None:
    """A processor of transformers as a `VisionProcessor`; a `VisionProcessor`, and None, as they are.

    Raises:
        DataError: its images are not those of `VISION_TYPES`.
    """
    if processor is None or isinstance(processor, VisionProcessor):
        return processor
    where = f"processor {type(processor).__name__}"
    image_processor = getattr(processor, "image_processor", None)
    if not isinstance(processor, ProcessorMixin) or image_processor is None:
        raise DataError(where, got="no image processor", expected="what quadriga.data.load_processor returns, or None")
    video_token_id = getattr(processor, "video_token_id", None)
    return VisionProcessor(image_processor, processor.image_token_id, video_token_id, where)
