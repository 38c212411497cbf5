# SPDX-License-Identifier: Apache-2.0
"""From what the user names (a path, a list, a glob, a URL) to rows; and files that are written whole or not at all.

Anything that fsspec opens may be named (`s3://`, `gs://`, `hf://`, `https://`, ...). A remote file is copied once into
the cache, under a key made of its URL, its size and whatever its store says about its version.

Files stay apart after they are read: they may differ in their columns and in the shape of nested ones. JSON is read by
Python's own parser: a library that infers column types would change values (`"1"` and `2` in one column become numbers)
and could not name the line of an error.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from quadriga.errors import DataError

_PARQUET, _JSON = (".parquet", ".pq"), (".json", ".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_PARQUET, *_JSON)
FileNames: TypeAlias = str | Path | Sequence[str | Path]
"""A path, a glob, a URL that fsspec understands, or a list of these."""
_VERSION_FIELDS = ("etag", "mtime", "lastmodified", "last_modified", "last-modified", "updated", "created", "md5hash")


class RowTable:
    """The rows of one file `path`, and the names of their `columns`, those of any row."""

    def __init__(self, path: Path, columns: Iterable[str], rows: pa.Table | list[dict[str, Any]]) -> None:
        self.path, self.columns, self._rows = path, tuple(columns), rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Row `row` with every column; None where it has no value."""
        if isinstance(self._rows, pa.Table):
            return self._rows.slice(row, 1).to_pylist()[0]
        return {column: self._rows[row].get(column) for column in self.columns}

    def column_batches(self, column: str, size: int) -> Iterator[list[Any]]:
        """The values of one column, `size` rows at a time."""
        for start in range(0, len(self), size):
            if isinstance(self._rows, pa.Table):
                yield self._rows.column(column).slice(start, size).to_pylist()
            else:
                yield [row.get(column) for row in self._rows[start : start + size]]

    def to_arrow(self) -> pa.Table:
        """All rows, as a Parquet file holds them; `pyarrow.ArrowException` if a column has values of several types."""
        return self._rows if isinstance(self._rows, pa.Table) else pa.Table.from_pylist(list(self))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file's content."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def read_table(path: Path) -> RowTable:
    """Read a parquet, json or jsonl file, by its suffix; a DataError names file and line of what is wrong."""
    suffix = path.suffix.lower()
    if suffix in _PARQUET:
        try:
            # One file is read as one file: a folder name such as `split=train` above it adds no column.
            parquet = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as error:
            reason, size = str(error).strip().partition("\n")[0], path.stat().st_size
            got = f"{size} bytes that are no whole parquet file ({reason})" if size else "an empty file"
            fix = "Write or download it again."
            raise DataError(str(path), got=got, expected="a parquet file", fix=fix) from error
        table = RowTable(path, parquet.column_names, parquet)
    elif suffix in _JSON:
        rows = _read_json(path, is_lines=suffix != ".json")
        table = RowTable(path, dict.fromkeys(key for row in rows for key in row), rows)
    else:
        raise DataError(str(path), got=f"a {suffix or 'missing'} suffix", expected=".parquet, .json or .jsonl")
    if len(table) == 0:
        raise DataError(str(path), got="no rows", expected="at least one", fix="Write the file again or leave it out.")
    return table


def _read_json(path: Path, *, is_lines: bool) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(str(path), got=f"bytes that are not UTF-8 ({error})", expected="text in UTF-8") from error
    if is_lines or not text.lstrip().startswith("["):
        # Not splitlines(): a JSON string may hold the separators U+2028 and U+0085 as they are.
        lines = ((f"{path} line {number}", line) for number, line in enumerate(text.split("\n"), start=1))
        found = [(where, _parse(line, where)) for where, line in lines if line.strip()]
    else:
        found = [(f"{path} row {number}", row) for number, row in enumerate(_parse(text, str(path)))]
    for where, row in found:
        if not isinstance(row, dict):
            expected = "an object with a value for each column"
            raise DataError(where, got=f"a JSON {type(row).__name__}", expected=expected)
    return [row for _, row in found]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(where, got=f"text that is no JSON ({error})", expected="one JSON object per line") from error


