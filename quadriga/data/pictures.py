# SPDX-License-Identifier: Apache-2.0
"""Images of a row: from a path, the bytes of a file, or an image that is decoded already, to `PIL.Image.Image`s."""

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

from quadriga.data.tokenizing import shortened
from quadriga.errors import DataError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""What is read: formats that Pillow decodes itself, without another program. JPEG includes MPO."""
MAX_PIXELS = 50_000_000
_FORMS = 'a path, the bytes of an image file, {"bytes": ...}, {"path": ...}, {"image": ...} or a PIL image'
_TURNED = (5, 6, 7, 8)
"""Orientations of a camera that exchange height and width."""
_ANIMATED = ("GIF", "WEBP", "PNG")
"""Formats whose frames follow each other; those of others are one picture in several sizes or depths."""


class Decoded:
    """What was decoded of files, up to `max_bytes` of it, those that were asked for last: the same object again."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes, self._lock = max_bytes, 0, threading.Lock()
        self._found = OrderedDict[Any, tuple[Any, int]]()

    def get(
        self, source: Any, how: Any, decode: Callable[[], Any], size: Callable[[Any], int]
    ) -> Any:
        """What `decode()` makes of a file, or of its bytes, in the way that `how` names; its `size` is in bytes."""
        if isinstance(source, Path):
            key: Any = (source, source.stat().st_mtime_ns, source.stat().st_size, how)
        elif isinstance(source, io.BytesIO):
            key = (hashlib.sha256(source.getbuffer()).digest(), how)
        else:
            return decode()
        with self._lock:
            value, num_bytes = self._found.pop(key, (None, 0))
            self.num_bytes -= num_bytes
        value = decode() if value is None else value
        with self._lock:
            if key not in self._found and size(value) <= self.max_bytes:
                self._found[key] = value, size(value)
                self.num_bytes += size(value)
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._found.popitem(last=False)[1][1]
        return value


DECODED = Decoded(256 << 20)
"""Of this process."""


def require_pillow(where: str) -> None:
    """Raises a `DataError` where Pillow, which reads images, is not installed."""
    if Image is None:
        got, fix = "images, without Pillow to read them", "pip install -e '.[vision]'."
        raise DataError(where, got=got, expected="it", fix=fix)


