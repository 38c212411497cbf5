# SPDX-License-Identifier: Apache-2.0
"""Reads the videos of a row, given as files, images or arrays, for a vision-language model.

    video (number, rate and size of frames) ──rules of the model──> clip (which frames, in which size)

The rules are those of the model's video processor in transformers, computed without torchvision. To
decode a frame of a file, a decoder needs earlier frames; these are not kept in memory.

Shapes: T frames of H by W pixels, cut into S patches of X values each.
"""

import io
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate
from transformers.utils import cached_file

from quadriga.data.pictures import DECODED, describe_source, find_source, picture_size, read_picture
from quadriga.data.tokenizing import shortened, without_nulls
from quadriga.errors import DataError

FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
"""Files that may have the settings of a model's video processor; the newest layout comes first."""
# Frames that are taken of a video, unless model files or configuration say otherwise.
_FPS = 2.0  # per second
_MIN_FRAMES = 4
_MAX_FRAMES = 768
TIME_TEXT_TYPES = ("qwen3_vl", "qwen3_vl_moe", "glm4v")
"""Types of models whose prompts write each time of a video as text, beside its patches."""
# Colors as OpenAI's CLIP normalizes them.
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_MAX_SIDE_RATIO = 200
"""Largest ratio of a frame's sides."""
_KEY_FRAME_DISTANCE_S = 10.0
"""Assumed seconds between key frames, in a file that does not list them."""
_FORMS = "a path, the bytes of a video file, a list of images, an array [T, H, W, 3], or one of these as `video`"


@dataclass(frozen=True)
class Video:
    """A video whose frames have not been read.

    Attributes:
        num_frames: T.
        fps: frames per second. None: not known.
        height: height in pixels.
        width: width in pixels.
        read: takes ascending numbers of frames, and returns these frames, [H, W, 3] uint8 each.
        source: the file, or its bytes. None: the row has the frames themselves.
    """

    num_frames: int
    fps: float | None
    height: int
    width: int
    read: Callable[[Sequence[int]], Iterator[np.ndarray]]
    source: Path | io.BytesIO | None = None


@dataclass(frozen=True)
class Clip:
    """The frames of a video that a model gets.

    Attributes:
        indices: numbers of the T frames in the video.
        fps: frames per second of the whole video, not of the frames in the clip.
        num_frames: number of frames of the whole video.
        size: height and width in pixels after resizing.
        frames: resized frames, [T, 3, H, W] uint8. None: they have not been read.
    """

    indices: tuple[int, ...]
    fps: float
    num_frames: int
    size: tuple[int, int]
    frames: torch.Tensor | None = None

    @classmethod
    def of(cls, frames: torch.Tensor, metadata: Mapping[str, Any]) -> "Clip":
        """Restore a clip from its frames and metadata.

        Args:
            frames: [T, 3, H, W] uint8.
            metadata: what `metadata()` of the original clip returned.

        Returns:
            The clip with its frames.
        """
        height, width = frames.shape[-2:]
        return cls(
            indices=tuple(metadata["frames_indices"]),
            fps=metadata["fps"],
            num_frames=metadata["total_num_frames"],
            size=(height, width),
            frames=frames,
        )

    def metadata(self) -> dict[str, Any]:
        """Facts about the video, under the names that transformers and vLLM use."""
        # `do_sample_frames`: no further choice is to be made among these frames.
        return {
            "total_num_frames": self.num_frames,
            "fps": self.fps,
            "duration": self.num_frames / self.fps,
            "frames_indices": list(self.indices),
            "do_sample_frames": False,
        }


