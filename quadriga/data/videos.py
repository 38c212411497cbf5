# SPDX-License-Identifier: Apache-2.0
"""Videos of a row: from a file, a list of images or an array to the frames that a vision-language model is shown.

    a video ──> how many frames, how fast, how large ──rules of the model──> which frames, in which size ──> clip

The rules are those of the model's video processor in transformers, computed without torchvision. What a file holds
beyond the frames that are wanted is never kept.

Legend: T frames, H and W their sides in pixels, S patches of all of them, X values of a patch.
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

from quadriga.data.pictures import DECODED, picture_size, read_picture, source_of
from quadriga.data.tokenizing import shortened
from quadriga.errors import DataError

FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
_FPS, _LEAST, _MOST = 2.0, 4, 768
"""Frames for each second, and of a video, where neither the model's files nor the configuration say."""
APART = ("qwen3_vl", "qwen3_vl_moe", "glm4v")
"""Models whose frames stand apart, beside their times."""
_MAX_RATIO = 200
_SEEK_S = 10.0
_FORMS = "a path, the bytes of a video file, a list of images, an array [T, H, W, 3], or one of these as `video`"


@dataclass(frozen=True)
class Video:
    """A video whose frames are not read yet; its sides are in pixels."""

    num_frames: int  # T
    fps: float | None  # frames for each second; None: not known, they are taken as they are
    height: int
    width: int
    read: Callable[
        [Sequence[int]], Iterator[np.ndarray]
    ]  # frames [H, W, 3] uint8 with these numbers, which rise
    source: Path | io.BytesIO | None = None  # the file, or its bytes; None: it came as frames
    seconds: float | None = None  # that a file lasts; None: as `fps` says


@dataclass(frozen=True)
class Clip:
    """What a model is shown of a video."""

    indices: tuple[int, ...]  # numbers of the T frames in the video
    fps: float  # frames for each second of the video
    num_frames: int  # of the video
    size: tuple[int, int]  # height and width in pixels, as resized
    frames: torch.Tensor | None = (
        None  # [T, 3, H, W] uint8, resized; None where they are only counted
    )

    @classmethod
    def of(cls, frames: torch.Tensor, told: Mapping[str, Any]) -> "Clip":
        """The clip of these frames and of its `metadata()`."""
        height, width = frames.shape[-2:]
        return cls(
            tuple(told["frames_indices"]),
            told["fps"],
            told["total_num_frames"],
            (height, width),
            frames,
        )

    def metadata(self) -> dict[str, Any]:
        """As transformers and vLLM name it."""
        facts = {
            "total_num_frames": self.num_frames,
            "fps": self.fps,
            "duration": self.num_frames / self.fps,
        }
        return facts | {"frames_indices": list(self.indices), "do_sample_frames": False}