def as_list(value: Any) -> list[Any]:
    """The images or videos of a row: nothing, one, or a list of them, without those that are null."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return [one for one in (value if is_list else [value]) if one is not None]


def read_picture(value: Any, *, folder: Path, where: str) -> Any:
    """An image in RGB, upright by its EXIF orientation, on white where it is transparent.
    `value`: a path or a `file://` URL, relative ones to `folder` or else to the working directory; bytes of an image
    file; a dictionary with `bytes`, `path`, or any of these as `image`; a `PIL.Image.Image`.
    `folder`: of the data file.
    `where`: the row and the number of the image, for errors.
    Raises DataError: it is none of these, is not there, is no image, is of a format that is not read, or has more than
    `MAX_PIXELS`."""
    source = source_of(value, folder, where, "image", _FORMS)

    def decode() -> Any:
        with _opened(source, where) as picture:
            upright = ImageOps.exif_transpose(picture)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                ground = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(ground, upright)
            return upright.convert("RGB")

    return DECODED.get(source, "RGB", decode, lambda picture: 3 * picture.width * picture.height)


def picture_size(value: Any, *, folder: Path, where: str) -> tuple[int, int]:
    """Height and width in pixels, from the header of the file; arguments and errors as for `read_picture`."""
    with _opened(source_of(value, folder, where, "image", _FORMS), where) as picture:
        width, height = picture.size
        is_turned = picture.getexif().get(ExifTags.Base.Orientation) in _TURNED
    return (width, height) if is_turned else (height, width)


@contextmanager
def _opened(source: Any, where: str) -> Iterator[Any]:
    try:
        if not isinstance(source, Path | io.BytesIO):
            yield source
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            Image.init()
            with Image.open(
                source, formats=[name for name in _FORMATS if name in Image.OPEN]
            ) as picture:
                if picture.width * picture.height > MAX_PIXELS:
                    raise Image.DecompressionBombError(f"{picture.width} x {picture.height} pixels")
                if getattr(picture, "n_frames", 1) > 1 and picture.format in _ANIMATED:
                    got = f"an image of {picture.n_frames} frames ({picture.format})"
                    fix = "Save the frame that is meant, or give it as a video: <video> and data.video_key."
                    raise DataError(where, got=got, expected="an image of one frame", fix=fix)
                yield picture
    except DataError:
        raise
    except Exception as error:  # decoders raise what they like about a damaged file
        reason = (str(error) or type(error).__name__).strip().partition("\n")[0]
        if isinstance(error, Image.DecompressionBombError):
            got, limit = f"an image that is too large ({reason})", f"at most {MAX_PIXELS} pixels"
            raise DataError(where, got=got, expected=limit, fix="Make it smaller.") from error
        if isinstance(error, UnidentifiedImageError) and (name := _format_of(source)):
            fix = "Save it as one of these."
            raise DataError(
                where, got=f"an image in {name}", expected=", ".join(_FORMATS), fix=fix
            ) from error
        described = (
            f"{source.getbuffer().nbytes} bytes" if isinstance(source, io.BytesIO) else str(source)
        )
        got, fix = (
            f"{described}, which is no image that can be read ({reason})",
            "Correct or leave out the row.",
        )
        raise DataError(
            where, got=got, expected="a whole image file of a format that Pillow knows", fix=fix
        ) from error


def _format_of(source: Path | io.BytesIO) -> str:
    """The format that the first bytes of a file stand for in Pillow, which reads no further; empty if it knows none."""
    if isinstance(source, io.BytesIO):
        first_bytes = bytes(source.getbuffer()[:16])
    else:
        with source.open("rb") as file:
            first_bytes = file.read(16)
    for name, (_, accepts) in Image.OPEN.items():
        with suppress(IndexError, struct.error):
            if accepts is not None and accepts(first_bytes):
                return name
    return ""


def source_of(value: Any, folder: Path, where: str, what: str, expected: str) -> Any:
    """An image as it is, or the file or the bytes that an image or a video is to be read from.
    `value`, `folder`, `where`: as for `read_picture`.
    `what`: image, or video.
    `expected`: the forms that it may have."""
    if isinstance(value, Mapping):
        given = {name: one for name, one in value.items() if one is not None}
        if sizes := [name for name in given if "pixels" in name or "resized" in name]:
            fix = f"Set data.mm_processor_kwargs.min_pixels and max_pixels, for all {what}s."
            raise DataError(
                where,
                got=f"{', '.join(sizes)} beside the {what}",
                expected="no size of its own",
                fix=fix,
            )
        value = next(
            (given[name] for name in ("bytes", "path", what, "url") if name in given),
            dict.fromkeys(value),
        )
    if what == "image" and isinstance(value, Image.Image):
        return value
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str | Path):
        fix = f"Correct the row, or set data.{what}_key to the column that holds the {what}s."
        raise DataError(where, got=f"the {what} {shortened(value)}", expected=expected, fix=fix)
    text = str(value)
    plain = text.removeprefix("file://")
    if "://" in plain or plain.startswith("data:"):
        fix = f"Fetch the {what}s first: a run reads no {what} from elsewhere."
        raise DataError(
            where,
            got=f"the URL {shortened(text)}",
            expected="a path, or the bytes of the file",
            fix=fix,
        )
    path = Path(plain).expanduser()
    if not path.is_absolute() and ".." in path.parts:
        got, fix = (
            f"the {what} {shortened(text)}, which leads out of its folder",
            "Write the path from the root.",
        )
        raise DataError(
            where,
            got=got,
            expected="a path below the data file's folder, or an absolute one",
            fix=fix,
        )
    candidates = [path] if path.is_absolute() else [folder / path, path]
    if found := next((one for one in candidates if one.is_file()), None):
        return found
    got = f"the {what} {shortened(text)}, which is not there"
    fix = "Correct the path; one that is not absolute starts at the data file's folder, or else the working one."
    raise DataError(
        where,
        got=got,
        expected=f"a file, here: {' or '.join(str(one) for one in candidates)}",
        fix=fix,
    )