@dataclass(frozen=True)
class FrameRules:
    """Rules of a model: which frames are taken of a video, their size, and their patches.

    Attributes:
        patch_size: side of a patch in pixels.
        temporal_patch_size: frames of a patch.
        merge_size: patches along height, and along width, that make one embedding.
        min_pixels: fewest pixels of a frame after resizing.
        max_pixels: most pixels of a frame after resizing.
        mean: mean of each color, after scaling.
        std: standard deviation of each color, after scaling.
        scale: factor of a pixel's value, applied before `mean` and `std`.
        writes_times: whether the prompt writes the time of each patch along time as text, between
            the tokens of the patches.
        limits_whole_clip: whether `min_pixels` and `max_pixels` limit the pixels of all frames
            together. Otherwise they limit the pixels of each frame.
        fps: frames that are taken of each second.
        min_frames: fewest frames that are taken of a video.
        max_frames: most frames that are taken of a video.
        max_duration_s: for GLM-4V, most seconds of a video at which frames are taken at `fps`. A
            longer video has as many frames as one of this length. None: `min_frames` and
            `max_frames` limit the number of frames.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255
    writes_times: bool = False
    limits_whole_clip: bool = False
    fps: float = _FPS
    min_frames: int = _MIN_FRAMES
    max_frames: int = _MAX_FRAMES
    max_duration_s: float | None = None

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], model_type: str, options: Mapping[str, Any]
    ) -> "FrameRules":
        """Make the rules of a model.

        Args:
            settings: settings of the model's video processor, from `video_settings`.
            model_type: `model_type` of the model's configuration.
            options: values of `data.mm_processor_kwargs`, which replace the model's own.

        Returns:
            The rules; a setting that is missing has the default of transformers.

        Raises:
            DataError: an option has no effect in this model.
        """
        # Defaults of transformers for this type of model.
        patch_size = 14
        mean = _CLIP_MEAN
        std = _CLIP_STD
        if model_type.startswith("qwen3_vl"):
            patch_size = 16
            mean = std = (0.5, 0.5, 0.5)
        # Pixels of the square that makes one embedding.
        square = (2 * patch_size) ** 2
        min_pixels = 128 * square
        max_pixels = 768 * square
        max_duration_s = None
        if model_type == "glm4v":
            min_pixels = 16 * square
            max_pixels = 60_000 * square
            max_duration_s = settings.get("max_duration") or 300
            ignored_keys = {"min_frames", "max_frames"} & options.keys()
            if ignored_keys:
                raise DataError(
                    f"data.mm_processor_kwargs.{min(ignored_keys)}",
                    got=f"a value, for a model of type {model_type}",
                    expected="fps, the only option for the number of frames in this model",
                    fix="Leave the key out.",
                )
        # Some files have the limits of a frame's pixels under `size`.
        size = settings.get("size") or {}
        writes_times = model_type in TIME_TEXT_TYPES
        pixel_keys = ("min_pixels", "max_pixels")
        rules = cls(
            patch_size=settings.get("patch_size") or patch_size,
            temporal_patch_size=settings.get("temporal_patch_size") or 2,
            merge_size=settings.get("merge_size") or 2,
            min_pixels=settings.get("min_pixels") or size.get("shortest_edge") or min_pixels,
            max_pixels=settings.get("max_pixels") or size.get("longest_edge") or max_pixels,
            mean=tuple(settings.get("image_mean") or mean),
            std=tuple(settings.get("image_std") or std),
            scale=settings.get("rescale_factor") or 1 / 255,
            writes_times=writes_times,
            # In the model's files, the limits are for the whole clip if the prompt writes times. As
            # options of the user, they are for each image, and so for each frame.
            limits_whole_clip=writes_times and options.keys().isdisjoint(pixel_keys),
            max_duration_s=max_duration_s,
            fps=settings.get("fps") or _FPS,
            min_frames=settings.get("min_frames") or _MIN_FRAMES,
            max_frames=settings.get("max_frames") or _MAX_FRAMES,
        )
        # The options have the names of attributes, such as `max_frames`.
        return replace(rules, **options)

    def clip(self, video: Video, *, where: str) -> Clip:
        """Choose the frames of a video and their size. No frame is read.

        Args:
            video: the video.
            where: the row and the number of the video, for errors.

        Returns:
            The clip without its frames.

        Raises:
            DataError: the sides of the video differ too much.
        """
        # Frames whose rate is not known count as taken at the model's rate already.
        fps = video.fps or self.fps
        if self.max_duration_s is not None:
            indices = self._glm_indices(video, fps, self.max_duration_s)
        elif self.writes_times:
            indices = self._evenly_spaced_indices(video.num_frames, fps)
        else:
            indices = self._whole_patch_indices(video.num_frames, fps)
        size = self._resized_size(len(indices), video.height, video.width, where)
        return Clip(tuple(indices), fps, video.num_frames, size)

    def read(self, video: Video, *, where: str) -> Clip:
        """Read the frames of a clip.

        Args:
            video: the video.
            where: the row and the number of the video, for errors.

        Returns:
            The clip with its frames.

        Raises:
            DataError: the video breaks off, is damaged, or has sides that differ too much.
        """
        clip = self.clip(video, where=where)

        def decode() -> torch.Tensor:
            frames = [self._resize(frame, clip.size) for frame in video.read(clip.indices)]
            return torch.cat(frames)

        # Part of the key in the cache: other rules may choose other frames of the file, or other
        # sizes.
        variant = (clip.indices, clip.size)
        frames = DECODED.get(video.source, variant, decode, lambda tensor: tensor.nbytes)
        return replace(clip, frames=frames)

    def grid(self, clip: Clip) -> tuple[int, int, int]:
        """Number of patches of a clip along time, height and width."""
        height, width = clip.size
        time = math.ceil(len(clip.indices) / self.temporal_patch_size)
        return time, height // self.patch_size, width // self.patch_size

    def times(self, clip: Clip) -> list[float]:
        """Time in seconds of each patch along time, which has `temporal_patch_size` frames.

        It is the mean of the times of its first and last frame; for models with `max_duration_s`
        (GLM-4V) the time of the first frame.
        """
        size = self.temporal_patch_size
        # The last frame is repeated to fill the last patch.
        num_missing = -len(clip.indices) % size
        indices = [*clip.indices, *[clip.indices[-1]] * num_missing]
        frame_times = [index / clip.fps for index in indices]
        patch_times = []
        for first in range(0, len(frame_times), size):
            last = first if self.max_duration_s else first + size - 1
            patch_times.append((frame_times[first] + frame_times[last]) / 2)
        return patch_times

    def patches(self, clip: Clip) -> torch.Tensor:
        """Cut the frames of a clip into normalized patches, [S, X] float32.

        The order is by time, then by the squares of patches that make an embedding, then by the
        patches within a square.
        """
        assert clip.frames is not None, "the frames of a clip are read"
        time, height, width = self.grid(clip)
        size = self.temporal_patch_size
        merged = self.merge_size
        pixels = self.patch_size
        # The last frame is repeated to fill the last patch.
        num_missing = time * size - len(clip.frames)
        padding = clip.frames[-1:].expand(num_missing, -1, -1, -1)
        frames = torch.cat((clip.frames, padding)).float()

        # Scaling is folded into the normalization, as in transformers, to round alike.
        mean = torch.tensor(self.mean)[:, None, None] * (1.0 / self.scale)
        std = torch.tensor(self.std)[:, None, None] * (1.0 / self.scale)
        frames = (frames - mean) / std

        # Split each axis. Time becomes patches, and frames of a patch; height and width each become
        # squares, patches of a square, and pixels of a patch.
        blocks = frames.view(
            time, size, 3, height // merged, merged, pixels, width // merged, merged, pixels
        )
        # First the axes that number the patches, then those of the values of one patch.
        ordered = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return ordered.reshape(time * height * width, 3 * size * pixels**2)

    def _glm_indices(self, video: Video, fps: float, max_duration_s: float) -> list[int]:
        """Choose an even number of frames as GLM-4V does, by the duration of the video.

        Args:
            video: the video.
            fps: frames per second of the video; `self.fps` of them are taken.
            max_duration_s: `self.max_duration_s`, which is not None here.

        Returns:
            The numbers of the frames.
        """
        last = video.num_frames - 1
        # As in transformers, which knows the duration of a file, and estimates it for other videos.
        duration_s = video.num_frames / fps if video.source else round(last / fps) + 1
        max_count = int(max_duration_s * self.fps)
        if duration_s <= max_duration_s:
            count = max(int(duration_s * self.fps), 1)
            places = np.ceil(np.arange(count) * fps / self.fps)
        elif max_count >= video.num_frames:
            places = np.arange(video.num_frames)
        else:
            places = np.ceil(np.linspace(0, duration_s, max_count) * fps)
        # If more frames are wanted than there are, some come several times: take each only once.
        indices = np.unique(places.clip(max=last).astype(int)).tolist()
        # A patch has two frames, so repeat the last one of an odd number.
        if len(indices) % 2:
            indices.append(indices[-1])
        return indices

    def _evenly_spaced_indices(self, num_frames: int, fps: float) -> list[int]:
        """Choose frames as Qwen3-VL does: evenly from the first to the last frame."""
        count = int(num_frames / fps * self.fps)
        count = min(max(count, self.min_frames), self.max_frames, num_frames)
        places = np.linspace(0, num_frames - 1, count).round()
        return places.astype(int).tolist()

    def _whole_patch_indices(self, num_frames: int, fps: float) -> list[int]:
        """Choose frames as Qwen2-VL and Qwen2.5-VL do: as many as fill whole patches."""
        size = self.temporal_patch_size
        max_count = min(self.max_frames, num_frames) // size * size
        target = max(num_frames / fps * self.fps, self.min_frames)
        count = int(min(target, max_count) // size * size)
        if not count:  # fewer frames than a patch has
            return list(range(num_frames))
        # Computed by torch, as in transformers. Rounding may add a number at the end, which is cut.
        return torch.arange(0, num_frames, num_frames / count).int().tolist()[:count]

    def _resized_size(
        self, num_frames: int, height: int, width: int, where: str
    ) -> tuple[int, int]:
        """Height and width of the frames after resizing: multiples of the side of an embedding.

        Follows the models' processors in transformers, including their rounding.

        Args:
            num_frames: frames of the clip.
            height: height of the video in pixels.
            width: width of the video in pixels.
            where: the row and the number of the video, for errors.

        Raises:
            DataError: the sides of the video differ too much.
        """
        side = self.patch_size * self.merge_size  # of an embedding, in pixels
        min_pixels = self.min_pixels
        max_pixels = self.max_pixels
        # Number of frames whose pixels are limited together, and the same rounded to whole patches.
        # As in transformers, the latter decides whether to scale, the former by how much.
        num_limited = 1
        num_in_patches = 1
        if self.writes_times:
            size = self.temporal_patch_size
            num_limited = num_frames
            num_in_patches = max(1, round(num_frames / size)) * size
            if not self.limits_whole_clip:
                min_pixels *= num_in_patches
                max_pixels *= num_in_patches
            # Enlarge a small frame so that each side has room for at least one embedding.
            if min(height, width) < side:
                scale = max(side / height, side / width)
                height = int(height * scale)
                width = int(width * scale)
        if max(height, width) > _MAX_SIDE_RATIO * min(height, width):
            raise DataError(
                where,
                got=f"frames of {height} by {width} pixels",
                expected=f"sides that differ at most {_MAX_SIDE_RATIO} times",
                fix="Crop or leave out the video.",
            )
        # Take the nearest multiples of `side`. If they are outside the limits, scale both sides
        # first.
        new_height = round(height / side) * side
        new_width = round(width / side) * side
        num_pixels = num_in_patches * new_height * new_width
        if num_pixels > max_pixels:
            divisor = math.sqrt(num_limited * height * width / max_pixels)
            new_height = max(side, math.floor(height / divisor / side) * side)
            new_width = max(side, math.floor(width / divisor / side) * side)
        elif num_pixels < min_pixels:
            scale = math.sqrt(min_pixels / (num_limited * height * width))
            new_height = math.ceil(height * scale / side) * side
            new_width = math.ceil(width * scale / side) * side
        return new_height, new_width

    def _resize(self, frame: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
        """Resize a frame [H, W, 3] as torchvision does, to [1, 3, H, W] uint8."""
        pixels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].contiguous()
        if pixels.shape[2:] == size:
            return pixels
        return interpolate(pixels, size=size, mode="bicubic", antialias=True, align_corners=False)


def video_settings(path: str | Path) -> dict[str, Any]:
    """Read the settings of a model's video processor; empty if there are none.

    Args:
        path: the model's folder or its name on the hub.
    """
    for name in FILES:
        # With these options the call returns None for a file that does not exist.
        file = cached_file(
            path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is None:
            continue
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
        # `processor_config.json` has a section for each processor of the model.
        if name == FILES[0]:
            settings = settings.get("video_processor")
        if settings:
            return settings
    return {}


def open_video(value: Any, *, folder: Path, where: str) -> Video:
    """Open a video of a row, without reading the frames that a model gets.

    Args:
        value: a path or a `file://` URL; bytes of a video file; a list of images; an array [T, H,
            W, 3] or [T, 3, H, W] of uint8; or a dictionary with one of these as `video`, `frames`,
            `path` or `bytes`. Such a dictionary may have the `fps` of its images or array.
        folder: folder of the data file. Relative paths start there, or else in the working
            directory.
        where: the row, the column and the number of the video, for errors.

    Returns:
        The video.

    Raises:
        DataError: the value has none of these forms, has an `fps` that is wrong or of a file, does
            not exist, is no video that can be read, or has no frame.
    """
    fps = None
    # Dictionaries may be nested: `with_parts` puts a list of frames into one, beside its `fps`.
    while isinstance(value, Mapping):
        fields = without_nulls(value)
        if fields.keys() & {"bytes", "path", "url"}:
            break  # `find_source` reads a dictionary with a file
        fps = fields.pop("fps", fps)
        names = list(fields)
        if names not in (["video"], ["frames"]):
            raise DataError(
                where,
                got=f"a video with {', '.join(names) or 'nothing'}",
                expected=_FORMS,
                fix="Set number and size of frames in data.mm_processor_kwargs, for all videos.",
            )
        value = fields[names[0]]
    if fps is not None and not (isinstance(fps, int | float) and math.isfinite(fps) and fps > 0):
        raise DataError(where, got=f"fps {shortened(fps)}", expected="frames per second, above 0")
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _video_of_list(list(value), fps, folder, where)
    if isinstance(value, np.ndarray | torch.Tensor):
        return _video_of_array(np.asarray(value), fps, where)
    if fps is not None:
        raise DataError(
            where,
            got="fps beside a file",
            expected="no fps, because the file has its own",
            fix="Leave it out. data.mm_processor_kwargs.fps sets how many frames of a second are taken.",
        )
    return _video_of_file(find_source(value, folder, where, "video", _FORMS), where)


def _video_of_list(values: list[Any], fps: float | None, folder: Path, where: str) -> Video:
    """Open a video that is a list of images, or an array as nested lists.

    Arguments and errors as for `open_video`; `fps` is None if it is not known.
    """
    if not values:
        raise DataError(
            where, got="a video without frames", expected="at least one frame", fix="Leave it out."
        )
    # Arrow returns an array as nested lists.
    if isinstance(values[0], Sequence | np.ndarray) and not isinstance(values[0], str | bytes):
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise DataError(
                where, got=f"a video of uneven lists ({error})", expected=_FORMS
            ) from error
        return _video_of_array(array, fps, where)
    places = [f"{where}, frame {number}" for number in range(len(values))]
    sizes = {
        picture_size(value, folder=folder, where=place)
        for value, place in zip(values, places, strict=True)
    }
    if len(sizes) > 1:
        examples = [f"{height} by {width}" for height, width in sorted(sizes)[:2]]
        raise DataError(
            where,
            got=f"frames of {len(sizes)} sizes, such as {' and '.join(examples)}",
            expected="frames of one size",
            fix="Resize them.",
        )

    def read(indices: Sequence[int]) -> Iterator[np.ndarray]:
        for index in indices:
            yield np.array(read_picture(values[index], folder=folder, where=places[index]))

    [(height, width)] = sizes
    return Video(len(values), fps, height, width, read)


def _video_of_array(array: np.ndarray, fps: float | None, where: str) -> Video:
    """Open a video that is an array [T, H, W, 3] or [T, 3, H, W].

    Raises:
        DataError: the array has another shape, or values that are not from 0 to 255.
    """
    if array.ndim == 4 and array.shape[-1] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    # Arrays that were nested lists have int64 values.
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
        array = array.astype(np.uint8)
    is_video = array.ndim == 4 and array.shape[-1] == 3 and array.dtype == np.uint8
    if not is_video or not array.size:
        raise DataError(
            where,
            got=f"an array {list(array.shape)} of {array.dtype}",
            expected="[T, H, W, 3] or [T, 3, H, W] of numbers from 0 to 255, with at least one frame",
            fix="Correct or leave out the row.",
        )
    num_frames, height, width, _ = array.shape

    def read(indices: Sequence[int]) -> Iterator[np.ndarray]:
        for index in indices:
            yield array[index]

    return Video(num_frames, fps, height, width, read)


def _video_of_file(source: Path | io.BytesIO, where: str) -> Video:
    """Open a video that is a file, and read its header and its first frame.

    Raises:
        DataError: the file cannot be read, or has no frame.
    """
    with _open_container(source, where) as (container, stream):
        # The header may leave out the number of frames. Packets can be counted without decoding.
        count = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
    # Opened again, because counting the packets may have read the file to its end.
    with _open_container(source, where) as (container, stream):
        # Decode a frame, because a header may promise frames that are not there.
        first_frame = next(container.decode(stream), None)
        if first_frame is None or not count or not fps:
            raise DataError(
                where,
                got=f"a video without frames ({describe_source(source)})",
                expected="at least one frame",
                fix="Leave it out.",
            )
        height, width, _ = _upright_pixels(first_frame).shape

    def read(indices: Sequence[int]) -> Iterator[np.ndarray]:
        return _decode_frames(source, fps, indices, where)

    return Video(count, fps, height, width, read, source)


def _decode_frames(
    source: Path | io.BytesIO, fps: float, indices: Sequence[int], where: str
) -> Iterator[np.ndarray]:
    """Decode some frames of a file. Long gaps between them are skipped by seeking.

    Args:
        source: the file, or its bytes.
        fps: frames per second of the file.
        indices: numbers of the frames, ascending.
        where: the row and the number of the video, for errors.

    Yields:
        The pixels of each frame, [H, W, 3] uint8.

    Raises:
        DataError: the file breaks off before a frame.
    """
    with _open_container(source, where) as (container, stream):
        # Decode with several threads.
        stream.thread_type = "AUTO"
        # Time stamps count from `start`, in units of this many seconds.
        start = stream.start_time or 0
        unit = float(stream.time_base)
        # Numbers of the key frames, at which decoding can begin. Empty with older versions of PyAV,
        # and for files without an index.
        key_frames = [
            round((entry.timestamp - start) * unit * fps)
            for entry in getattr(stream, "index_entries", ())
            if entry.is_keyframe
        ]
        frames = container.decode(stream)
        frame = None
        position = -1  # number of the frame that was decoded last
        for index in indices:
            # The frame at which decoding would begin after a seek: the last key frame up to
            # `index`, or the first key frame if it comes later.
            seek_position = index - _KEY_FRAME_DISTANCE_S * fps
            if key_frames:
                seek_position = key_frames[max(bisect_right(key_frames, index), 1) - 1]
            # If a seek would skip less than a second, it is faster to go on decoding.
            if seek_position > position + fps:
                container.seek(start + int(index / fps / unit), stream=stream)
                frames = container.decode(stream)
            # Decode up to the wanted frame. After a seek only time stamps tell a frame's number.
            while position < index:
                next_frame = next(frames, None)
                if next_frame is None:
                    break
                frame = next_frame
                position += 1
                if frame.pts is not None:
                    position = round((frame.pts - start) * unit * fps)
            # At the end of a file, numbers from rounded time stamps may be off by up to a second:
            # its last frame then stands in for the frame `index`.
            if frame is None or position < index - fps:
                raise DataError(
                    where,
                    got=(
                        f"a video that breaks off at frame {position + 1}, before frame {index}"
                        f" ({describe_source(source)})"
                    ),
                    expected="a whole file",
                    fix="Correct or leave out the row.",
                )
            yield _upright_pixels(frame)


def _upright_pixels(frame: Any) -> np.ndarray:
    """The pixels of a frame, rotated as the file says, [H, W, 3] uint8."""
    # The rotation is in degrees. Older versions of PyAV do not have it.
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.rot90(frame.to_ndarray(format="rgb24"), turns)


@contextmanager
def _open_container(source: Path | io.BytesIO, where: str) -> Iterator[tuple[Any, Any]]:
    """Context manager: open a file and yield its container and its video stream.

    Raises:
        DataError: PyAV is not installed, or FFmpeg raises an error here or inside the context.
    """
    # PyAV is an optional dependency: videos as images or arrays do not need it.
    try:
        import av
    except ImportError as error:
        raise DataError(
            where,
            got="a video file, without PyAV to read it",
            expected="PyAV",
            fix="Install it: pip install -e '.[video]', or give the frames as images.",
        ) from error

    file: Any = str(source)
    if isinstance(source, io.BytesIO):
        source.seek(0)
        file = source
    try:
        with av.open(file) as container:
            if not container.streams.video:
                raise DataError(
                    where,
                    got=f"a file without a video stream ({describe_source(source)})",
                    expected="a video",
                    fix="Correct or leave out the row.",
                )
            yield container, container.streams.video[0]
    except DataError:
        raise
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DataError(
            where,
            got=f"{describe_source(source)}, which is no video that can be read ({error})",
            expected="a whole file of a format that FFmpeg knows",
            fix="Correct or leave out the row.",
        ) from error