@dataclass(frozen=True)
class FrameRules:
    """Which frames of a video are taken, and how they are cut into patches."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255  # of a pixel's value, before `mean` and `std` of the three colors
    are_apart: bool = (
        False  # whether each pair of frames stands in the prompt by itself, beside its time
    )
    counts_all: bool = (
        False  # whether `min_pixels` and `max_pixels` bound all frames together; else each frame
    )
    fps: float = _FPS
    min_frames: int = _LEAST
    max_frames: int = _MOST
    # Seconds of which frames are taken at `fps` each, of longer videos as many in all (GLM-4V); None: by `min_frames`
    # and `max_frames`.
    longest_s: float | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any], kind: str, options: Mapping[str, Any]) -> "FrameRules":
        """Those that `video_settings` tell of a model of this type; what `data.mm_processor_kwargs` sets replaces them.
        Raises DataError: an option that does not act in this model."""
        is_glm, size = kind == "glm4v", told.get("size") or {}
        edge = 128 * (32 if kind.startswith("qwen3_vl") else 28) ** 2
        low, high = (16 * 28**2, 60_000 * 28**2) if is_glm else (edge, 6 * edge)
        default = 0.5 if kind.startswith("qwen3_vl") else None
        rules = cls(
            patch_size=told.get("patch_size") or (16 if kind.startswith("qwen3_vl") else 14),
            temporal_patch_size=told.get("temporal_patch_size") or 2,
            merge_size=told.get("merge_size") or 2,
            min_pixels=told.get("min_pixels") or size.get("shortest_edge") or low,
            max_pixels=told.get("max_pixels") or size.get("longest_edge") or high,
            mean=tuple(
                told.get("image_mean")
                or ([default] * 3 if default else (0.48145466, 0.4578275, 0.40821073))
            ),
            std=tuple(
                told.get("image_std")
                or ([default] * 3 if default else (0.26862954, 0.26130258, 0.27577711))
            ),
            scale=told.get("rescale_factor") or 1 / 255,
            are_apart=kind in APART,
            counts_all=kind in APART,
            longest_s=(told.get("max_duration") or 300) if is_glm else None,
            fps=told.get("fps") or _FPS,
            min_frames=told.get("min_frames") or _LEAST,
            max_frames=told.get("max_frames") or _MOST,
        )
        if is_glm and (given := {"min_frames", "max_frames"} & options.keys()):
            where, got = (
                f"data.mm_processor_kwargs.{min(given)}",
                f"a value, for a model of type {kind}",
            )
            raise DataError(
                where,
                got=got,
                expected="fps, by which alone it takes frames",
                fix="Leave the key out.",
            )
        if {"min_pixels", "max_pixels"} & options.keys():
            # These keys bound an image, and so a frame.
            rules = replace(rules, counts_all=False)
        return replace(rules, **options)

    def clip(self, video: Video, *, where: str) -> Clip:
        """The frames that are taken of a video, and their size; nothing is read.
        Raises DataError: its sides differ too much."""
        fps = video.fps or self.fps
        indices = self._indices(video.num_frames, fps, video.seconds)
        size = self._size(len(indices), video.height, video.width, where)
        return Clip(indices, fps, video.num_frames, size)

    def read(self, video: Video, *, where: str) -> Clip:
        """The clip with its frames; raises DataError for a video that breaks off or is damaged."""
        clip = self.clip(video, where=where)

        def decode() -> torch.Tensor:
            return torch.cat(
                [self._resized(frame, clip.size) for frame in video.read(clip.indices)]
            )

        frames = DECODED.get(
            video.source, (clip.indices, clip.size), decode, lambda one: one.nbytes
        )
        return replace(clip, frames=frames)

    def grid(self, clip: Clip) -> tuple[int, int, int]:
        """Patches along time, height and width."""
        height, width = (side // self.patch_size for side in clip.size)
        return math.ceil(len(clip.indices) / self.temporal_patch_size), height, width

    def times(self, clip: Clip) -> list[float]:
        """Of each patch along time, the second in the middle of its frames; with `longest_s`, of the first of them."""
        size = self.temporal_patch_size
        numbers = [*clip.indices, *[clip.indices[-1]] * (-len(clip.indices) % size)]
        seconds = [number / clip.fps for number in numbers]
        last = 0 if self.longest_s else size - 1
        return [(seconds[at] + seconds[at + last]) / 2 for at in range(0, len(seconds), size)]

    def patches(self, clip: Clip) -> torch.Tensor:
        """[S, X] float32: along time, then the squares of which an embedding is made, then the patches of each."""
        assert clip.frames is not None, "the frames of a clip are read"
        time, height, width = self.grid(clip)
        size, merged, pixels = self.temporal_patch_size, self.merge_size, self.patch_size
        missing = time * size - len(clip.frames)
        frames = torch.cat((clip.frames, clip.frames[-1:].expand(missing, -1, -1, -1))).float()
        mean, std = (
            torch.tensor(values)[:, None, None] * (1.0 / self.scale)
            for values in (self.mean, self.std)
        )
        frames = (frames - mean) / std
        blocks = frames.view(
            time, size, 3, height // merged, merged, pixels, width // merged, merged, pixels
        )
        ordered = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return ordered.reshape(time * height * width, 3 * size * pixels**2)

    def _indices(self, num_frames: int, fps: float, seconds: float | None) -> tuple[int, ...]:
        if self.longest_s is not None:
            last = num_frames - 1
            seconds = seconds or round(last / fps) + 1
            if seconds <= self.longest_s:
                places = np.ceil(np.arange(max(int(seconds * self.fps), 1)) * fps / self.fps)
            elif (count := int(self.longest_s * self.fps)) >= num_frames:
                places = np.arange(num_frames)
            else:
                places = np.ceil(np.linspace(0, seconds, count) * fps)
            found = np.unique(places.clip(max=last).astype(int)).tolist()
            return tuple(found + found[-1:] * (len(found) % 2))
        if self.are_apart:
            count = min(
                max(int(num_frames / fps * self.fps), self.min_frames), self.max_frames, num_frames
            )
            return tuple(np.linspace(0, num_frames - 1, count).round().astype(int).tolist())
        size = self.temporal_patch_size
        most = min(self.max_frames, num_frames) // size * size
        wanted = min(max(num_frames / fps * self.fps, self.min_frames), most, num_frames)
        count = int(wanted // size * size)
        if not count:  # fewer frames than one patch is made of
            return tuple(range(num_frames))
        return tuple(torch.arange(0, num_frames, num_frames / count).int().tolist()[:count])

    def _size(self, num_frames: int, height: int, width: int, where: str) -> tuple[int, int]:
        factor, times, rounded = self.patch_size * self.merge_size, 1, 1
        low, high = self.min_pixels, self.max_pixels
        if self.are_apart:
            times = num_frames
            rounded = (
                max(1, round(num_frames / self.temporal_patch_size)) * self.temporal_patch_size
            )
            low, high = (low, high) if self.counts_all else (low * rounded, high * rounded)
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
        if max(height, width) > _MAX_RATIO * min(height, width):
            got, fix = f"frames of {height} by {width} pixels", "Crop or leave out the video."
            raise DataError(
                where, got=got, expected=f"sides that differ at most {_MAX_RATIO} times", fix=fix
            )
        rows, columns = (round(side / factor) * factor for side in (height, width))
        if rounded * rows * columns > high:
            by = math.sqrt(times * height * width / high)
            rows, columns = (
                max(factor, math.floor(side / by / factor) * factor) for side in (height, width)
            )
        elif rounded * rows * columns < low:
            by = math.sqrt(low / (times * height * width))
            rows, columns = (math.ceil(side * by / factor) * factor for side in (height, width))
        return rows, columns

    def _resized(self, frame: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
        """[1, 3, H, W] uint8, as torchvision resizes."""
        pixels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].contiguous()
        if pixels.shape[2:] == size:
            return pixels
        return interpolate(pixels, size=size, mode="bicubic", antialias=True, align_corners=False)


def video_settings(path: str | Path) -> dict[str, Any]:
    """Of the video processor in a model's folder or on the hub; empty: it says nothing."""
    quiet = {
        f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")
    }
    for name in FILES:
        if (found := cached_file(path, name, **quiet)) is not None:
            told = json.loads(Path(found).read_text(encoding="utf-8"))
            told = told.get("video_processor") if name == FILES[0] else told
            if told:
                return told
    return {}


