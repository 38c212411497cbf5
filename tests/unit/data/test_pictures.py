# SPDX-License-Identifier: Apache-2.0
"""Every form in which an image may stand in a row, and what is no image."""

import io
from pathlib import Path

import pytest
from PIL import Image

from quadriga.data import pictures
from quadriga.data.pictures import as_list, picture_size, read_picture, require_pillow
from quadriga.errors import DataError
from tests.vision_folder import noise

original = pictures._open_picture


def as_bytes(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def read(value, folder: Path = Path("/nowhere")):
    return read_picture(value, folder=folder, where="t.parquet row 3, image 0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    noise(12, 8).save(tmp_path / "images" / "a.png")
    return tmp_path / "images" / "a.png"


def test_every_form_gives_the_same_picture(path: Path, tmp_path: Path, monkeypatch):
    content = path.read_bytes()
    forms = [
        str(path),
        f"file://{path}",
        content,
        {"bytes": content, "path": None},
        {"bytes": content, "path": "gone"},
    ]
    forms += [{"bytes": None, "path": str(path)}, "images/a.png", noise(12, 8)]
    for form in forms:
        found = read(form, tmp_path)
        assert found.mode == "RGB" and found.tobytes() == noise(12, 8).tobytes(), form
        assert picture_size(form, folder=tmp_path, where="") == (8, 12)
    monkeypatch.chdir(tmp_path)
    assert read("images/a.png").size == (12, 8), (
        "not beside the data file, so from the working directory"
    )


def test_what_was_decoded_is_kept_up_to_a_bound(path: Path, tmp_path: Path, monkeypatch):
    decoded, opened = pictures.DecodedCache(2 * 3 * 12 * 8 + 1), []
    monkeypatch.setattr(pictures, "DECODED", decoded)
    monkeypatch.setattr(
        pictures,
        "_open_picture",
        lambda source, where: opened.append(source) or original(source, where),
    )
    first = read(str(path))
    assert read("images/a.png", tmp_path) is first and len(opened) == 1
    content = path.read_bytes()
    by_bytes = read(content)
    assert by_bytes is read({"bytes": content}) is not first and len(opened) == 2
    noise(12, 8, seed=1).save(path)
    assert read(str(path)).tobytes() == noise(12, 8, seed=1).tobytes() != first.tobytes(), (
        "the file has changed"
    )
    assert (decoded.num_bytes, len(decoded._values), len(opened)) == (2 * 3 * 12 * 8, 2, 3)
    read(as_bytes(noise(100, 100)))
    assert decoded.num_bytes == 2 * 3 * 12 * 8, "more than the bound is not kept"
    assert read(content) is by_bytes, "the other one was not asked for longest"


def test_transparency_is_white_and_gray_has_three_channels():
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    clear.putpixel((0, 0), (10, 20, 30, 255))
    found = read(as_bytes(clear))
    assert found.getpixel((0, 0)) == (10, 20, 30) and found.getpixel((1, 1)) == (255, 255, 255)
    assert read(as_bytes(Image.new("L", (2, 2), 7))).getpixel((1, 0)) == (7, 7, 7)


def test_a_camera_that_was_turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = as_bytes(noise(12, 8), "JPEG", exif=exif)
    assert read(turned).size == (8, 12)
    assert picture_size(turned, folder=Path(), where="") == (12, 8)


def test_what_is_no_image(path: Path, tmp_path: Path):
    where = r"t\.parquet row 3, image 0: got "
    whole = path.read_bytes()
    text = tmp_path / "a.txt"
    text.write_text("words")
    for value, told in [
        (b"words", "5 bytes, which is no image that can be read"),
        (str(text), r".*a\.txt, which is no image that can be read"),
        (whole[: len(whole) // 2], r"\d+ bytes, which is no image that can be read"),
        (
            "gone.png",
            r"the image 'gone\.png', which is not there, expected a file, here: .*/gone\.png or gone\.png",
        ),
        (
            "https://example.org/a.png",
            "the URL 'https://example.org/a.png', expected a path, or the bytes",
        ),
        ("s3://bucket/a.png", "the URL"),
        ("data:image/png;base64,AAAA", "the URL"),
        (7, r"the image 7, expected a path, the bytes of an image file"),
        ({"uri": "x"}, r"the image \{'uri': None\}"),
        ({"bytes": None, "path": None}, "the image"),
    ]:
        with pytest.raises(DataError, match=where + told):
            read(value, tmp_path)


@pytest.mark.parametrize("limit_of_pillow", [9_000, 4_000])
def test_too_many_pixels(monkeypatch, limit_of_pillow: int):
    """Pillow warns up to twice its limit, and refuses beyond."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit_of_pillow)
    monkeypatch.setattr(pictures, "MAX_PIXELS", 9_999)
    with pytest.raises(
        DataError, match=r"image 0: got an image that is too large .*100.* at most 9999 pixels"
    ):
        read(as_bytes(Image.new("RGB", (100, 100))))
    assert read(as_bytes(Image.new("RGB", (99, 100)))).size == (99, 100)


@pytest.mark.parametrize(
    "kind", ["PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"]
)
def test_formats_that_are_read(kind: str):
    assert read(as_bytes(noise(12, 8), kind)).size == (12, 8)


@pytest.mark.parametrize("kind", ["EPS", "ICNS"])
def test_formats_that_are_not_read(kind: str, tmp_path: Path):
    """EPS would start Ghostscript, a program of its own."""
    content = as_bytes(noise(16, 16), kind)
    (tmp_path / "a.png").write_bytes(content)
    told = f"got an image in {kind}, expected PNG, JPEG,"
    for value in (content, "a.png"):
        with pytest.raises(DataError, match=told):
            read(value, tmp_path)
        with pytest.raises(DataError, match=told):
            picture_size(value, folder=tmp_path, where="")


def test_without_pillow(monkeypatch):
    monkeypatch.setattr(pictures, "Image", None)
    with pytest.raises(DataError, match=r"without Pillow.*pip install -e '\.\[vision\]'"):
        require_pillow("image processor of model")


def test_lists():
    assert (
        as_list(None) == []
        and as_list([]) == []
        and as_list("a.png") == ["a.png"]
        and as_list(b"x") == [b"x"]
    )
    assert as_list({"path": "a"}) == [{"path": "a"}] and as_list(["a", "b"]) == ["a", "b"]
