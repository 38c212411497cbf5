# SPDX-License-Identifier: Apache-2.0
"""How data code writes: beside the place it is meant for, then renamed, so that nobody ever reads half of anything."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quadriga.errors import DataError


def make_directory(path: Path, *, where: str) -> Path:
    """Create `path` and its parents; a `DataError` that names `where` if that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            where,
            got=f"{path} ({error.strerror or error})",
            expected="a directory that can be created and written",
            fix="Choose another directory or change its permissions.",
        ) from error
    return path


@contextmanager
def written_aside(target: Path, *, where: str) -> Iterator[Path]:
    """Yield a path beside `target` for a file or a folder; on success it becomes `target`, on failure it vanishes.

    Args:
        target: the final path; what stands there is replaced.
        where: the key or command that an error names.
    """
    make_directory(target.parent, where=where)
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        yield draft
        _replace(draft, target)
    except OSError as error:
        raise DataError(
            where,
            got=f"{target} ({error.strerror or error})",
            expected="a place that can be written",
            fix="Free some space, change the permissions, or choose another directory.",
        ) from error
    finally:
        _remove(draft)


def write_json(target: Path, value: Mapping[str, Any], *, where: str) -> None:
    """Write `value` to `target` as indented JSON, all of it or nothing."""
    with written_aside(target, where=where) as draft:
        draft.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="utf-8")


def _replace(draft: Path, target: Path) -> None:
    """Rename `draft` to `target`; a folder in the way is moved aside first, because a rename cannot replace it."""
    if draft.is_dir() and target.is_dir():
        old = draft.with_suffix(".old")
        os.rename(target, old)
        os.rename(draft, target)
        shutil.rmtree(old)
    else:
        os.replace(draft, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
