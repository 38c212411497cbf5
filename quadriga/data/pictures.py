# SPDX-License-Identifier: Apache-2.0
"""Reads the images of a row, given as paths, bytes of files or decoded images, with Pillow."""

import hashlib
import io
import struct
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
except ImportError:  # `require_pillow` reports it, where images are used
    Image = None

from quadriga.data.tokenizing import shortened, without_nulls
from quadriga.errors import DataError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Formats that Pillow decodes itself, without another program. JPEG includes MPO."""
MAX_PIXELS = 50_000_000
"""Most pixels of an image: a small file may unpack to more than the memory holds."""
_FORMS = 'a path, the bytes of an image file, {"bytes": ...}, {"path": ...}, {"image": ...} or a PIL image'
_SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)
"""EXIF orientations that exchange height and width."""
_ANIMATED_FORMATS = ("GIF", "WEBP", "PNG")
"""Formats in which several frames are an animation; in other formats they may be thumbnails."""


class DecodedCache:
    """Cache of decoded files. It holds at most `max_bytes` and drops the least recently used ones.

    A hit returns the cached object itself, which callers must not change.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._lock = threading.Lock()
        # Values with their bytes, the least recently used first.
        self._values = OrderedDict[Any, tuple[Any, int]]()

    def get(
        self, source: Any, variant: Any, decode: Callable[[], Any], size: Callable[[Any], int]
    ) -> Any:
        """Return the decoded value of a file, from the cache if it is there.

        Args:
            source: a file, or its bytes. Anything else is decoded each time.
            variant: identifies what is decoded of the file, and how; part of the cache's key.
            decode: decodes the file. It never returns None.
            size: returns the number of bytes of a decoded value.

        Returns:
            The result of `decode()`, now or in an earlier call.
        """
        if isinstance(source, Path):
            # A file that has been overwritten has another time, and so another key.
            status = source.stat()
            key: Any = (source, status.st_mtime_ns, status.st_size, variant)
        elif isinstance(source, io.BytesIO):
            key = (hashlib.sha256(source.getbuffer()).digest(), variant)
        else:
            return decode()

        with self._lock:
            # Removed here and put back below, as the most recently used. None: it is not there.
            value, num_bytes = self._values.pop(key, (None, 0))
            self.num_bytes -= num_bytes
        # Not under the lock: decoding is slow, and other threads use the cache meanwhile.
        if value is None:
            value = decode()
        num_bytes = size(value)
        with self._lock:
            # Another thread may have put the same value there meanwhile.
            if key not in self._values and num_bytes <= self.max_bytes:
                self._values[key] = (value, num_bytes)
                self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                _, (_, num_freed) = self._values.popitem(last=False)
                self.num_bytes -= num_freed
        return value


DECODED = DecodedCache(256 << 20)
"""Cache of this process, 256 MiB."""


def require_pillow(where: str) -> None:
    """Raise a DataError if Pillow, which reads images, is not installed."""
    if Image is None:
        raise DataError(
            where,
            got="images, without Pillow to read them",
            expected="Pillow",
            fix="Install it: pip install -e '.[vision]'.",
        )


def as_list(value: Any) -> list[Any]:
    """List the images or videos in a column's value: null, one of them, or a list with nulls.

    Nulls are left out.
    """
    # A path and the bytes of a file are sequences too, but not lists.
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    values = value if is_list else [value]
    return [medium for medium in values if medium is not None]


def read_picture(value: Any, *, folder: Path, where: str) -> Any:
    """Read an image as RGB: turned upright by its EXIF orientation, transparent parts on white.

    Args:
        value: a path or a `file://` URL; bytes of an image file; a dictionary with `bytes`, `path`,
            or any of these as `image`; a `PIL.Image.Image`.
        folder: folder of the data file. Relative paths start there, or else in the working
            directory.
        where: the row and the number of the image, for errors.

    Returns:
        A `PIL.Image.Image`.

    Raises:
        DataError: the value has none of these forms, the file does not exist, or it is no image of
            a known format with at most `MAX_PIXELS`.
    """
    source = find_source(value, folder, where, "image", _FORMS)

    def decode() -> Any:
        # Pillow decodes only now. The context turns errors of damaged files into errors that name
        # the row.
        with _open_picture(source, where) as picture:
            upright = ImageOps.exif_transpose(picture)
            if upright.has_transparency_data:
                # `convert("RGB")` only drops the alpha channel, and transparent pixels may have any color.
                upright = upright.convert("RGBA")
                background = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(background, upright)
            return upright.convert("RGB")

    return DECODED.get(source, "RGB", decode, lambda picture: 3 * picture.width * picture.height)