def open_video(value: Any, *, folder: Path, where: str) -> Video:
    """A video of a row, its frames not read yet.
    `value`: a path or a `file://` URL; bytes of a video file; a list of images; an array [T, H, W, 3] or [T, 3, H, W]
    of uint8; or a dictionary with one of these as `video`, `frames`, `path` or `bytes`, where `fps` beside images or an
    array says how fast they were taken.
    `folder`: of the data file; relative paths start there, or else in the working directory.
    `where`: the row, the column and the number of the video, for errors.
    Raises DataError: it is none of these, is not there, is no video that can be read, or has no frame."""
    fps = None
    while isinstance(value, Mapping) and all(
        value.get(name) is None for name in ("bytes", "path", "url")
    ):
        given = {name: one for name, one in value.items() if one is not None}
        fps, names = given.pop("fps", fps), list(given)
        if names not in (["video"], ["frames"]):
            fix = "How many frames are taken, and how large, say data.mm_processor_kwargs for all videos."
            raise DataError(
                where, got=f"a video with {', '.join(names) or 'nothing'}", expected=_FORMS, fix=fix
            )
        value = given[names[0]]
    if fps is not None and not (isinstance(fps, int | float) and math.isfinite(fps) and fps > 0):
        raise DataError(
            where, got=f"fps {shortened(fps)}", expected="frames for each second, above 0"
        )
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _from_list(list(value), fps, folder, where)
    if isinstance(value, np.ndarray | torch.Tensor):
        return _from_array(np.asarray(value), fps, where)
    if fps is not None:
        fix = (
            "Leave it out; data.mm_processor_kwargs.fps says how many frames of a second are taken."
        )
        raise DataError(
            where, got="fps beside a file", expected="a file, which says it itself", fix=fix
        )
    return _from_file(source_of(value, folder, where, "video", _FORMS), where)


