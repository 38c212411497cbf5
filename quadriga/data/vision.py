# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: from `<image>` in a text to pixels, repeated image tokens and positions on three axes.

    "Which? <image>"  ──>  [text, image]  ──chat template──>  Which? <start>▪<end>      one image token: raw_prompt_ids
                                                              Which? <start>▪▪▪▪<end>   expanded: input_ids

An image is cut into patches, time by height by width of them; the model makes one embedding of each square of
`merge_size` by `merge_size` patches, and each embedding takes the place of one image token. This is the way of the
models in `SEEING_TYPES`, and of no others.

Legend: P tokens of the expanded prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig, ProcessorMixin

from quadriga.config.model import SEEING_TYPES
from quadriga.data.pictures import require_pillow
from quadriga.data.tokenizing import Messages
from quadriga.errors import DataError

IMAGE, VIDEO = "<image>", "<video>"
_PROCESSOR = "Qwen2VLImageProcessor"


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt of a model that sees.

    Attributes:
        short_ids: token ids with one for each image.
        ids: P token ids, with as many as the model has embeddings.
        positions: [3, P] int64, along time, height and width.
        pictures: `PIL.Image.Image`s in RGB.
        inputs: what the model takes of them; see `VisionProcessor.inputs`. Empty without images.
    """

    short_ids: list[int]
    ids: list[int]
    positions: torch.Tensor
    pictures: tuple[Any, ...]
    inputs: dict[str, torch.Tensor]

    def columns(self) -> dict[str, Any]:
        """What travels of it beside tokens and positions."""
        return {
            "raw_prompt_ids": self.short_ids,
            "multi_modal_data": {"images": list(self.pictures)} if self.pictures else {},
            "multi_modal_inputs": dict(self.inputs),
        }


@dataclass(frozen=True)
class VisionProcessor:
    """What a model that sees needs of a picture.

    Attributes:
        image_processor: of transformers: pictures to patches.
        image_token_id: stands in a prompt for an embedding of an image.
        video_token_id: the same of a video; prompts that have it are refused.
        name: what errors call it: the model's folder or name.
    """

    image_processor: Any
    image_token_id: int
    video_token_id: int | None
    name: str

    @property
    def merge_size(self) -> int:
        """Patches, along height and along width, that make one embedding."""
        return int(self.image_processor.merge_size)

    def inputs(self, pictures: Sequence[Any], *, where: str) -> dict[str, torch.Tensor]:
        """What the model takes.

        Args:
            pictures: at least one `PIL.Image.Image`, in the order of the prompt.
            where: for errors.

        Returns:
            `pixel_values` [patches, values] float32 and `image_grid_thw` [images, 3] int64.

        Raises:
            DataError: the processor refuses one of them.
        """
        try:
            found = self.image_processor(images=list(pictures), return_tensors="pt")
        except ValueError as error:
            raise self._refused(error, where) from error
        return {"pixel_values": found["pixel_values"].float(), "image_grid_thw": found["image_grid_thw"].long()}

    def num_tokens(self, height: int, width: int, *, where: str) -> int:
        """Embeddings, and so tokens, of a picture of so many pixels. Nothing is decoded for it."""
        try:
            num_patches = self.image_processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise self._refused(error, where) from error
        return num_patches // self.merge_size**2

    def prompt(self, ids: list[int], pictures: Sequence[Any], limit: int, *, where: str) -> SeenPrompt:
        """A tokenized prompt and its images, ready for the model.

        Args:
            ids: of the rendered prompt, one token for each image.
            pictures: the images.
            limit: tokens of the longest prompt, those of images included.
            where: for errors.

        Raises:
            DataError: ids and images do not belong together, or the prompt is too long. One with images is not cut.
        """
        self.require_tokens(ids, len(pictures), where=where)
        inputs = self.inputs(pictures, where=where) if pictures else {}
        grids = inputs.get("image_grid_thw")
        expanded = self.expand(ids, grids)
        if pictures and len(expanded) > limit:
            raise DataError(
                where,
                got=f"{len(expanded)} tokens, {expanded.count(self.image_token_id)} of them of images",
                expected=f"at most data.max_prompt_length={limit}, for a prompt with images is not cut",
                fix="Raise that length, lower data.mm_processor_kwargs.max_pixels, or leave such rows out with "
                "data.filter_overlong_prompts=true.",
            )
        return SeenPrompt(ids, expanded, self.positions(expanded, grids), tuple(pictures), inputs)

    def require_tokens(self, ids: list[int], num_images: int, *, where: str) -> None:
        """Refuses a prompt whose images are not one token each, with text behind the last one.

        Raises:
            DataError: the template wrote another number of them, or a text has the token itself; or a video's.
        """
        count = ids.count(self.image_token_id)
        if count != num_images:
            raise DataError(
                where,
                got=f"{count} image tokens in the rendered prompt, for {num_images} images",
                expected="one for each",
                fix="Take a chat template that renders content of type image, and no text with the token itself.",
            )
        if self.video_token_id in ids:
            raise DataError(where, got="a video token", expected="text and images", fix="Leave videos out.")
        if num_images and ids[-1] == self.image_token_id:
            raise DataError(
                where,
                got="a prompt that ends with an image",
                expected="text behind it, as chat templates write it",
                fix="Set add_generation_prompt in data.apply_chat_template_kwargs, or end the prompt with text.",
            )

    def expand(self, ids: list[int], grids: torch.Tensor | None) -> list[int]:
        """Each image token as often as its image has embeddings.

        Args:
            ids: with one token for each image; see `require_tokens`.
            grids: [images, 3], or None without images.
        """
        counts = iter([] if grids is None else (grids.prod(-1) // self.merge_size**2).tolist())
        repeated = ([one] * (next(counts) if one == self.image_token_id else 1) for one in ids)
        return [token for tokens in repeated for token in tokens]

    def positions(self, ids: list[int], grids: torch.Tensor | None) -> torch.Tensor:
        """The position of each token along time, height and width.

        Text counts on by one in all three. An embedding of an image has the place where the image begins, plus its own
        place in it along each axis; text behind the image goes on from the largest of these.

        Args:
            ids: P tokens, expanded.
            grids: [images, 3] patches, or None without images.

        Returns:
            [3, P] int64.
        """
        parts, place, start = [], 0, 0
        for grid in [] if grids is None else grids.tolist():
            time, height, width = grid[0], grid[1] // self.merge_size, grid[2] // self.merge_size
            begin = ids.index(self.image_token_id, place)
            parts.append(_text_positions(begin - place, start))
            start += begin - place
            axes = [torch.arange(size) + start for size in (time, height, width)]
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1))
            place, start = begin + time * height * width, start + max(time, height, width)
        parts.append(_text_positions(len(ids) - place, start))
        return torch.cat(parts, dim=1)

    def _refused(self, error: Exception, where: str) -> DataError:
        return DataError(
            where,
            got=f"an image that the processor of {self.name} refuses ({str(error).partition(chr(10))[0]})",
            expected="one that it takes",
            fix="Crop or leave out the image.",
        )


def _text_positions(count: int, start: int) -> torch.Tensor:
    return (torch.arange(count) + start).expand(3, -1)


def with_parts(messages: Messages, num_images: int, *, where: str) -> Messages:
    """Messages whose `<image>`s are content of their own, as chat templates want them; the others stay texts.

    Args:
        messages: chat messages; content that is a list of parts already may hold `{"type": "image"}`.
        num_images: of the row.
        where: for errors.

    Raises:
        DataError: there are more or fewer places than images, or a place for a video.
    """
    result = [{**message, "content": _parts(message.get("content"), where)} for message in messages]
    count = sum(
        part["type"] == "image" for one in result if isinstance(one["content"], list) for part in one["content"]
    )
    if count != num_images:
        raise DataError(
            where,
            got=f"{count} {IMAGE} in the prompt, and {num_images} images",
            expected="one for each image, where it stands",
            fix=f"Write {IMAGE} into the text for each image, and set data.image_key to the column that holds them.",
        )
    return result


def _parts(content: Any, where: str) -> Any:
    if isinstance(content, str):
        pieces = _split(content, where)
        return pieces if any(piece["type"] == "image" for piece in pieces) else content
    if not isinstance(content, Sequence):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        # A column of a parquet file gives each part the keys of all.
        own = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
        kind = own.get("type")
        if kind == "text" and isinstance(own.get("text"), str):
            parts += _split(own["text"], where)
        elif kind == "image" and len(own) == 1:
            parts.append({"type": "image"})
        else:
            raise DataError(
                where,
                got=f"the part {str(part)[:80]!r} of a message",
                expected='{"type": "text", "text": ...} or {"type": "image"}',
                fix="Images themselves stand in the column of data.image_key; video is not read.",
            )
    return parts


def _split(text: str, where: str) -> list[dict[str, Any]]:
    if VIDEO in text:
        raise DataError(where, got=f"{VIDEO} in the prompt", expected="text and images", fix="Video is not read.")
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(IMAGE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def load_processor(
    path: str | Path, *, trust_remote_code: bool = False, options: Mapping[str, Any] | None = None
) -> VisionProcessor | None:
    """The processor of a model that sees; None of one that reads text alone, or sees in another way.

    transformers' own needs torchvision even where nothing is a video; this one is its image half.

    Args:
        path: of the model, a folder or a name.
        trust_remote_code: whether code that comes with the model may be run.
        options: of the image processor, `min_pixels` and `max_pixels`; they replace its own.

    Raises:
        DataError: Pillow or the processor's file is missing, or there are options for a model that does not see.
    """
    kind = "" if Path(path).is_file() else PretrainedConfig.get_config_dict(path)[0].get("model_type", "")
    if kind not in SEEING_TYPES:
        if options:
            raise DataError(
                "data.mm_processor_kwargs",
                got=f"{dict(options)} for {path}, a model of type {kind or 'unknown'}",
                expected=f"a model that sees: {', '.join(SEEING_TYPES)}",
                fix="Leave the key out.",
            )
        return None
    where = f"image processor of {path}"
    require_pillow(where)
    settings = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        loaded = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code, **(options or {}))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(
            where,
            got=str(error).strip().partition("\n")[0],
            expected="preprocessor_config.json in the model's folder",
            fix="Copy it from the model that this one was made of.",
        ) from error
    return VisionProcessor(_known(loaded, where), settings.image_token_id, settings.video_token_id, str(path))


def as_vision(processor: Any) -> VisionProcessor | None:
    """A processor of transformers in our form; ours, and None, as they are.

    Raises:
        DataError: its images are not those of `SEEING_TYPES`.
    """
    if processor is None or isinstance(processor, VisionProcessor):
        return processor
    where = f"processor {type(processor).__name__}"
    image_processor = getattr(processor, "image_processor", None)
    if not isinstance(processor, ProcessorMixin) or image_processor is None:
        raise DataError(where, got="no image processor", expected="what quadriga.data.load_processor returns, or None")
    return VisionProcessor(
        _known(image_processor, where), processor.image_token_id, getattr(processor, "video_token_id", None), where
    )


def _known(image_processor: Any, where: str) -> Any:
    if not type(image_processor).__name__.startswith(_PROCESSOR):
        raise DataError(
            where, got=type(image_processor).__name__, expected=f"{_PROCESSOR}, that of {', '.join(SEEING_TYPES)}"
        )
    return image_processor