def picture_size(value: Any, *, folder: Path, where: str) -> tuple[int, int]:
    """Height and width of an image in pixels. Only the header of the file is read.

    Args:
        value: the image, as for `read_picture`.
        folder: folder of the data file.
        where: the row and the number of the image, for errors.

    Returns:
        Height and width of the upright image.

    Raises:
        DataError: as for `read_picture`.
    """
    with _open_picture(find_source(value, folder, where, "image", _FORMS), where) as picture:
        width, height = picture.size
        # The header has the size of the stored pixels, before the image is turned upright.
        orientation = picture.getexif().get(ExifTags.Base.Orientation)
    return (width, height) if orientation in _SIDEWAYS_ORIENTATIONS else (height, width)


@contextmanager
def _open_picture(source: Any, where: str) -> Iterator[Any]:
    """Context manager: open an image and yield it; a `PIL.Image.Image` is yielded as it is.

    Args:
        source: a file, the bytes of one, or an image, from `find_source`.
        where: the row and the number of the image, for errors.

    Raises:
        DataError: the image cannot be opened, or any error is raised inside the context, where
            pixels are decoded.
    """
    try:
        if not isinstance(source, Path | io.BytesIO):
            yield source
            return
        with warnings.catch_warnings():
            # `_check_picture` raises for images that are too large.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # Registers all formats: without this call Pillow knows only a few common ones.
            Image.init()
            formats = [name for name in _FORMATS if name in Image.OPEN]
            with Image.open(source, formats=formats) as picture:
                _check_picture(picture, where)
                yield picture
    except DataError:
        raise
    except Exception as error:  # decoders raise what they like about a damaged file
        raise _unreadable_error(error, source, where) from error


def _check_picture(picture: Any, where: str) -> None:
    """Raise an error if an image is too large or animated. Only its header is read.

    Raises:
        DecompressionBombError: the image is too large; `_open_picture` turns it into a DataError.
        DataError: the image is animated.
    """
    if picture.width * picture.height > MAX_PIXELS:
        raise Image.DecompressionBombError(f"{picture.width} x {picture.height} pixels")
    num_frames = getattr(picture, "n_frames", 1)
    if num_frames > 1 and picture.format in _ANIMATED_FORMATS:
        raise DataError(
            where,
            got=f"an image of {num_frames} frames ({picture.format})",
            expected="an image of one frame",
            fix="Save one frame, or give it as a video: <video> and data.video_key.",
        )


def _unreadable_error(error: Exception, source: Any, where: str) -> DataError:
    """Make a DataError of an error that Pillow raised about an image."""
    # Some of Pillow's errors have no text, some have several lines.
    reason = (str(error) or type(error).__name__).strip().partition("\n")[0]
    if isinstance(error, Image.DecompressionBombError):
        return DataError(
            where,
            got=f"an image that is too large ({reason})",
            expected=f"at most {MAX_PIXELS} pixels",
            fix="Make it smaller.",
        )
    if isinstance(error, UnidentifiedImageError):
        # The format may be one that Pillow recognizes, but that is not among `_FORMATS`.
        name = _format_of(source)
        if name:
            return DataError(
                where,
                got=f"an image in {name}",
                expected=", ".join(_FORMATS),
                fix="Save it as one of these.",
            )
    return DataError(
        where,
        got=f"{describe_source(source)}, which is no image that can be read ({reason})",
        expected="a whole image file of a format that Pillow knows",
        fix="Correct or leave out the row.",
    )