def _from_list(values: list[Any], fps: float | None, folder: Path, where: str) -> Video:
    if not values:
        raise DataError(
            where, got="a video without frames", expected="at least one frame", fix="Leave it out."
        )
    if isinstance(values[0], Sequence | np.ndarray) and not isinstance(values[0], str | bytes):
        try:
            return _from_array(np.asarray(values), fps, where)
        except ValueError as error:
            raise DataError(
                where, got=f"a video of uneven lists ({error})", expected=_FORMS
            ) from error
    named = [(value, f"{where}, frame {number}") for number, value in enumerate(values)]
    sizes = {picture_size(value, folder=folder, where=place) for value, place in named}
    if len(sizes) > 1:
        got = f"frames of {len(sizes)} sizes, such as {' and '.join(f'{h} by {w}' for h, w in sorted(sizes)[:2])}"
        raise DataError(where, got=got, expected="frames of one size", fix="Resize them.")

    def read(indices: Sequence[int]) -> Iterator[np.ndarray]:
        for value, place in (named[index] for index in indices):
            yield np.array(read_picture(value, folder=folder, where=place))

    [(height, width)] = sizes
    return Video(len(values), fps, height, width, read)


def _from_array(array: np.ndarray, fps: float | None, where: str) -> Video:
    if array.ndim == 4 and array.shape[-1] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
        array = array.astype(np.uint8)
    if array.ndim != 4 or array.shape[-1] != 3 or array.dtype != np.uint8 or not array.size:
        got = f"an array {list(array.shape)} of {array.dtype}"
        expected = "[T, H, W, 3] or [T, 3, H, W] of numbers from 0 to 255, with at least one frame"
        raise DataError(where, got=got, expected=expected, fix="Correct or leave out the row.")
    num_frames, height, width, _ = array.shape
    return Video(
        num_frames, fps, height, width, lambda indices: (array[index] for index in indices)
    )


def _from_file(source: Path | io.BytesIO, where: str) -> Video:
    with _decoding(source, where) as (container, stream):
        # The header may leave the number out; the packets say it without being decoded.
        count = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
    with _decoding(source, where) as (container, stream):
        if (first := next(container.decode(stream), None)) is None or not count or not fps:
            got = f"a video without frames ({_named(source)})"
            raise DataError(where, got=got, expected="at least one frame", fix="Leave it out.")
        height, width, _ = _upright(first).shape

    def read(indices: Sequence[int]) -> Iterator[np.ndarray]:
        return _frames(source, fps, indices, where)

    return Video(count, fps, height, width, read, source, count / fps)


def _frames(
    source: Path | io.BytesIO, fps: float, indices: Sequence[int], where: str
) -> Iterator[np.ndarray]:
    with _decoding(source, where) as (container, stream):
        stream.thread_type = "AUTO"
        start, unit = stream.start_time or 0, float(stream.time_base)
        entries = getattr(
            stream, "index_entries", ()
        )  # older versions of PyAV have none, and some files
        keys = [round((one.timestamp - start) * unit * fps) for one in entries if one.is_keyframe]
        frames, frame, place = container.decode(stream), None, -1
        for index in indices:
            key = keys[max(bisect_right(keys, index), 1) - 1] if keys else index - _SEEK_S * fps
            if key > place + fps:
                container.seek(start + int(index / fps / unit), stream=stream)
                frames = container.decode(stream)
            while place < index and (following := next(frames, None)) is not None:
                frame = following
                place = place + 1 if frame.pts is None else round((frame.pts - start) * unit * fps)
            if frame is None or place < index - fps:  # rounded times may be off at the end
                got = f"a video that breaks off at frame {place + 1}, before frame {index} ({_named(source)})"
                raise DataError(
                    where, got=got, expected="a whole file", fix="Correct or leave out the row."
                )
            yield _upright(frame)


def _upright(frame: Any) -> np.ndarray:
    """[H, W, 3] uint8, turned as the file says."""
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.rot90(frame.to_ndarray(format="rgb24"), turns)


@contextmanager
def _decoding(source: Path | io.BytesIO, where: str) -> Iterator[tuple[Any, Any]]:
    # A video file asks for PyAV; frames as images and arrays need none.
    try:
        import av
    except ImportError as error:
        got, fix = (
            "a video file, without PyAV to read it",
            "pip install -e '.[video]', or give its frames as images.",
        )
        raise DataError(where, got=got, expected="it", fix=fix) from error

    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with av.open(source if isinstance(source, io.BytesIO) else str(source)) as container:
            if not container.streams.video:
                got = f"a file without a video stream ({_named(source)})"
                raise DataError(
                    where, got=got, expected="a video", fix="Correct or leave out the row."
                )
            yield container, container.streams.video[0]
    except (av.error.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        got = f"{_named(source)}, which is no video that can be read ({error})"
        fix = "Correct or leave out the row."
        raise DataError(
            where, got=got, expected="a whole file of a format that FFmpeg knows", fix=fix
        ) from error


def _named(source: Path | io.BytesIO) -> str:
    return f"{source.getbuffer().nbytes} bytes" if isinstance(source, io.BytesIO) else str(source)
