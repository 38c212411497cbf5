# SPDX-License-Identifier: Apache-2.0
"""Images in the data row of a rollout, as data URLs, which a page shows without a request."""

import base64
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.errors import DataError
from quadriga.view.runs import Answer, ViewedRun

MAX_BYTES = 4_000_000
"""Largest image file that is shown."""
_ROW = re.compile(r"(.+\.parquet) row (\d+)")
"""Form of the column `source_row`: path of the data file and number of the row."""
_FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""Image types that browsers show, by the first bytes of a file."""


def row_images(run: ViewedRun, step: int, kind: str, place: int) -> Answer:
    """Images in the data row of a rollout.

    Args:
        run: the run.
        step: the step.
        kind: `STEP` or `VALIDATION`.
        place: number of the rollout in the file of the step.

    Returns:
        `images`, a list of data URLs; `note`, a sentence on images that are missing, or "".

    Raises:
        DataError: the step is not recorded, or its file or the data file cannot be read.
    """
    sources = run.record.read(step, kind, ["source_row"]).rows["source_row"].to_pylist()
    source = sources[place] if 0 <= place < len(sources) else None
    match = _ROW.fullmatch(source or "")
    if match is None:
        return {"images": [], "note": f"No Parquet file with the images is known ({source})."}
    path = Path(match[1])
    values, _ = run.configuration()
    key = str(values.get("data.image_key") or "images")
    try:
        entries = pq.read_table(path, columns=[key])[key][int(match[2])].as_py()
    except (OSError, pa.ArrowException, KeyError, IndexError) as error:
        raise DataError(str(path), got=f"no images of row {match[2]} ({error})") from error
    # A row with one image may have it without a list.
    entries = entries if isinstance(entries, list) else [entries]
    urls = [_data_url(entry, path.parent) for entry in entries]
    images = [url for url in urls if url]
    num_left_out = len(urls) - len(images)
    note = f"{num_left_out} images are not shown: their files are elsewhere or too large."
    return {"images": images, "note": note if num_left_out else ""}


def _data_url(entry: Any, folder: Path) -> str:
    """Data URL of an image; "" if it is too large, or no image file that browsers show.

    Args:
        entry: bytes of a file, its path, or a dictionary with `bytes` or `path`.
        folder: folder that relative paths start from.
    """
    content = entry
    if isinstance(entry, dict):
        content = entry.get("bytes") or entry.get("path")
    if isinstance(content, str):
        path = folder / content
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return ""
        content = path.read_bytes()
    if not isinstance(content, bytes) or len(content) > MAX_BYTES:
        return ""
    # A row may name any file, and only images must reach the page.
    for begin, name in _FORMATS.items():
        if content.startswith(begin):
            return f"data:image/{name};base64,{base64.b64encode(content).decode()}"
    return ""