def describe_source(source: Any) -> str:
    """Describe an image or video in an error: by its path, or by the number of its bytes."""
    if isinstance(source, io.BytesIO):
        return f"{source.getbuffer().nbytes} bytes"
    return str(source)


def _format_of(source: Path | io.BytesIO) -> str:
    """Name of the format that Pillow recognizes by the first bytes of a file; empty if none."""
    if isinstance(source, io.BytesIO):
        first_bytes = bytes(source.getbuffer()[:16])
    else:
        with source.open("rb") as file:
            first_bytes = file.read(16)
    # For each format, Pillow has a function that reads images, and one that recognizes their first
    # bytes or is None.
    for name, (_, accepts) in Image.OPEN.items():
        # Some of the functions that recognize a format raise an error for a very short file.
        with suppress(IndexError, struct.error):
            if accepts is not None and accepts(first_bytes):
                return name
    return ""


def find_source(value: Any, folder: Path, where: str, kind: str, expected: str) -> Any:
    """Find the file or the bytes that an image or a video is to be read from.

    Args:
        value: the image or video, in one of the forms of `expected`.
        folder: folder of the data file.
        where: the row and the number of the image or video, for errors.
        kind: "image" or "video".
        expected: description of the forms that the value may have, for errors.

    Returns:
        The path of an existing file, an `io.BytesIO`, or a `PIL.Image.Image` as it is.

    Raises:
        DataError: the value has another form, or the file does not exist.
    """
    if isinstance(value, Mapping):
        value = _medium_in_fields(value, where, kind)
    if kind == "image" and isinstance(value, Image.Image):
        return value
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str | Path):
        raise DataError(
            where,
            got=f"the {kind} {shortened(value)}",
            expected=expected,
            fix=f"Correct the row, or set data.{kind}_key to the column that holds the {kind}s.",
        )
    return _find_file(str(value), folder, where, kind)


def _medium_in_fields(fields: Mapping[str, Any], where: str, kind: str) -> Any:
    """Find the image or video in a dictionary with `bytes`, `path`, `image`, `video` or `url`.

    Returns:
        The image or video. If the dictionary has none of these keys, a dictionary of its keys
        without their values, which the caller refuses with an error that shows the keys.
    """
    values = without_nulls(fields)
    # Keys such as `min_pixels` and `resized_height`, by which other libraries set the size of an
    # image.
    size_keys = [name for name in values if "pixels" in name or "resized" in name]
    if size_keys:
        raise DataError(
            where,
            got=f"{', '.join(size_keys)} beside the {kind}",
            expected=f"no key that sets the size of a single {kind}",
            fix=f"Set data.mm_processor_kwargs.min_pixels and max_pixels instead, for all {kind}s.",
        )
    # Bytes first: data sets of Hugging Face also have a `path`, where the file was on another
    # machine.
    for name in ("bytes", "path", kind, "url"):
        if name in values:
            return values[name]
    return dict.fromkeys(fields)


def _find_file(text: str, folder: Path, where: str, kind: str) -> Path:
    """Find the local file of a path or `file://` URL. Raise a DataError if there is none.

    A relative path starts at the folder of the data file, or else in the working directory.
    """
    plain = text.removeprefix("file://")
    if "://" in plain or plain.startswith("data:"):
        raise DataError(
            where,
            got=f"the URL {shortened(text)}",
            expected="a path, or the bytes of the file",
            fix=f"Download the {kind}s first: a run reads local files only.",
        )
    path = Path(plain).expanduser()
    if not path.is_absolute() and ".." in path.parts:
        raise DataError(
            where,
            got=f"the {kind} {shortened(text)}, which leads out of its folder",
            expected="a path below the data file's folder, or an absolute one",
            fix="Write the path from the root.",
        )
    # The data file's folder first: a data set keeps working when it is moved with its images.
    candidates = [path] if path.is_absolute() else [folder / path, path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise DataError(
        where,
        got=f"the {kind} {shortened(text)}, which is not there",
        expected=f"a file, here: {' or '.join(map(str, candidates))}",
        fix="Correct the path. A relative path starts at the data file's or the working directory.",
    )
