# SPDX-License-Identifier: Apache-2.0
"""Reads the videos of a row, given as files, images or arrays, for a vision-language model.

    video (number, rate and size of frames) ──rules of the model──> clip (which frames, in which size)

The rules are those of the model's video processor in transformers, computed without torchvision.
Decoders need earlier frames to decode a frame of a file; those are never held in memory.

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

from quadriga.data.pictures import DECODED, described, picture_size, read_picture, source_of
from quadriga.data.tokenizing import shortened, without_nulls
from quadriga.errors import DataError

FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
# Frames that are taken of a video, unless model files or configuration say otherwise.
_FPS = 2.0  # per second
_MIN_FRAMES = 4
_MAX_FRAMES = 768
APART = ("qwen3_vl", "qwen3_vl_moe", "glm4v")
"""Models whose prompts have the patches of each time apart, beside the time as text."""
# Colors as OpenAI's CLIP normalizes them.
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_MAX_RATIO = 200
"""Largest ratio of a frame's sides."""
_SEEK_S = 10.0
"""Assumed distance of key frames, in a file that does not list them."""
_FORMS = "a path, the bytes of a video file, a list of images, an array [T, H, W, 3], or one of these as `video`"


@dataclass(frozen=True)
class Video:
    """A video whose frames are not read yet.

    Attributes:
        num_frames: T.
        fps: frames per second. None: not known.
        height: height in pixels.
        width: width in pixels.
        read: reads the frames with the given numbers, which must ascend, [H, W, 3] uint8 each.
        source: the file, or its bytes. None: the video came as frames.
        seconds: duration of a file. None: it follows from `fps`.
    """

    num_frames: int
    fps: float | None
    height: int
    width: int
    read: Callable[[Sequence[int]], Iterator[np.ndarray]]
    source: Path | io.BytesIO | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Clip:
    """The frames of a video that a model gets.

    Attributes:
        indices: numbers of the T frames in the video.
        fps: frames per second of the whole video.
        num_frames: frames of the whole video.
        size: height and width in pixels after resizing.
        frames: resized frames, [T, 3, H, W] uint8. None: they are only counted.
    """

    indices: tuple[int, ...]
    fps: float
    num_frames: int
    size: tuple[int, int]
    frames: torch.Tensor | None = None

    @classmethod
    def of(cls, frames: torch.Tensor, told: Mapping[str, Any]) -> "Clip":
        """Restore a clip from its frames and metadata.

        Args:
            frames: [T, 3, H, W] uint8.
            told: what `metadata()` of the clip returned.

        Returns:
            The clip with its frames.
        """
        height, width = frames.shape[-2:]
        return cls(
            indices=tuple(told["frames_indices"]),
            fps=told["fps"],
            num_frames=told["total_num_frames"],
            size=(height, width),
            frames=frames,
        )

    def metadata(self) -> dict[str, Any]:
        """Facts about the video, under the names that transformers and vLLM use."""
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
        are_apart: whether the prompt has the patches of each time apart, beside the time as text.
        counts_all: whether `min_pixels` and `max_pixels` limit all frames together.
        fps: frames that are taken of each second.
        min_frames: fewest frames of a video.
        max_frames: most frames of a video.
        longest_s: seconds (GLM-4V). Up to this length frames are taken at `fps`; of a longer video
            as many frames in all as of one of this length. None: `min_frames` and `max_frames`
            limit the number of frames.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255
    are_apart: bool = False
    counts_all: bool = False
    fps: float = _FPS
    min_frames: int = _MIN_FRAMES
    max_frames: int = _MAX_FRAMES
    longest_s: float | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any], kind: str, options: Mapping[str, Any]) -> "FrameRules":
        """Make the rules of a model.

        Args:
            told: settings of the model's video processor, from `video_settings`.
            kind: the model's type.
            options: values of `data.mm_processor_kwargs`, which replace the model's own.

        Returns:
            The rules; a setting that is missing has the default of transformers.

        Raises:
            DataError: an option has no effect in this model.
        """
        is_glm = kind == "glm4v"
        patch_size = 14
        mean = _CLIP_MEAN
        std = _CLIP_STD
        if kind.startswith("qwen3_vl"):
            patch_size = 16
            mean = std = (0.5, 0.5, 0.5)
        # Pixels of the square that makes one embedding.
        square = (2 * patch_size) ** 2
        min_pixels = 128 * square
        max_pixels = 768 * square
        longest_s = None
        if is_glm:
            min_pixels = 16 * square
            max_pixels = 60_000 * square
            longest_s = told.get("max_duration") or 300
            ignored_keys = {"min_frames", "max_frames"} & options.keys()
            if ignored_keys:
                raise DataError(
                    f"data.mm_processor_kwargs.{min(ignored_keys)}",
                    got=f"a value, for a model of type {kind}",
                    expected="fps, by which alone it takes frames",
                    fix="Leave the key out.",
                )
        # Some files have the bounds of a frame under `size`.
        size = told.get("size") or {}
        rules = cls(
            patch_size=told.get("patch_size") or patch_size,
            temporal_patch_size=told.get("temporal_patch_size") or 2,
            merge_size=told.get("merge_size") or 2,
            min_pixels=told.get("min_pixels") or size.get("shortest_edge") or min_pixels,
            max_pixels=told.get("max_pixels") or size.get("longest_edge") or max_pixels,
            mean=tuple(told.get("image_mean") or mean),
            std=tuple(told.get("image_std") or std),
            scale=told.get("rescale_factor") or 1 / 255,
            are_apart=kind in APART,
            counts_all=kind in APART,
            longest_s=longest_s,
            fps=told.get("fps") or _FPS,
            min_frames=told.get("min_frames") or _MIN_FRAMES,
            max_frames=told.get("max_frames") or _MAX_FRAMES,
        )
        if {"min_pixels", "max_pixels"} & options.keys():
            # As options, these keys limit each image, and so each frame.
            rules = replace(rules, counts_all=False)
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
        fps = video.fps or self.fps
        if self.longest_s is not None:
            indices = self._indices_by_duration(video, fps, self.longest_s)
        elif self.are_apart:
            indices = self._indices_apart(video.num_frames, fps)
        else:
            indices = self._indices_in_patches(video.num_frames, fps)
        size = self._size(len(indices), video.height, video.width, where)
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
            frames = [self._resized(frame, clip.size) for frame in video.read(clip.indices)]
            return torch.cat(frames)

        # Other rules may choose other frames of the same file, or another size.
        way = (clip.indices, clip.size)
        frames = DECODED.get(video.source, way, decode, lambda tensor: tensor.nbytes)
        return replace(clip, frames=frames)

    def grid(self, clip: Clip) -> tuple[int, int, int]:
        """Number of patches along time, height and width."""
        height, width = clip.size
        time = math.ceil(len(clip.indices) / self.temporal_patch_size)
        return time, height // self.patch_size, width // self.patch_size

    def times(self, clip: Clip) -> list[float]:
        """Time of each patch in seconds: its middle; for models with `longest_s` its start."""
        size = self.temporal_patch_size
        # The last frame is repeated to fill the last patch.
        num_missing = -len(clip.indices) % size
        indices = [*clip.indices, *[clip.indices[-1]] * num_missing]
        seconds = [index / clip.fps for index in indices]
        # The mean of the first and the last frame of a patch, or of the first one with itself.
        last = 0 if self.longest_s else size - 1
        return [(seconds[at] + seconds[at + last]) / 2 for at in range(0, len(seconds), size)]

    def patches(self, clip: Clip) -> torch.Tensor:
        """Cut the frames of a clip into normalized patches, [S, X] float32.

        They are ordered by time, then by the square that makes an embedding, then within the
        square.
        """
        assert clip.frames is not None, "the frames of a clip are read"
        time, height, width = self.grid(clip)
        size = self.temporal_patch_size
        merged = self.merge_size
        pixels = self.patch_size
        num_missing = time * size - len(clip.frames)
        padding = clip.frames[-1:].expand(num_missing, -1, -1, -1)
        frames = torch.cat((clip.frames, padding)).float()
        # Scaling is folded into the normalization, as in transformers, to round alike.
        mean = torch.tensor(self.mean)[:, None, None] * (1.0 / self.scale)
        std = torch.tensor(self.std)[:, None, None] * (1.0 / self.scale)
        frames = (frames - mean) / std
        # Axes: time, frame, color, then rows of squares, patches in a square, pixels in a patch; the
        # same for columns.
        blocks = frames.view(
            time, size, 3, height // merged, merged, pixels, width // merged, merged, pixels
        )
        ordered = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return ordered.reshape(time * height * width, 3 * size * pixels**2)

    def _indices_by_duration(self, video: Video, fps: float, longest_s: float) -> list[int]:
        """Choose an even number of frames as GLM-4V does, by the duration of the video."""
        last = video.num_frames - 1
        seconds = video.seconds or round(last / fps) + 1
        count = int(longest_s * self.fps)
        if seconds <= longest_s:
            places = np.ceil(np.arange(max(int(seconds * self.fps), 1)) * fps / self.fps)
        elif count >= video.num_frames:
            places = np.arange(video.num_frames)
        else:
            places = np.ceil(np.linspace(0, seconds, count) * fps)
        # At a higher rate than the video's, frames come several times; each is taken once.
        indices = np.unique(places.clip(max=last).astype(int)).tolist()
        # A patch has two frames.
        if len(indices) % 2:
            indices.append(indices[-1])
        return indices

    def _indices_apart(self, num_frames: int, fps: float) -> list[int]:
        """Choose frames as Qwen3-VL does: evenly from the first to the last frame."""
        count = int(num_frames / fps * self.fps)
        count = min(max(count, self.min_frames), self.max_frames, num_frames)
        places = np.linspace(0, num_frames - 1, count).round()
        return places.astype(int).tolist()

    def _indices_in_patches(self, num_frames: int, fps: float) -> list[int]:
        """Choose frames as Qwen2-VL and Qwen2.5-VL do: a multiple of those of a patch."""
        size = self.temporal_patch_size
        most = min(self.max_frames, num_frames) // size * size
        target = max(num_frames / fps * self.fps, self.min_frames)
        count = int(min(target, most, num_frames) // size * size)
        if not count:  # fewer frames than a patch has
            return list(range(num_frames))
        return torch.arange(0, num_frames, num_frames / count).int().tolist()[:count]

    def _size(self, num_frames: int, height: int, width: int, where: str) -> tuple[int, int]:
        """Height and width of the frames after resizing: multiples of the side of an embedding.

        Follows the models' processors in transformers, including their rounding.
        """
        factor = self.patch_size * self.merge_size
        low = self.min_pixels
        high = self.max_pixels
        # Number of frames whose pixels are limited together: as it is, and in whole patches.
        num_counted = 1
        num_rounded = 1
        if self.are_apart:
            size = self.temporal_patch_size
            num_counted = num_frames
            num_rounded = max(1, round(num_frames / size)) * size
            if not self.counts_all:
                low *= num_rounded
                high *= num_rounded
            # Each side has room for at least one embedding.
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height = int(height * scale)
                width = int(width * scale)
        if max(height, width) > _MAX_RATIO * min(height, width):
            raise DataError(
                where,
                got=f"frames of {height} by {width} pixels",
                expected=f"sides that differ at most {_MAX_RATIO} times",
                fix="Crop or leave out the video.",
            )
        # The nearest multiples, unless they are outside the limits. Then both sides are scaled alike.
        rows = round(height / factor) * factor
        columns = round(width / factor) * factor
        if num_rounded * rows * columns > high:
            by = math.sqrt(num_counted * height * width / high)
            rows = max(factor, math.floor(height / by / factor) * factor)
            columns = max(factor, math.floor(width / by / factor) * factor)
        elif num_rounded * rows * columns < low:
            by = math.sqrt(low / (num_counted * height * width))
            rows = math.ceil(height * by / factor) * factor
            columns = math.ceil(width * by / factor) * factor
        return rows, columns

    def _resized(self, frame: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
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
    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    # The newest layout of model files comes first.
    for name in FILES:
        file = cached_file(path, name, **quiet)
        if file is None:
            continue
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
        # This file has a section for each processor of the model.
        if name == FILES[0]:
            settings = settings.get("video_processor")
        if settings:
            return settings
    return {}


def open_video(value: Any, *, folder: Path, where: str) -> Video:
    """Open a video of a row. Its frames are not read yet.

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
        DataError: the value has none of these forms, does not exist, is no video that can be read,
            or has no frame.
    """
    fps = None
    # Dictionaries may be nested: `with_parts` wraps a list of frames to keep its `fps`.
    while isinstance(value, Mapping):
        fields = without_nulls(value)
        if not fields.keys().isdisjoint(("bytes", "path", "url")):
            break  # `source_of` reads a dictionary with a file
        fps = fields.pop("fps", fps)
        names = list(fields)
        if names not in (["video"], ["frames"]):
            raise DataError(
                where,
                got=f"a video with {', '.join(names) or 'nothing'}",
                expected=_FORMS,
                fix="data.mm_processor_kwargs sets number and size of the frames, for all videos.",
            )
        value = fields[names[0]]
    if fps is not None and not (isinstance(fps, int | float) and math.isfinite(fps) and fps > 0):
        expected = "frames for each second, above 0"
        raise DataError(where, got=f"fps {shortened(fps)}", expected=expected)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _from_list(list(value), fps, folder, where)
    if isinstance(value, np.ndarray | torch.Tensor):
        return _from_array(np.asarray(value), fps, where)
    if fps is not None:
        raise DataError(
            where,
            got="fps beside a file",
            expected="a file, which says it itself",
            fix="Leave it out. data.mm_processor_kwargs.fps sets how many frames of a second are taken.",
        )
    return _from_file(source_of(value, folder, where, "video", _FORMS), where)


def _from_list(values: list[Any], fps: float | None, folder: Path, where: str) -> Video:
    """Make a video of a list of images, or of an array as nested lists."""
    if not values:
        raise DataError(
            where, got="a video without frames", expected="at least one frame", fix="Leave it out."
        )
    # Arrow returns an array as nested lists.
    if isinstance(values[0], Sequence | np.ndarray) and not isinstance(values[0], str | bytes):
        try:
            array = np.asarray(values)
        except ValueError as error:
            got = f"a video of uneven lists ({error})"
            raise DataError(where, got=got, expected=_FORMS) from error
        return _from_array(array, fps, where)
    places = [f"{where}, frame {number}" for number in range(len(values))]
    sizes = set()
    for value, place in zip(values, places, strict=True):
        sizes.add(picture_size(value, folder=folder, where=place))
    if len(sizes) > 1:
        examples = [f"{height} by {width}" for height, width in sorted(sizes)[:2]]
        got = f"frames of {len(sizes)} sizes, such as {' and '.join(examples)}"
        raise DataError(where, got=got, expected="frames of one size", fix="Resize them.")

    def read(indices: Sequence[int]) -> Iterator[np.ndarray]:
        for index in indices:
            yield np.array(read_picture(values[index], folder=folder, where=places[index]))

    [(height, width)] = sizes
    return Video(len(values), fps, height, width, read)


def _from_array(array: np.ndarray, fps: float | None, where: str) -> Video:
    """Make a video of an array [T, H, W, 3] or [T, 3, H, W]."""
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


def _from_file(source: Path | io.BytesIO, where: str) -> Video:
    """Make a video of a file. Its header and its first frame are read."""
    with _decoding(source, where) as (container, stream):
        # The header may leave the number out; packets can be counted without decoding them.
        count = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
    with _decoding(source, where) as (container, stream):
        # A header may promise frames that are not there.
        first_frame = next(container.decode(stream), None)
        if first_frame is None or not count or not fps:
            got = f"a video without frames ({described(source)})"
            raise DataError(where, got=got, expected="at least one frame", fix="Leave it out.")
        height, width, _ = _upright(first_frame).shape

    def read(indices: Sequence[int]) -> Iterator[np.ndarray]:
        return _frames(source, fps, indices, where)

    return Video(count, fps, height, width, read, source, count / fps)


def _frames(
    source: Path | io.BytesIO, fps: float, indices: Sequence[int], where: str
) -> Iterator[np.ndarray]:
    """Decode the frames with the given ascending numbers. Long gaps are skipped by seeking."""
    with _decoding(source, where) as (container, stream):
        # Decode with several threads.
        stream.thread_type = "AUTO"
        start = stream.start_time or 0
        unit = float(stream.time_base)
        # Numbers of the key frames; empty with older versions of PyAV, and for files without an index.
        key_frames = []
        for entry in getattr(stream, "index_entries", ()):
            if entry.is_keyframe:
                key_frames.append(round((entry.timestamp - start) * unit * fps))
        frames = container.decode(stream)
        frame = None
        place = -1
        for index in indices:
            # The frame at which decoding would begin after a seek: the last key frame before `index`.
            seek_place = index - _SEEK_S * fps
            if key_frames:
                seek_place = key_frames[max(bisect_right(key_frames, index), 1) - 1]
            # If that skips less than a second, decoding on is faster than seeking.
            if seek_place > place + fps:
                container.seek(start + int(index / fps / unit), stream=stream)
                frames = container.decode(stream)
            # Decode up to the wanted frame. Its time stamp gives a frame's number after a seek.
            while place < index:
                next_frame = next(frames, None)
                if next_frame is None:
                    break
                frame = next_frame
                place += 1
                if frame.pts is not None:
                    place = round((frame.pts - start) * unit * fps)
            # At the end, frame numbers from rounded time stamps may be slightly off.
            if frame is None or place < index - fps:
                raise DataError(
                    where,
                    got=(
                        f"a video that breaks off at frame {place + 1}, before frame {index}"
                        f" ({described(source)})"
                    ),
                    expected="a whole file",
                    fix="Correct or leave out the row.",
                )
            yield _upright(frame)


def _upright(frame: Any) -> np.ndarray:
    """The pixels of a frame, rotated as the file says, [H, W, 3] uint8."""
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.rot90(frame.to_ndarray(format="rgb24"), turns)


@contextmanager
def _decoding(source: Path | io.BytesIO, where: str) -> Iterator[tuple[Any, Any]]:
    """Context manager: container and video stream. Errors of FFmpeg become DataErrors."""
    # An optional dependency: videos as images or arrays do not need it.
    try:
        import av
    except ImportError as error:
        raise DataError(
            where,
            got="a video file, without PyAV to read it",
            expected="it",
            fix="pip install -e '.[video]', or give its frames as images.",
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
                    got=f"a file without a video stream ({described(source)})",
                    expected="a video",
                    fix="Correct or leave out the row.",
                )
            yield container, container.streams.video[0]
    except DataError:
        raise
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DataError(
            where,
            got=f"{described(source)}, which is no video that can be read ({error})",
            expected="a whole file of a format that FFmpeg knows",
            fix="Correct or leave out the row.",
        ) from error
