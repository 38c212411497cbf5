# SPDX-License-Identifier: Apache-2.0
"""Turns images and videos of prompts into pixels, repeated tokens and 3-D positions.

    "Which? <image>"  ──>  [text, image]  ──chat template──>  Which? <start>▪<end>      one image token: raw_prompt_ids
                                                              Which? <start>▪▪▪▪<end>   expanded: input_ids

An image is cut into a grid of patches along time, height and width. The model makes one embedding
of each square of `merge_size` by `merge_size` patches, and each embedding takes the place of one
image token. A video is cut in the same way, each patch from two frames, and has another token. All
of this holds for the models in `VISION_TYPES` only, which differ in how a prompt shows a video:

    Qwen2-VL, Qwen2.5-VL   <start>▪▪▪▪▪▪▪▪<end>        time is an axis of the positions, in Qwen2.5-VL in seconds
    Qwen3-VL               <start><0.2 seconds><start>▪▪▪▪<end><1.2 seconds><start>▪▪▪▪<end><end>   time is text
    GLM-4V                 <video><start>▪▪▪▪<end>0<start>▪▪▪▪<end>1</video>    time is text; ▪ is the image token

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
"""Tokenizes texts, as `ChatEncoder.encode` does."""


@dataclass(frozen=True)
class VisionPrompt:
    """A tokenized prompt with its images and videos.

    Attributes:
        short_ids: token ids, with one token for each image and each video.
        ids: expanded token ids, with one token for each embedding of an image or video, [P].
        positions: positions along time, height and width, [3, P] int64.
        pictures: `PIL.Image.Image`s in RGB.
        clips: the videos, with their frames.
        inputs: tensors for the model, from `VisionProcessor.inputs`; empty without images and
            videos.
    """

    short_ids: list[int]
    ids: list[int]
    positions: torch.Tensor
    pictures: tuple[Any, ...]
    clips: tuple[Clip, ...]
    inputs: dict[str, torch.Tensor]

    def columns(self) -> dict[str, Any]:
        """The prompt's values in the batch's object columns: short ids, images, videos, inputs."""
        data = {}
        if self.pictures:
            data["image"] = list(self.pictures)
        if self.clips:
            # Frames as arrays, beside the metadata: `clips_of` makes clips of both again.
            data["video"] = [clip.frames.numpy() for clip in self.clips if clip.frames is not None]
            data["video_metadata"] = [clip.metadata() for clip in self.clips]
        return {
            "raw_prompt_ids": self.short_ids,
            "multi_modal_data": data,
            "multi_modal_inputs": dict(self.inputs),
        }


@dataclass(frozen=True)
class VisionProcessor:
    """Turns images and videos into patches, tokens and positions, for one vision-language model.

    Attributes:
        image_processor: image processor of transformers, which cuts images into patches.
        image_token_id: token of an embedding of an image in a prompt.
        video_token_id: token of an embedding of a video. With `video_bounds` it only stands for a
            whole video, before the prompt is expanded. None: the model has no such token.
        name: the model's folder or name, for errors.
        frames: rules for videos. None: prompts with videos are refused.
        tokens_per_second: positions per second along the time of a video. None: one position for
            each patch along time.
        bounds: tokens before and after the embeddings of one time. Used only for models whose
            prompts write the times (`FrameRules.writes_times`).
        video_bounds: tokens before and after a video, for models that use the image token for the
            embeddings between them. None: embeddings of videos have a token of their own.
    """

    image_processor: Any
    image_token_id: int
    video_token_id: int | None
    name: str
    frames: FrameRules | None = None
    tokens_per_second: float | None = None
    bounds: tuple[int, int] = (0, 0)
    video_bounds: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        class_name = type(self.image_processor).__name__
        # Compared by prefix, because classes with the suffix `Fast` order patches in the same way.
        # Image processors of other models do not.
        supported = ("Qwen2VLImageProcessor", "Glm4vImageProcessor")
        if not class_name.startswith(supported):
            raise DataError(
                f"image processor of {self.name}",
                got=class_name,
                expected=f"{' or '.join(supported)}, those of {', '.join(VISION_TYPES)}",
            )

    @property
    def media_ids(self) -> tuple[int, ...]:
        """Ids of the tokens of images and videos, and of the tokens before and after a video."""
        ids = [self.image_token_id]
        if self.video_token_id is not None:
            ids.append(self.video_token_id)
        return (*ids, *(self.video_bounds or ()))

    @property
    def merge_size(self) -> int:
        """Number of patches, along height and along width, that make one embedding."""
        return int(self.image_processor.merge_size)

    def inputs(
        self, pictures: Sequence[Any], clips: Sequence[Clip] = (), *, where: str
    ) -> dict[str, torch.Tensor]:
        """Make the tensors that the model takes for images and videos.

        Args:
            pictures: images in RGB.
            clips: videos with their frames.
            where: the row, for errors.

        Returns:
            If there are images, `pixel_values` [patches, values] float32 and `image_grid_thw`
            [images, 3] int64. If there are videos, `pixel_values_videos` and `video_grid_thw`, and
            for a model whose positions count seconds `second_per_grid_ts` [videos] float32.

        Raises:
            DataError: the processor refuses an image, or takes no videos.
        """
        inputs = {}
        if pictures:
            try:
                processed = self.image_processor(images=list(pictures), return_tensors="pt")
            except ValueError as error:
                raise self._refusal_error(error, where) from error
            inputs["pixel_values"] = processed["pixel_values"].float()
            inputs["image_grid_thw"] = processed["image_grid_thw"].long()
        if clips:
            rules = self.frame_rules(where)
            inputs["pixel_values_videos"] = torch.cat([rules.patches(clip) for clip in clips])
            inputs["video_grid_thw"] = torch.tensor([rules.grid(clip) for clip in clips])
            if self.tokens_per_second is not None:
                seconds = []
                for clip in clips:
                    # The rate of the frames in the clip; `clip.fps` is the rate of the whole video.
                    rate = len(clip.indices) / clip.num_frames * clip.fps
                    seconds.append(rules.temporal_patch_size / rate)
                inputs["second_per_grid_ts"] = torch.tensor(seconds)
        return inputs

    def add_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add `multi_modal_inputs` to a batch with `multi_modal_data`, in place; return the batch.

        Nothing changes if the batch has them already (`data.return_multi_modal_inputs=true`).
        """
        rows = batch.get("multi_modal_data")
        if "multi_modal_inputs" in batch or rows is None:
            return batch
        inputs = []
        for number, data in enumerate(rows):
            videos = zip(data.get("video", ()), data.get("video_metadata", ()), strict=True)
            where = f"row {number} of a batch"
            inputs.append(self.inputs(data.get("image", ()), clips_of(videos), where=where))
        batch["multi_modal_inputs"] = object_array(inputs)
        return batch

    def conversation(
        self,
        ids: list[int],
        images: Sequence[Any],
        videos: Iterable[tuple[np.ndarray, Any]],
        encode: Encode,
        where: str,
    ) -> VisionPrompt:
        """Process a conversation: a prompt and the turns after it. Its length is not limited.

        Args:
            ids: token ids of the conversation, with one token for each image and each video.
            images: images in any form that a row may have.
            videos: for each video its resized frames, [T, 3, H, W], and its `Clip.metadata`.
            encode: tokenizes the times of frames.
            where: the conversation, for errors.

        Returns:
            The conversation, ready for the model.

        Raises:
            DataError: as for `prompt`.
        """
        pictures = [
            read_picture(image, folder=Path(), where=f"{where}, image {number}")
            for number, image in enumerate(images)
        ]
        # The frames have been chosen and resized before, so the rules are not applied again.
        clips = clips_of(videos)
        return self.prompt(ids, pictures, sys.maxsize, where=where, clips=clips, encode=encode)

    def media_sizes(
        self, media: Sequence[Sequence[Any]], config: DataConfig, *, folder: Path, where: str
    ) -> tuple[list[int], list[Clip]]:
        """Count the embeddings of a row's images, and choose the frames of its videos.

        Only the headers of files are read. If bad rows are to be left out (`data.on_bad_row=skip`),
        images and frames are decoded as a check.

        Args:
            media: two lists, the images and the videos of a row.
            config: the section `data`.
            folder: folder of the data file.
            where: file and row, for errors.

        Returns:
            The number of embeddings of each image, and the clips without their frames.

        Raises:
            DataError: as for `read_media`.
        """
        if config.on_bad_row == "skip":
            # Only decoding shows damage behind the header of a file. The result is not needed here.
            read_media(media, self, config, folder=folder, where=where)
        images, videos = media
        num_embeddings = []
        for image, place in _list_with_places(images, "image", config.image_key, where):
            height, width = picture_size(image, folder=folder, where=place)
            num_embeddings.append(self.num_tokens(height, width, where=place))
        clips = []
        for value, place in _list_with_places(videos, "video", config.video_key, where):
            rules = self.frame_rules(place)
            clips.append(rules.clip(open_video(value, folder=folder, where=place), where=place))
        return num_embeddings, clips

    def frame_rules(self, where: str) -> FrameRules:
        """Return the rules for videos. Raise a DataError if the processor takes no videos."""
        if self.frames is None or self.video_token_id is None:
            raise DataError(
                where,
                got="a video",
                expected=f"text and images, which {self.name} takes",
                fix="Make the processor by quadriga.data.load_processor, from the model's folder.",
            )
        return self.frames

    def num_tokens(self, height: int, width: int, *, where: str) -> int:
        """Number of embeddings of an image, which is its number of tokens.

        Args:
            height: height in pixels.
            width: width in pixels.
            where: the row and the number of the image, for errors.

        Returns:
            The number of embeddings.

        Raises:
            DataError: the processor refuses an image of this size.
        """
        try:
            num_patches = self.image_processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise self._refusal_error(error, where) from error
        return num_patches // self.merge_size**2

    def _refusal_error(self, error: Exception, where: str) -> DataError:
        """Make a DataError of an error that the image processor raised about an image."""
        reason = str(error).partition("\n")[0]
        return DataError(
            where,
            got=f"an image that the processor of {self.name} refuses ({reason})",
            expected="an image that the processor takes",
            fix="Crop or leave out the image.",
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
        """Expand a tokenized prompt, and process its images and videos.

        A prompt with images or videos is never truncated.

        Args:
            ids: token ids, with one token for each image and each video.
            pictures: images in RGB.
            limit: most tokens of the expanded prompt.
            where: the row, for errors.
            clips: videos with their frames.
            encode: tokenizes times. Needed for models whose prompts write them.

        Returns:
            The prompt, ready for the model.

        Raises:
            DataError: the ids do not have one token for each image and video; the last token is one
                of these; the processor refuses an image; or a prompt with images or videos is too
                long.
        """
        self.check_places(ids, pictures, clips, where=where)
        if ids and ids[-1] in (self.image_token_id, self.video_token_id):
            raise DataError(
                where,
                got="a prompt that ends with an image or a video",
                expected="text behind it, as chat templates write it",
                fix="End with text, or set data.apply_chat_template_kwargs.add_generation_prompt=true.",
            )
        inputs = self.inputs(pictures, clips, where=where)
        image_grids = inputs.get("image_grid_thw", torch.zeros(0, 3))
        # Each square of patches becomes one embedding.
        num_embeddings = (image_grids.prod(-1) // self.merge_size**2).int().tolist()
        expanded_ids = self.expand(ids, iter(num_embeddings), iter(clips), encode)
        # A prompt without images and videos, whose `inputs` are empty, may be truncated by the
        # caller.
        if inputs and len(expanded_ids) > limit:
            raise self._too_long_error(expanded_ids, limit, where, has_videos=bool(clips))
        positions = self.positions(expanded_ids, inputs)
        return VisionPrompt(ids, expanded_ids, positions, tuple(pictures), tuple(clips), inputs)

    def positions(self, ids: list[int], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the positions of expanded tokens.

        Args:
            ids: expanded token ids, [P].
            inputs: tensors for the model, from `VisionProcessor.inputs`.

        Returns:
            Positions along time, height and width, [3, P] int64.
        """
        # The tensors other than pixels are named like the parameters of `get_rope_index`.
        grids = {name: value for name, value in inputs.items() if not name.startswith("pixel")}
        positions, _ = self.get_rope_index(ids, **grids)
        return positions

    def _too_long_error(
        self, expanded_ids: list[int], limit: int, where: str, *, has_videos: bool
    ) -> DataError:
        """Make the error for a prompt with images or videos that is longer than `limit` tokens."""
        got = f"{len(expanded_ids)} tokens"
        # The counts tell users whether shorter texts or smaller images would help.
        kinds = self._media_kinds(expanded_ids)
        # `_media_kinds` has 1 for a token of an image, and 2 for a token of a video.
        for name, kind in (("images", 1), ("videos", 2)):
            count = kinds.count(kind)
            if count:
                got += f", {count} of them of {name}"
        keys = "max_pixels, or fps and max_frames of videos" if has_videos else "max_pixels"
        return DataError(
            where,
            got=got,
            expected=f"at most data.max_prompt_length={limit}; prompts with media are not cut",
            fix=(
                f"Raise that length, lower data.mm_processor_kwargs.{keys}, or leave such rows out"
                " with data.filter_overlong_prompts=true."
            ),
        )

    def check_places(
        self, ids: list[int], images: Sequence[Any], videos: Sequence[Any], *, where: str
    ) -> None:
        """Raise a DataError unless token ids have one token for each image and each video.

        Args:
            ids: token ids before they are expanded.
            images: the images of the row.
            videos: the videos of the row.
            where: the row, for errors.

        Raises:
            DataError: there are more or fewer tokens.
        """
        for kind, token, media in (
            ("image", self.image_token_id, images),
            ("video", self.video_token_id, videos),
        ):
            count = 0 if token is None else ids.count(token)
            if count != len(media):
                raise DataError(
                    where,
                    got=f"{count} {kind} tokens in the rendered chat, for {len(media)} {kind}s",
                    expected=f"one token for each {kind}",
                    fix=f"Use a chat template that renders {kind}s, and no text with the token itself.",
                )

    def expand(
        self,
        ids: Sequence[int],
        counts: Iterator[int],
        clips: Iterator[Clip],
        encode: Encode | None = None,
    ) -> list[int]:
        """Replace the token of each image and video by one token for each of its embeddings.

        Args:
            ids: token ids, with one token for each image and each video.
            counts: number of embeddings of each image. Each image token in `ids` takes the next
                one, so several pieces of a prompt can share the iterator.
            clips: the videos. Each video token in `ids` takes the next one.
            encode: tokenizes times. Needed for models whose prompts write them.

        Returns:
            The expanded token ids, [P].
        """
        expanded_ids = []
        for token in ids:
            if token == self.image_token_id:
                expanded_ids += [token] * next(counts)
            elif token == self.video_token_id:
                expanded_ids += self.video_ids(next(clips), encode)
            else:
                expanded_ids.append(token)
        return expanded_ids

    def video_ids(self, clip: Clip, encode: Encode | None) -> list[int]:
        """Make the tokens that replace one video token.

        Args:
            clip: the video.
            encode: tokenizes times. Needed for models whose prompts write them.

        Returns:
            A token for each embedding. For models with `writes_times` also the tokens of the times
            as text, and `bounds` around the embeddings of each time.
        """
        rules = self.frame_rules("a prompt")
        token = self.video_token_id
        assert token is not None
        time, height, width = rules.grid(clip)
        # The grid counts patches, of which a square makes one embedding.
        num_per_time = height * width // rules.merge_size**2
        if not rules.writes_times:
            # Only the positions of the tokens tell the times apart.
            return [token] * (time * num_per_time)
        assert encode is not None, "times are tokenized"
        start, end = self.bounds
        times = rules.times(clip)
        ids = []
        if self.video_bounds is not None:
            # GLM-4V: whole seconds after the embeddings.
            for time_ids in encode([str(int(second)) for second in times]):
                ids += [start, *[self.image_token_id] * num_per_time, end, *time_ids]
            return ids
        # Qwen3-VL: seconds before the embeddings.
        for time_ids in encode([f"<{second:.1f} seconds>" for second in times]):
            ids += [*time_ids, start, *[token] * num_per_time, end]
        return ids

    def get_rope_index(
        self,
        ids: list[int],
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Compute the position of each expanded token along time, height and width.

        Tokens of text advance by one along all three axes. The position of an embedding of an image
        or video is the position where the image or video begins, plus the embedding's coordinates
        in the grid; along time these may be in units of seconds. The text after an image or video
        continues after the largest of its positions. This follows the models' own code and vLLM.

        Args:
            ids: expanded tokens, [P].
            image_grid_thw: patches of the images along time, height and width, [images, 3].
            video_grid_thw: patches of the videos, [videos, 3].
            second_per_grid_ts: seconds from one patch to the next along time, [videos].

        Returns:
            Positions [3, P] int64; and the number that is added to the index of a later token of
            text to get its position.
        """
        if video_grid_thw is not None:
            # Called for its error, if the processor takes no videos.
            self.frame_rules("get_rope_index")
        image_grids = [] if image_grid_thw is None else image_grid_thw
        # For each kind that `_media_kinds` returns (text, image, video), an iterator over the grids
        # of this kind, each with the number of positions per patch along time.
        grids_by_kind = (
            iter(()),
            ((grid, 1.0) for grid in image_grids),
            self._grids_of_video_runs(video_grid_thw, second_per_grid_ts),
        )
        parts = []
        end = 0  # index of the first token after the last image or video so far
        position = 0  # position of this token
        for place, kind in enumerate(self._media_kinds(ids)):
            if place < end:
                continue  # inside an image or video
            grid_and_interval = next(grids_by_kind[kind], None)
            if grid_and_interval is None:
                continue  # text, or an image token without a grid
            grid, interval = grid_and_interval
            time, height, width = grid.tolist()
            # The text between the previous image or video and this one advances by one per token.
            num_text = place - end
            parts.append((torch.arange(num_text) + position).expand(3, -1))
            position += num_text
            # Coordinates along time, height and width.
            axes = [
                (torch.arange(time) * interval).long(),
                torch.arange(height // self.merge_size),
                torch.arange(width // self.merge_size),
            ]
            # Coordinates of each embedding in the grid, [3, embeddings].
            coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
            parts.append(coordinates + position)
            end = place + coordinates.shape[1]
            # The next text starts after the largest coordinate.
            position += 1 + max(int(axis[-1]) for axis in axes)
        # The text after the last image or video.
        parts.append((torch.arange(len(ids) - end) + position).expand(3, -1))
        return torch.cat(parts, dim=1), position - end

    def _media_kinds(self, ids: list[int]) -> list[int]:
        """Kind of each expanded token: 1 for an image's embedding, 2 for a video's, 0 for text."""
        tokens = np.array(ids)
        is_image = tokens == self.image_token_id
        is_video = tokens == self.video_token_id
        if self.video_bounds is not None:
            # Videos use the image token, so a video is found by the tokens before and after it:
            # inside, one more video has begun than has ended.
            first, last = self.video_bounds
            is_inside = np.cumsum(tokens == first) > np.cumsum(tokens == last)
            is_video = is_image & is_inside
        # `is_image` becomes 1 or 0.
        return np.where(is_video, 2, is_image).tolist()

    def _grids_of_video_runs(
        self, grids: torch.Tensor | None, seconds: torch.Tensor | None
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the grid of each uninterrupted run of video tokens in the prompt.

        Args:
            grids: patches of each video along time, height and width, [videos, 3].
            seconds: seconds from one patch to the next along time, [videos].

        Yields:
            The patches along time, height and width, [3]; and the positions per patch along time.
        """
        for number, grid in enumerate([] if grids is None else grids):
            if self.frames is not None and self.frames.writes_times:
                # The text of the times separates the patches of each time, which form a run like
                # that of an image.
                time = grid[0]
                frame_grid = torch.stack((torch.ones_like(time), *grid[1:]))
                for _ in range(int(time)):
                    yield frame_grid, 1.0
            elif self.tokens_per_second is None or seconds is None:
                # Without `seconds`, patches count as one second apart along time. Without
                # `tokens_per_second`, there is one position for each of them.
                yield grid, self.tokens_per_second or 1.0
            else:
                yield grid, self.tokens_per_second * seconds[number]


def clips_of(videos: Iterable[tuple[np.ndarray, Any]]) -> list[Clip]:
    """Restore clips from their frames, [T, 3, H, W] each, and their `Clip.metadata()`."""
    return [Clip.of(torch.from_numpy(frames), metadata) for frames, metadata in videos]


def load_processor(
    path: str | Path, *, trust_remote_code: bool = False, options: Mapping[str, Any] | None = None
) -> VisionProcessor | None:
    """Load the processor of a vision-language model.

    Unlike the processor of transformers, it does not need torchvision.

    Args:
        path: the model's folder or its name on the hub.
        trust_remote_code: whether code in that folder may run.
        options: values of `data.mm_processor_kwargs`, which replace the settings of the model's
            files.

    Returns:
        The processor. None: the model's type is not in `VISION_TYPES`.

    Raises:
        DataError: Pillow or the processor's file is missing; there are options for a text-only
            model; or an option has no effect in this model.
    """
    # The path of a file has no model configuration, and counts as a text-only model.
    model_type = ""
    if not Path(path).is_file():
        # `AutoConfig` would run the code that comes with some models; the dictionary needs none.
        model_config, _ = PretrainedConfig.get_config_dict(path)
        model_type = model_config.get("model_type", "")
    options = dict(options or {})
    if model_type not in VISION_TYPES:
        if options:
            raise DataError(
                "data.mm_processor_kwargs",
                got=f"{options} for {path}, a model of type {model_type or 'unknown'}",
                expected=f"a vision-language model: {', '.join(VISION_TYPES)}",
                fix="Leave the key out.",
            )
        return None
    # The model is a vision-language model from here on.
    where = f"image processor of {path}"
    require_pillow(where)
    settings = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    # The options for images. `FrameRules.of` gets all options.
    sizes = {name: value for name, value in options.items() if name.endswith("pixels")}
    try:
        image_processor = AutoImageProcessor.from_pretrained(
            path, trust_remote_code=trust_remote_code, **sizes
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(
            where,
            got=str(error).strip().partition("\n")[0],
            expected="preprocessor_config.json in the model's folder",
            fix="Copy it from the model that this one was made of.",
        ) from error
    video_bounds = None
    if model_type == "glm4v":
        # GLM-4V's image processor names the limits otherwise, and counts an image once for each
        # frame of a patch.
        edges = dict(image_processor.size)
        for option, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if option in sizes:
                edges[edge] = sizes[option] * image_processor.temporal_patch_size
        image_processor.size = type(image_processor.size)(**edges)
        bounds = (settings.image_start_token_id, settings.image_end_token_id)
        video_bounds = (settings.video_start_token_id, settings.video_end_token_id)
    else:
        bounds = (settings.vision_start_token_id, settings.vision_end_token_id)
    return VisionProcessor(
        image_processor=image_processor,
        image_token_id=settings.image_token_id,
        video_token_id=settings.video_token_id,
        name=str(path),
        frames=FrameRules.of(video_settings(path), model_type, options),
        tokens_per_second=getattr(settings.vision_config, "tokens_per_second", None),
        bounds=bounds,
        video_bounds=video_bounds,
    )


def as_vision(processor: Any) -> VisionProcessor | None:
    """Convert a processor of transformers to a `VisionProcessor`, which takes images only.

    A `VisionProcessor` and None are returned as they are.

    Raises:
        DataError: the processor is of none of the models in `VISION_TYPES`.
    """
    if processor is None or isinstance(processor, VisionProcessor):
        return processor
    where = f"processor {type(processor).__name__}"
    image_processor = getattr(processor, "image_processor", None)
    if not isinstance(processor, ProcessorMixin) or image_processor is None:
        raise DataError(
            where,
            got="no image processor",
            expected="a processor from quadriga.data.load_processor, or None",
        )
    # The rules for videos are not known. Without `frames`, prompts with videos are refused. `where`
    # is the name of the model in errors.
    video_token_id = getattr(processor, "video_token_id", None)
    return VisionProcessor(image_processor, processor.image_token_id, video_token_id, where)


def read_media(
    media: Sequence[Sequence[Any]],
    processor: VisionProcessor | None,
    config: DataConfig,
    *,
    folder: Path,
    where: str,
) -> tuple[list[Any], list[Clip]]:
    """Read the images and videos of a row.

    Args:
        media: two lists, the images and the videos of the row; both empty without a processor.
        processor: processor of the vision-language model. None: the model takes text only.
        config: the section `data`.
        folder: folder of the data file, where relative paths start.
        where: file and row, for errors.

    Returns:
        The images in RGB, and the videos with their frames.

    Raises:
        DataError: an image or a video cannot be read. The error names its column and number.
    """
    images, videos = media
    pictures = [
        read_picture(image, folder=folder, where=place)
        for image, place in _list_with_places(images, "image", config.image_key, where)
    ]
    clips = []
    for value, place in _list_with_places(videos, "video", config.video_key, where):
        # Without a processor there are no videos.
        assert processor is not None
        rules = processor.frame_rules(place)
        clips.append(rules.read(open_video(value, folder=folder, where=place), where=place))
    return pictures, clips


def _list_with_places(
    media: Sequence[Any], kind: str, key: str | None, where: str
) -> list[tuple[Any, str]]:
    """List images or videos of a row, each with its place for errors.

    The place names the column and the messages, because each image may come from either, and the
    number in the order in which the messages show them.

    Args:
        media: the images or the videos.
        kind: "image" or "video".
        key: the configured column. None: there is no column, but messages may hold some.
        where: file and row.
    """
    column = f"{where}, column {key!r} or a message"
    return [(medium, f"{column}, {kind} {number}") for number, medium in enumerate(media)]
