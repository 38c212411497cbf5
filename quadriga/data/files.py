# SPDX-License-Identifier: Apache-2.0
"""From what the user names (a path, a list, a glob, a URL) to rows; and files that are written whole or not at all.

Anything that fsspec opens may be named (`s3://`, `gs://`, `hf://`, `https://`, ...). A remote file is copied once into
the cache, under a key made of its URL, its size and whatever its store says about its version.

Files stay apart after they are read: they may differ in their columns and in the shape of nested ones. Rows are Arrow:
those of a large file are written once into the cache, a few at a time, under a key made of the file's content, and
mapped into memory from there. JSON is read by Python's own parser, and its rows are kept as text: a library that infers
column types would change values (`"1"` and `2` in one column become numbers) and could not name the line of an error.
"""

import codecs
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from glob import has_magic
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, SupportsIndex, TypeAlias
from urllib.parse import urlsplit

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FileSystem

from quadriga.errors import DataError
from quadriga.http_client import ServerLostError, document
from quadriga.observe.watchdog import waiting

_PARQUET, _JSON = (".parquet", ".pq"), (".json", ".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_PARQUET, *_JSON)
SILENCE_S = 60.0
"""Seconds without a byte after which a web server counts as lost."""
MAPPED_BYTES = 64 << 20
"""From this size on the rows of a file are not held in memory."""
_ROWS, _BATCH_BYTES = 4096, 64 << 20
"""A batch of rows on its way into the cache has at most so many, or about so many bytes."""
_TEXTS = pa.schema([("json", pa.string())])
FileNames: TypeAlias = str | Path | Sequence[str | Path]
"""A path, a glob, a URL that fsspec understands, or a list of these."""
_VERSION_FIELDS = (
    "etag",
    "mtime",
    "lastmodified",
    "last_modified",
    "last-modified",
    "updated",
    "created",
    "md5hash",
)


class RowTable:
    """The rows of one file `path`, and the names of their `columns`, those of any row.

    `rows` are an Arrow table: of these columns, or with `json_columns` of one column, the JSON text of each row. The
    first of them is row `first` of the file. `entry` is the folder in the cache that they are mapped from.
    `is_whole_file`: they are what `read_table` makes of the file. Pickled, such a table is the path and the entry, and
    another process opens them again; other tables are pickled with their rows. Rows of an Arrow table lose the null
    fields of `chat_columns` (`drop_null_fields`)."""

    def __init__(
        self,
        path: Path,
        rows: pa.Table,
        json_columns: Sequence[str] | None = None,
        digest: str | None = None,
        first: int = 0,
        chat_columns: Sequence[str] = (),
        *,
        entry: Path | None = None,
        is_whole_file: bool = False,
    ) -> None:
        self.path, self._rows, self._is_json = path, rows, json_columns is not None
        self.columns = tuple(rows.column_names if json_columns is None else json_columns)
        self.schema = rows.schema if json_columns is None else None  # JSON has none
        self._digest, self.first = digest, first
        self._chat_columns = chat_columns
        self._entry = entry
        self._is_whole_file = is_whole_file

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if not self._is_whole_file:
            return super().__reduce_ex__(protocol)
        return reopen_table, (self.path, self._entry, self.digest, self._chat_columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Row `row` with every column; None where it has no value."""
        [[found]] = self.batches(self.columns, 1, range(row, row + 1))
        return found

    def batches(
        self, columns: Sequence[str], size: int, rows: range | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        """These columns of all rows, or of those in `rows`, `size` rows at a time."""
        rows = range(len(self)) if rows is None else rows
        table = self._rows if self._is_json else self._rows.select(columns)
        for start in range(rows.start, rows.stop, size):
            values = table.slice(start, min(size, rows.stop - start))
            if not self._is_json:
                arrow_rows = values.to_pylist()
                for row in arrow_rows:
                    drop_null_fields(row, self._chat_columns)
                yield arrow_rows
                continue
            read = map(json.loads, values.column(0).to_pylist())
            yield [{column: row.get(column) for column in columns} for row in read]

    def to_arrow(self) -> pa.Table:
        """All rows, as a Parquet file holds them; `pyarrow.ArrowException` if a column has values of several types."""
        rows = self.batches(self.columns, len(self))
        return pa.Table.from_pylist(next(rows)) if self._is_json else self._rows

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file's content."""
        return self._digest or _digest(self.path)


def drop_null_fields(row: dict[str, Any], columns: Iterable[str]) -> None:
    """Remove the null fields of chats and tool schemas from a row of an Arrow table, in place.

    Arrow gives each struct in a column the fields of all the others, with null as their value. A chat template would
    write them into the prompt.

    Args:
        row: values by column.
        columns: the columns to clean; `extra_info.messages` is one field of a struct. Others keep their nulls.
    """
    for name in columns:
        *path, field_name = [name] if name in row else name.split(".")
        struct: Any = row
        for part in path:
            struct = struct.get(part) if isinstance(struct, dict) else None
        if isinstance(struct, dict) and field_name in struct:
            struct[field_name] = _without_null_fields(struct[field_name])


def _without_null_fields(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_null_fields(field) for key, field in value.items() if field is not None
        }
    if isinstance(value, list | np.ndarray):  # pandas has arrays in the place of lists
        return [_without_null_fields(item) for item in value]
    return value


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class _JsonFacts:
    """What is known of a JSON file once it is read: its columns, and of each bad line its name, what it is and should
    be."""

    columns: dict[str, None] = field(default_factory=dict)
    bad: list[tuple[str, str, str]] = field(default_factory=list)


def read_table(
    path: Path,
    cache_dir: str | Path | None = None,
    bad_lines: list[DataError] | None = None,
    chat_columns: Sequence[str] = (),
) -> RowTable:
    """The rows of a parquet, json or jsonl file, by its suffix; a DataError names file and line of what is wrong.
    `cache_dir`: the rows of a large file are kept in `rows/` inside it. None: in memory.
    `bad_lines`: what is wrong with a line of JSON is added to it, and the line left out. None: it is raised.
    `chat_columns`: those with chats and tool schemas, which lose the null fields that Parquet adds to structs."""
    suffix, digest, facts = path.suffix.lower(), None, _JsonFacts()
    entry: Path | None = None
    if suffix not in TABLE_SUFFIXES:
        raise DataError(
            str(path), got=f"a {suffix or 'missing'} suffix", expected=".parquet, .json or .jsonl"
        )
    try:
        if suffix in _PARQUET:
            # One file is read as one file: a folder name such as `split=train` above it adds no column.
            parquet = pq.ParquetFile(path)
            groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
            num_bytes, num_rows = (
                sum(group.total_byte_size for group in groups),
                parquet.metadata.num_rows,
            )
            schema = parquet.schema_arrow
            batches = parquet.iter_batches(
                max(1, min(_ROWS, _BATCH_BYTES * num_rows // max(num_bytes, 1)))
            )
        else:
            num_bytes, schema = path.stat().st_size, _TEXTS
            batches = _json_batches(
                path, facts, is_lines=suffix != ".json", keeps_bad=bad_lines is not None
            )
        if cache_dir is None or num_bytes < MAPPED_BYTES:
            rows = pa.Table.from_batches(batches, schema)
        else:
            digest = _digest(path)
            key = hashlib.sha256(f"{digest} {path.suffix} {pa.__version__}".encode()).hexdigest()[
                :32
            ]
            entry = Path(cache_dir).expanduser().absolute() / "rows" / key
            rows, facts = _mapped(path, entry, schema, batches, facts)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    bad = _bad_lines(path, facts)
    if bad and bad_lines is None:
        raise bad[0]
    if bad_lines is not None:
        bad_lines += bad
    if len(rows) == 0:
        got = f"{len(bad)} bad lines only, the first: {bad[0]}" if bad else "no rows"
        raise DataError(
            str(path),
            got=got,
            expected="at least one row",
            fix="Write the file again or leave it out.",
        )
    return _whole_table(path, rows, facts, digest, entry, chat_columns)


def reopen_table(
    path: Path, entry: Path | None, digest: str, chat_columns: Sequence[str]
) -> RowTable:
    """Open a table that `read_table` has made of a file: mapped from `entry` in the cache, or read again.

    Raises:
        DataError: the file has other content than it had, which had this digest.
    """
    if entry is not None:
        rows, facts = _opened(entry)
        return _whole_table(path, rows, facts, digest, entry, chat_columns)
    table = read_table(path, bad_lines=[], chat_columns=chat_columns)
    if table.digest != digest:
        fix = "Leave the file as it is while it is read."
        raise DataError(
            str(path), got="content that has changed", expected="what was read first", fix=fix
        )
    return table


def _whole_table(
    path: Path,
    rows: pa.Table,
    facts: _JsonFacts,
    digest: str | None,
    entry: Path | None,
    chat_columns: Sequence[str],
) -> RowTable:
    json_columns = [*facts.columns] if path.suffix.lower() in _JSON else None
    return RowTable(
        path, rows, json_columns, digest, chat_columns=chat_columns, entry=entry, is_whole_file=True
    )


def read_blocks(
    path: Path,
    num_rows: int,
    start: int = 0,
    bad_lines: list[DataError] | None = None,
    chat_columns: Sequence[str] = (),
) -> Iterator[RowTable]:
    """The rows of a parquet, json or jsonl file, at most so many at a time, from row `start` on, where a block begins.
    A block of a parquet file ends with its row group, too. Other arguments and errors as of `read_table`."""
    suffix, first = path.suffix.lower(), 0
    if suffix not in _PARQUET:
        facts = _JsonFacts()
        keeps = {"is_lines": suffix != ".json", "keeps_bad": bad_lines is not None}
        for batch in _json_batches(path, facts, num_rows, **keeps):
            if first >= start:
                if bad_lines is not None:
                    bad_lines += _bad_lines(path, facts)
                if len(batch):
                    yield RowTable(
                        path, pa.Table.from_batches([batch]), list(facts.columns), first=first
                    )
            facts.bad.clear()
            first += len(batch)
        return
    try:
        parquet = pq.ParquetFile(path)
        for group in range(parquet.num_row_groups):
            if (end := first + parquet.metadata.row_group(group).num_rows) <= start:
                first = end
                continue
            for batch in parquet.iter_batches(num_rows, row_groups=[group]):
                if first >= start:
                    rows = pa.Table.from_batches([batch])
                    yield RowTable(path, rows, first=first, chat_columns=chat_columns)
                first += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _bad_lines(path: Path, facts: _JsonFacts) -> list[DataError]:
    return [DataError(f"{path} {line}", got=got, expected=fit) for line, got, fit in facts.bad]


def _damaged(path: Path, error: Exception) -> DataError:
    reason, size = str(error).strip().partition("\n")[0], path.stat().st_size
    kind = "parquet" if path.suffix.lower() in _PARQUET else "JSON"
    got = f"{size} bytes that are no whole {kind} file ({reason})" if size else "an empty file"
    return DataError(
        str(path), got=got, expected=f"a {kind} file", fix="Write or download it again."
    )


def _mapped(
    path: Path, entry: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], facts: _JsonFacts
) -> tuple[pa.Table, _JsonFacts]:
    """The batches of a file out of the cache, which they are written to where they are not there yet."""
    num_rows = 0
    make_directory(entry.parent, where="data.cache_dir")
    # "a": what a link in its place leads to is not emptied.
    with (
        entry.with_suffix(".lock").open("ab") as lock,
        waiting(f"another process to write {entry}"),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if entry.is_dir():
            try:
                return _opened(entry)
            except (pa.ArrowException, OSError, ValueError, TypeError) as error:
                print(
                    f"data.cache_dir: {entry} is damaged ({error}); {path} is written there again.",
                    flush=True,
                )
        with (
            waiting(
                f"the rows of {path} to be written to {entry}", lambda: f"{num_rows} are there"
            ),
            written_aside(entry, where="data.cache_dir") as draft,
        ):
            draft.mkdir()
            with pa.ipc.new_stream(draft / "rows.arrow", schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    num_rows += len(batch)
            (draft / "facts.json").write_text(json.dumps(asdict(facts)), encoding="utf-8")
        return _opened(entry)


def _opened(entry: Path) -> tuple[pa.Table, _JsonFacts]:
    facts = _JsonFacts(**json.loads((entry / "facts.json").read_text(encoding="utf-8")))
    return pa.ipc.open_stream(pa.memory_map(str(entry / "rows.arrow"))).read_all(), facts


def _json_batches(
    path: Path, facts: _JsonFacts, num_rows: int = _ROWS, *, is_lines: bool, keeps_bad: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of a JSON file as texts; `facts` are complete at its end.
    Raises DataError: a line is no row, and `keeps_bad` is false."""
    texts: list[str] = []
    num_bytes = 0
    for line, raw in _json_texts(path, is_lines=is_lines):
        try:
            row = json.loads(text := raw.decode())
        except UnicodeDecodeError as error:
            bad = f"bytes that are not UTF-8 ({error})", "text in UTF-8"
        except (ValueError, RecursionError) as error:
            bad = f"text that is no JSON ({error})", "one JSON object per line"
        else:
            if isinstance(row, dict):
                facts.columns.update(dict.fromkeys(row))
                texts.append(text)
                num_bytes += len(raw)
                if len(texts) == num_rows or num_bytes >= _BATCH_BYTES:
                    yield pa.record_batch([texts], schema=_TEXTS)
                    texts, num_bytes = [], 0
                continue
            bad = f"a JSON {type(row).__name__}", "an object with a value for each column"
        if not keeps_bad:
            raise DataError(f"{path} {line}", got=bad[0], expected=bad[1])
        facts.bad.append((line, *bad))
    yield pa.record_batch([texts], schema=_TEXTS)


def _json_texts(path: Path, *, is_lines: bool) -> Iterator[tuple[str, bytes]]:
    """The text of each row, and its number in words."""
    with path.open("rb") as file:
        has_mark = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
        first_byte = file.tell() if has_mark else 0
        file.seek(first_byte)
        start = b""
        while not is_lines and (start := file.read(1)).isspace():
            pass
        file.seek(first_byte)
        if start != b"[":
            # Not splitlines(): a JSON string may hold the separators U+2028 and U+0085 as they are.
            yield from (
                (f"line {number}", line)
                for number, line in enumerate(file, start=1)
                if line.strip()
            )
            return
        try:
            rows = json.load(file)
        except UnicodeDecodeError as error:
            raise DataError(
                str(path), got=f"bytes that are not UTF-8 ({error})", expected="text in UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            got = f"text that is no JSON ({error})"
            raise DataError(str(path), got=got, expected="a list of JSON objects") from error
        yield from ((f"row {number}", json.dumps(row).encode()) for number, row in enumerate(rows))


def resolve_files(names: FileNames, cache_dir: str | Path, *, where: str) -> list[Path]:
    """The local files behind `names`, in the order given; those of a glob in alphabetical order.
    `cache_dir`: remote files are copied to `files/` inside it.
    `where`: the key that an error names.
    Raises DataError: nothing is named, a file does not exist, a glob matches nothing, or a store cannot be read."""
    listed = [names] if isinstance(names, str | Path) else list(names)
    if not listed or not all(str(name) for name in listed):
        raise DataError(where, got="no file", expected="a path, a glob, a URL or a list of these")
    cache = Path(cache_dir).expanduser() / "files"
    return [file for name in listed for file in _resolve(str(name), cache, where)]


def _resolve(name: str, cache: Path, where: str) -> list[Path]:
    is_url = "://" in name
    # The question mark of a web address starts its query.
    is_pattern = has_magic(name.replace("?", "") if is_url else name) and not Path(name).exists()
    if name.startswith(("http://", "https://")) and not is_pattern:
        return [_from_web(name, cache, where)]
    try:
        if (
            name.startswith("s3://") and find_spec("s3fs") is None
        ):  # pyarrow has a client of its own
            filesystem = ArrowFSWrapper(FileSystem.from_uri(f"s3://{urlsplit(name).netloc}")[0])
            root = name.removeprefix("s3://")
        else:
            filesystem, root = url_to_fs(name if is_url else str(Path(name).expanduser()))
        filesystem.invalidate_cache()  # it may have listed an earlier version in this process
        found = sorted(filesystem.glob(root)) if is_pattern else [root]
        if not found:
            raise DataError(
                where, got=f"{name!r}, which matches no file", expected="at least one file"
            )
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
            raise DataError(
                where, got=f"{path}, which does not exist", expected="a file", fix="Check the path."
            )
    return [Path(path) for path in found]


def _from_web(url: str, cache: Path, where: str) -> Path:
    """The copy in the cache of what is at a web address; its headers say whether it is the same document as before."""
    fix = "Check the address and the network, or download it and name the file."
    try:
        with document(url, SILENCE_S) as (headers, chunks):
            version = [headers.get(name) for name in ("etag", "last-modified", "content-length")]
            key = hashlib.sha256(repr((url, version)).encode()).hexdigest()[:20]
            target = cache / f"{key}-{PurePosixPath(urlsplit(url).path).name}"
            if target.is_file() and any(version):
                return target
            num_bytes = 0
            with (
                waiting(f"{url} to be copied", lambda: f"{num_bytes / 2**20:.1f} MB are there"),
                written_aside(target, where="data.cache_dir") as draft,
                draft.open("wb") as file,
            ):
                for chunk in chunks:
                    if num_bytes == 0 and chunk.lstrip()[:14].lower().startswith(
                        (b"<!doctype html", b"<html")
                    ):
                        way = "Name the file itself (on the hub /resolve/, not /blob/), or log in."
                        raise DataError(
                            where, got=f"{url!r}, a page of HTML", expected="a data file", fix=way
                        )
                    file.write(chunk)
                    num_bytes += len(chunk)
            return target
    except ServerLostError as error:
        raise DataError(where, got=f"{url!r}: {error}", expected="a file", fix=fix) from error


def _copy(filesystem: fsspec.AbstractFileSystem, path: str, cache: Path) -> Path:
    info = filesystem.info(path)
    url = filesystem.unstrip_protocol(path)
    version = sorted(
        (key, str(value)) for key, value in info.items() if key.lower() in _VERSION_FIELDS
    )
    key = hashlib.sha256(repr((url, info.get("size"), version)).encode()).hexdigest()[:20]
    target = cache / f"{key}-{PurePosixPath(urlsplit(url).path).name}"
    if not target.is_file():
        with written_aside(target, where="data.cache_dir") as draft:
            try:
                filesystem.get_file(path, str(draft))
            except (FileNotFoundError, ConnectionError, TimeoutError) as error:
                raise ServerLostError(str(error)) from error  # not the disk of the cache
    return target


def make_directory(path: Path, *, where: str) -> Path:
    """Create `path` and its parents; a `DataError` that names `where` if that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got, fix = (
            f"{path} ({error.strerror or error})",
            "Choose another directory or change its permissions.",
        )
        raise DataError(
            where, got=got, expected="a directory that can be created and written", fix=fix
        ) from error
    return path


@contextmanager
def written_aside(target: Path, *, where: str) -> Iterator[Path]:
    """Yield a path next to `target` for a file or a folder; on success it replaces `target`, on failure it is removed.
    A DataError about the disk names `where`."""
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
