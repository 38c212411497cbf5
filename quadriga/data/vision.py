# SPDX-License-Identifier: Apache-2.0
"""Prompts of vision-language models: from `<image>` and `<video>` to pixels, repeated tokens and 3-D positions.

    "Which? <image>"  ──>  [text, image]  ──chat template──>  Which? <start>▪<end>      one image token: raw_prompt_ids
                                                              Which? <start>▪▪▪▪<end>   expanded: input_ids

An image is cut into patches, time by height by width of them; the model makes one embedding of each square of
`merge_size` by `merge_size` patches, and each embedding takes the place of one image token. A video is cut likewise,
each patch out of two frames, and has a token of its own. This holds for the models in `VISION_TYPES`, for no others.

    Qwen2-VL, Qwen2.5-VL   <start>▪▪▪▪▪▪▪▪<end>              time is an axis of the positions, in Qwen2.5-VL in seconds
    Qwen3-VL               <start><0.2 seconds><start>▪▪▪▪<end><1.2 seconds><start>▪▪▪▪<end><end>   time stands as text
    GLM-4V                 <video><start>▪▪▪▪<end>0<start>▪▪▪▪<end>1</video>        likewise; ▪ is the token of images

Shapes: P tokens of the expanded prompt.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig, ProcessorMixin

from quadriga.config import DataConfig
from quadriga.config.actor import VISION_TYPES
from quadriga.data.pictures import picture_size, read_picture, require_pillow
from quadriga.data.videos import Clip, FrameRules, open_video, video_settings
from quadriga.errors import DataError
from quadriga.protocol.columns import object_array

Encode = Callable[[list[str]], list[list[int]]]
"""From texts to token ids, as `ChatEncoder.encode`."""


@dataclass(frozen=True)
class VisionPrompt:
    """A tokenized prompt and its images."""

    short_ids: list[int]  # token ids with one for each image
    ids: list[int]  # P token ids, with as many for each image as the model has embeddings of it
    positions: torch.Tensor  # [3, P] int64, along time, height and width
    pictures: tuple[Any, ...]  # `PIL.Image.Image`s in RGB
    clips: tuple[Clip, ...]  # of the videos, with their frames
    inputs: dict[
        str, torch.Tensor
    ]  # what the model takes of both, from `VisionProcessor.inputs`; empty without them

    def columns(self) -> dict[str, Any]:
        """The non-tensor columns of the batch, in addition to tokens and positions."""
        data: dict[str, Any] = {"image": list(self.pictures)} if self.pictures else {}
        if self.clips:
            data["video"] = [one.frames.numpy() for one in self.clips if one.frames is not None]
            data["video_metadata"] = [one.metadata() for one in self.clips]
        return {
            "raw_prompt_ids": self.short_ids,
            "multi_modal_data": data,
            "multi_modal_inputs": dict(self.inputs),
        }


@dataclass(frozen=True)
class VisionProcessor:
    """From images to patches, tokens and positions, for one vision-language model."""

    image_processor: Any  # of transformers: images to patches
    image_token_id: int  # stands in a prompt for an embedding of an image
    video_token_id: (
        int | None
    )  # the same of a video; with `video_bounds` of all of it, before it is expanded
    name: str  # the model's folder or name, for errors
    frames: FrameRules | None = None  # how videos are cut; None: prompts that have some are refused
    tokens_per_second: float | None = (
        None  # places along time for it; None: one for each patch along time
    )
    bounds: tuple[int, int] = (
        0,
        0,
    )  # before and behind the patches of one time, where frames stand apart
    video_bounds: tuple[int, int] | None = (
        None  # between these tokens that of images stands for one of a video
    )

    def __post_init__(self) -> None:
        kind, known = (
            type(self.image_processor).__name__,
            ("Qwen2VLImageProcessor", "Glm4vImageProcessor"),
        )
        if not kind.startswith(known):
            expected = f"{' or '.join(known)}, those of {', '.join(VISION_TYPES)}"
            raise DataError(f"image processor of {self.name}", got=kind, expected=expected)

    @property
    def media_ids(self) -> tuple[int, ...]:
        """The tokens that stand for images and for videos, and those that tell which embeddings are a video's."""
        video = () if self.video_token_id is None else (self.video_token_id,)
        return (self.image_token_id, *video, *(self.video_bounds or ()))

    @property
    def merge_size(self) -> int:
        """Patches, along height and along width, that make one embedding."""
        return int(self.image_processor.merge_size)

    def inputs(
        self, pictures: Sequence[Any], clips: Sequence[Clip] = (), *, where: str
    ) -> dict[str, torch.Tensor]:
        """What the model takes of images and videos.
        Returns `pixel_values` [patches, values] float32 and `image_grid_thw` [images, 3] int64, where there are images;
        `pixel_values_videos` and `video_grid_thw`, and where positions count seconds `second_per_grid_ts` [videos]
        float32, where there are videos.
        Raises DataError: the processor refuses one of them."""
        inputs: dict[str, torch.Tensor] = {}
        if pictures:
            try:
                found = self.image_processor(images=list(pictures), return_tensors="pt")
            except ValueError as error:
                raise self._refused(error, where) from error
            inputs |= {
                "pixel_values": found["pixel_values"].float(),
                "image_grid_thw": found["image_grid_thw"].long(),
            }
        if clips:
            rules = self.frame_rules(where)
            inputs["pixel_values_videos"] = torch.cat([rules.patches(clip) for clip in clips])
            inputs["video_grid_thw"] = torch.tensor([rules.grid(clip) for clip in clips])
            if self.tokens_per_second is not None:
                rates = [len(clip.indices) / clip.num_frames * clip.fps for clip in clips]
                inputs["second_per_grid_ts"] = torch.tensor(
                    [rules.temporal_patch_size / rate for rate in rates]
                )
        return inputs

    def add_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of rows with `multi_modal_inputs`, made of `multi_modal_data` where they are not there."""
        if (
            "multi_modal_inputs" not in batch
            and (rows := batch.get("multi_modal_data")) is not None
        ):
            made = []
            for row, data in enumerate(rows):
                clips = clips_of(
                    zip(data.get("video", ()), data.get("video_metadata", ()), strict=True)
                )
                made.append(
                    self.inputs(data.get("image", ()), clips, where=f"row {row} of a batch")
                )
            batch["multi_modal_inputs"] = object_array(made)
        return batch

    def conversation(
        self,
        ids: list[int],
        images: Sequence[Any],
        videos: Iterable[tuple[np.ndarray, Any]],
        encode: Encode,
        where: str,
    ) -> VisionPrompt:
        """A prompt and the turns behind it, with images in any form that a row may have, and the frames of videos with
        their metadata. Arguments and errors as for `prompt`, but of any length."""
        read = [
            read_picture(one, folder=Path(), where=f"{where}, image {number}")
            for number, one in enumerate(images)
        ]
        return self.prompt(
            ids, read, sys.maxsize, where=where, clips=clips_of(videos), encode=encode
        )

    def media_sizes(
        self, given: Sequence[Sequence[Any]], config: DataConfig, *, folder: Path, where: str
    ) -> tuple[list[int], list[Clip]]:
        """How many embeddings each image of a row has, and which frames are taken of its videos. Pixels are only read
        where damaged rows are left out.

        Arguments and errors as for `read_media`."""
        if config.on_bad_row == "skip":  # what is damaged behind its header is left out, too
            read_media(given, self, config, folder=folder, where=where)
        counts: list[int] = []
        clips: list[Clip] = []
        images, videos = _placed(given, config, where)
        for image, place in images:
            counts.append(
                self.num_tokens(*picture_size(image, folder=folder, where=place), where=place)
            )
        for video, place in videos:
            clips.append(
                self.frame_rules(place).clip(
                    open_video(video, folder=folder, where=place), where=place
                )
            )
        return counts, clips

    def frame_rules(self, where: str) -> FrameRules:
        """How videos are cut; raises DataError for a processor that takes none."""
        if self.frames is None or self.video_token_id is None:
            fix = "Make the processor by quadriga.data.load_processor, from the model's folder."
            raise DataError(
                where, got="a video", expected=f"text and images, which {self.name} takes", fix=fix
            )
        return self.frames

    def num_tokens(self, height: int, width: int, *, where: str) -> int:
        """Embeddings, and so tokens, of an image of `height` by `width` pixels; its pixels are not read."""
        try:
            num_patches = self.image_processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise self._refused(error, where) from error
        return num_patches // self.merge_size**2

    def _refused(self, error: Exception, where: str) -> DataError:
        got = f"an image that the processor of {self.name} refuses ({str(error).partition(chr(10))[0]})"
        return DataError(
            where, got=got, expected="one that it takes", fix="Crop or leave out the image."
        )

    def prompt(
        self,
        ids: list[int],
        pictures: Sequence[Any],
        limit: int,
        *,
        where: str,
        clips: Sequence[Clip] = (),
        encode: Encode | None = None,
    ) -> VisionPrompt:
        """A tokenized prompt, its images and its videos, ready for the model.

        `ids` have one token for each image and each video; `limit` counts tokens, those of images and videos included;
        `encode` is needed for the times of a model whose frames stand apart.
        Raises DataError: ids and images or videos do not belong together, or the prompt is too long. One with images or
        videos is not cut."""
        self.check_places(ids, pictures, clips, where=where)
        if ids and ids[-1] in (self.image_token_id, self.video_token_id):
            got = "a prompt that ends with an image or a video"
            fix = "Set add_generation_prompt in data.apply_chat_template_kwargs, or end the prompt with text."
            raise DataError(
                where, got=got, expected="text behind it, as chat templates write it", fix=fix
            )
        inputs = self.inputs(pictures, clips, where=where)
        grids = inputs.get("image_grid_thw", torch.zeros(0, 3))
        counts = (grids.prod(-1) // self.merge_size**2).int().tolist()
        expanded = self.expand(ids, iter(counts), iter(clips), encode)
        if inputs and len(expanded) > limit:
            kinds = self._kinds(expanded)
            counts = {"images": kinds.count(1), "videos": kinds.count(2)}
            seen = [f"{count} of them of {what}" for what, count in counts.items() if count]
            expected = f"at most data.max_prompt_length={limit}, for a prompt with images or videos is not cut"
            how = "leave such rows out with data.filter_overlong_prompts=true"
            keys = "max_pixels, or fps and max_frames of videos" if clips else "max_pixels"
            fix = f"Raise that length, lower data.mm_processor_kwargs.{keys}, or {how}."
            raise DataError(
                where, got=", ".join([f"{len(expanded)} tokens", *seen]), expected=expected, fix=fix
            )
        grids = {name: value for name, value in inputs.items() if not name.startswith("pixel")}
        positions, _ = self.get_rope_index(expanded, **grids)
        return VisionPrompt(ids, expanded, positions, tuple(pictures), tuple(clips), inputs)

    def check_places(
        self, ids: list[int], images: Sequence[Any], videos: Sequence[Any], *, where: str
    ) -> None:
        """Refuse (DataError) token ids in which there is not one token for each image and each video."""
        for what, token, given in (
            ("image", self.image_token_id, images),
            ("video", self.video_token_id, videos),
        ):
            if (count := ids.count(token) if token is not None else 0) != len(given):
                got = f"{count} {what} tokens in the rendered chat, for {len(given)} {what}s"
                fix = f"Take a chat template that renders content of type {what}, and no text with the token itself."
                raise DataError(where, got=got, expected="one for each", fix=fix)

    def expand(
        self,
        ids: Sequence[int],
        counts: Iterator[int],
        clips: Iterator[Clip],
        encode: Encode | None = None,
    ) -> list[int]:
        """Each image token of `ids` as often as its image has embeddings, and for each video token those of its clip.
        `counts` are of the next images, `clips` the next videos."""
        expanded = list[int]()
        for one in ids:
            if one == self.image_token_id:
                expanded += [one] * next(counts)
            elif one == self.video_token_id:
                expanded += self.video_ids(next(clips), encode)
            else:
                expanded.append(one)
        return expanded

    def video_ids(self, clip: Clip, encode: Encode | None) -> list[int]:
        """What takes the place of one video token: a token for each embedding, and times where frames stand apart."""
        rules, token = self.frame_rules("a prompt"), self.video_token_id
        assert token is not None
        time, height, width = rules.grid(clip)
        count = height * width // rules.merge_size**2
        if not rules.are_apart:
            return [token] * (time * count)
        assert encode is not None, "times are tokenized"
        before, behind = self.bounds
        if self.video_bounds is not None:
            one = [before, *[self.image_token_id] * count, behind]
            return [
                token
                for stamp in encode([str(int(second)) for second in rules.times(clip)])
                for token in one + stamp
            ]
        stamps = encode([f"<{second:.1f} seconds>" for second in rules.times(clip)])
        return [one for stamp in stamps for one in (*stamp, before, *[token] * count, behind)]

    def get_rope_index(
        self,
        ids: list[int],
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        """The position of each of P expanded tokens along time, height and width.

        Text counts on by one in all three. An embedding of an image or a video has the position where that begins, plus
        its place in it along each axis, along time in places for each second where the model counts those; text
        behind goes on from the largest of these, as in the models' own code and in vLLM.
        `ids`: P tokens.
        `image_grid_thw`, `video_grid_thw`: [images, 3] and [videos, 3]: patches along time, height and width.
        `second_per_grid_ts`: [videos] seconds from one patch to the next along time.
        Returns positions [3, P] int64, and by how much a token behind them is further than its place in the row."""
        if video_grid_thw is not None:
            self.frame_rules("get_rope_index")
        images = iter([(grid, 1.0) for grid in ([] if image_grid_thw is None else image_grid_thw)])
        grids = (iter(()), images, self._video_grids(video_grid_thw, second_per_grid_ts))
        parts, place, start = [], 0, 0
        for begin, kind in enumerate(self._kinds(ids)):
            if begin < place or (found := next(grids[kind], None)) is None:
                continue
            (time, height, width), interval = found[0].tolist(), found[1]
            parts.append((torch.arange(begin - place) + start).expand(3, -1))
            start += begin - place
            sides = (torch.arange(side // self.merge_size) for side in (height, width))
            axes = [(torch.arange(time) * interval).long(), *sides]
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + start)
            place, start = (
                begin + parts[-1].shape[1],
                start + 1 + max(int(axis[-1]) for axis in axes),
            )
        parts.append((torch.arange(len(ids) - place) + start).expand(3, -1))
        return torch.cat(parts, dim=1), start - place

    def _kinds(self, ids: list[int]) -> list[int]:
        """Of each expanded token 1 where it stands for an image, 2 for a video, else 0."""
        tokens = np.array(ids)
        if self.video_bounds is None:
            return ((tokens == self.image_token_id) + 2 * (tokens == self.video_token_id)).tolist()
        first, last = (np.cumsum(tokens == one) for one in self.video_bounds)
        return ((tokens == self.image_token_id) * (1 + (first > last))).tolist()

    def _video_grids(
        self, grids: torch.Tensor | None, seconds: torch.Tensor | None
    ) -> Iterator[tuple[Any, Any]]:
        for number, grid in enumerate([] if grids is None else grids):
            if self.frames is not None and self.frames.are_apart:
                yield from [(torch.stack((torch.ones_like(grid[0]), *grid[1:])), 1.0)] * int(
                    grid[0]
                )
            elif self.tokens_per_second is None or seconds is None:
                yield grid, self.tokens_per_second or 1.0
            else:
                yield grid, self.tokens_per_second * seconds[number]


def clips_of(videos: Iterable[tuple[np.ndarray, Any]]) -> list[Clip]:
    """Of frames [T, 3, H, W] with their `Clip.metadata`."""
    return [Clip.of(torch.from_numpy(frames), told) for frames, told in videos]


def load_processor(
    path: str | Path, *, trust_remote_code: bool = False, options: Mapping[str, Any] | None = None
) -> VisionProcessor | None:
    """The processor of a vision-language model; None of a text-only model, or of another kind of vision model.

    transformers' own needs torchvision; this one does not. `options`, those of `data.mm_processor_kwargs`, replace what
    the model's files say.
    Raises DataError: Pillow or the processor's file is missing, or there are options for a text-only model."""
    kind = (
        ""
        if Path(path).is_file()
        else PretrainedConfig.get_config_dict(path)[0].get("model_type", "")
    )
    if kind not in VISION_TYPES:
        if options:
            got = f"{dict(options)} for {path}, a model of type {kind or 'unknown'}"
            expected = f"a vision-language model: {', '.join(VISION_TYPES)}"
            raise DataError(
                "data.mm_processor_kwargs", got=got, expected=expected, fix="Leave the key out."
            )
        return None
    where = f"image processor of {path}"
    require_pillow(where)
    settings = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    options = dict(options or {})
    sizes, is_glm = (
        {name: value for name, value in options.items() if name.endswith("pixels")},
        kind == "glm4v",
    )
    try:
        loaded = AutoImageProcessor.from_pretrained(
            path, trust_remote_code=trust_remote_code, **sizes
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        got, fix = (
            str(error).strip().partition("\n")[0],
            "Copy it from the model that this one was made of.",
        )
        raise DataError(
            where, got=got, expected="preprocessor_config.json in the model's folder", fix=fix
        ) from error
    if is_glm:
        # Its processor bounds both frames of a patch together, under other names.
        ends = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
        given = {ends[name]: value * loaded.temporal_patch_size for name, value in sizes.items()}
        loaded.size = type(loaded.size)(**{**dict(loaded.size), **given})
    names = ("image", "video") if is_glm else ("vision",)
    bounds = [
        (getattr(settings, f"{one}_start_token_id"), getattr(settings, f"{one}_end_token_id"))
        for one in names
    ]
    frames = FrameRules.of(video_settings(path), kind, options)
    rate = getattr(settings.vision_config, "tokens_per_second", None)
    return VisionProcessor(
        loaded, settings.image_token_id, settings.video_token_id, str(path), frames, rate, *bounds
    )


def as_vision(processor: Any) -> VisionProcessor | None:
    """A processor of transformers as a `VisionProcessor` for images; a `VisionProcessor`, and None, as they are.
    Raises DataError: its images are not those of `VISION_TYPES`."""
    if processor is None or isinstance(processor, VisionProcessor):
        return processor
    where = f"processor {type(processor).__name__}"
    image_processor = getattr(processor, "image_processor", None)
    if not isinstance(processor, ProcessorMixin) or image_processor is None:
        raise DataError(
            where,
            got="no image processor",
            expected="what quadriga.data.load_processor returns, or None",
        )
    video_token_id = getattr(processor, "video_token_id", None)
    return VisionProcessor(image_processor, processor.image_token_id, video_token_id, where)


def read_media(
    given: Sequence[Sequence[Any]],
    processor: VisionProcessor | None,
    config: DataConfig,
    *,
    folder: Path,
    where: str,
) -> tuple[list[Any], list[Clip]]:
    """The images of a row in RGB, and the frames that are taken of its videos; `given` are both, none without a
    processor.
    Raises DataError: one of them is wrong; it names its column and number."""
    images, videos = _placed(given, config, where)
    pictures = [read_picture(one, folder=folder, where=place) for one, place in images]
    clips = []
    for one, place in videos:
        assert processor is not None
        clips.append(
            processor.frame_rules(place).read(
                open_video(one, folder=folder, where=place), where=place
            )
        )
    return pictures, clips


def _placed(
    given: Sequence[Sequence[Any]], config: DataConfig, where: str
) -> Iterator[list[tuple[Any, str]]]:
    """The images of a row, and its videos, each with its place in words."""
    for what, key, values in zip(
        ("image", "video"), (config.image_key, config.video_key), given, strict=True
    ):
        at = f"{where}, column {key!r} or a message, {what}"
        yield [(one, f"{at} {number}") for number, one in enumerate(values)]