def resolve_files(names: FileNames, cache_dir: str | Path, *, where: str) -> list[Path]:
    """The local files behind `names`, in the order given; those of a glob in alphabetical order.

    Args:
        cache_dir: remote files are copied to `files/` inside it.
        where: the key that an error names.

    Raises:
        DataError: nothing is named, a file does not exist, a glob matches nothing, or a store cannot be read.
    """
    listed = [names] if isinstance(names, str | Path) else list(names)
    if not listed or not all(str(name) for name in listed):
        raise DataError(where, got="no file", expected="a path, a glob, a URL or a list of these")
    cache = Path(cache_dir).expanduser() / "files"
    return [file for name in listed for file in _resolve(str(name), cache, where)]


def _resolve(name: str, cache: Path, where: str) -> list[Path]:
    is_url = "://" in name
    # The question mark of a web address starts its query.
    is_pattern = any(sign in name for sign in ("*[" if is_url else "*[?")) and not Path(name).exists()
    try:
        filesystem, root = url_to_fs(name if is_url else str(Path(name).expanduser()))
        found = sorted(filesystem.glob(root)) if is_pattern else [root]
        if not found:
            raise DataError(where, got=f"{name!r}, which matches no file", expected="at least one file")
        if not isinstance(filesystem, LocalFileSystem):
            return [_copy(filesystem, path, cache) for path in found]
    except DataError:
        raise
    except Exception as error:
        # Each store has exceptions of its own; whatever it says, the user needs to know which file it is about.
        got = f"{name!r}: {type(error).__name__}: {error}"
        fix = "Check the address, the credentials, and that the package for this kind of store is installed."
        raise DataError(where, got=got, expected="a file that fsspec can open", fix=fix) from error
    for path in map(Path, found):
        if path.is_dir():
            fix = f"Name its files, as in {path}/*.parquet."
            raise DataError(where, got=f"{path}, a folder", expected="files", fix=fix)
        if not path.is_file():
            raise DataError(where, got=f"{path}, which does not exist", expected="a file", fix="Check the path.")
    return [Path(path) for path in found]


def _copy(filesystem: fsspec.AbstractFileSystem, path: str, cache: Path) -> Path:
    info = filesystem.info(path)
    url = filesystem.unstrip_protocol(path)
    version = sorted((key, str(value)) for key, value in info.items() if key.lower() in _VERSION_FIELDS)
    key = hashlib.sha256(repr((url, info.get("size"), version)).encode()).hexdigest()[:20]
    target = cache / f"{key}-{PurePosixPath(urlsplit(url).path).name}"
    if not target.is_file():
        with written_aside(target, where="data.cache_dir") as draft:
            filesystem.get_file(path, str(draft))
    return target


def make_directory(path: Path, *, where: str) -> Path:
    """Create `path` and its parents; a `DataError` that names `where` if that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got, fix = f"{path} ({error.strerror or error})", "Choose another directory or change its permissions."
        raise DataError(where, got=got, expected="a directory that can be created and written", fix=fix) from error
    return path


@contextmanager
def written_aside(target: Path, *, where: str) -> Iterator[Path]:
    """Yield a path next to `target` for a file or a folder; on success it replaces `target`, on failure it is removed.

    A DataError about the disk names `where`.
    """
    make_directory(target.parent, where=where)
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        yield draft
        for file in draft.glob("*.safetensors"):
            # That library makes files that only their owner can read.
            file.chmod(draft.stat().st_mode & 0o666)
        if draft.is_dir() and target.is_dir():
            # A rename cannot replace a folder: the old one is moved aside first.
            old = draft.with_suffix(".old")
            os.rename(target, old)
            os.rename(draft, target)
            shutil.rmtree(old)
        else:
            os.replace(draft, target)
    except OSError as error:
        got = f"{target} ({error.strerror or error})"
        fix = "Free some space, change the permissions, or choose another directory."
        raise DataError(where, got=got, expected="a place that can be written", fix=fix) from error
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)
