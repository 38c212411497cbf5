# SPDX-License-Identifier: Apache-2.0
"""Images of a rollout's data row, as addresses that a page shows without asking anyone."""

import base64
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.errors import DataError
from quadriga.view.runs import ViewedRun

MAX_BYTES = 4_000_000
"""Largest image file that is shown."""
_ROW = re.compile(r"(.+\.parquet) row (\d+)")
_FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""Image types of browsers by the first bytes of a file."""


def row_images(run: ViewedRun, step: int, kind: str, place: int) -> dict[str, Any]:
    """Images of the data row of a rollout.

    Args:
        run: the run.
        step: the step.
        kind: `STEP` or `VALIDATION`.
        place: place of the row in its file.

    Returns:
        `images`, addresses with the image in them; `note` says why there are none, or fewer.

    Raises:
        DataError: the step is not recorded, or its file is damaged.
    """
    sources = run.record.read(step, kind, ["source_row"]).rows["source_row"].to_pylist()
    source = sources[place] if 0 <= place < len(sources) else None
    match = _ROW.fullmatch(source or "")
    if match is None:
        return {"images": [], "note": f"No Parquet file with the images is known ({source})."}
    path = Path(match[1])
    key = str(run.configuration()[0].get("data.image_key") or "images")
    try:
        entries = pq.read_table(path, columns=[key])[key][int(match[2])].as_py()
    except (OSError, pa.ArrowException, KeyError, IndexError) as error:
        raise DataError(str(path), got=f"no images of row {match[2]} ({error})") from error
    images = []
    entries = entries if isinstance(entries, list) else [entries]
    for entry in entries:
        address = _address(entry, path.parent)
        if address:
            images.append(address)
    num_left_out = len(entries) - len(images)
    note = f"{num_left_out} images are not shown: their files are elsewhere or too large."
    return {"images": images, "note": note if num_left_out else ""}


def _address(entry: Any, folder: Path) -> str:
    """Address that holds an image; "" if it is no image file that a browser shows."""
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
    for begin, name in _FORMATS.items():
        if content.startswith(begin):
            return f"data:image/{name};base64,{base64.b64encode(content).decode()}"
    return ""
