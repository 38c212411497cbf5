# SPDX-License-Identifier: Apache-2.0
"""Reads rows of data files, named by paths, globs or URLs; writes files as a whole or not at all.

Users may name anything that fsspec opens (`s3://`, `gs://`, `hf://`, `https://`, ...). A remote
file is copied once into the cache, under a key made of its URL, its size and whatever its store
says about its version.

Each file has a table of its own, because files may differ in their columns and in column types.
Tables are Arrow's. The rows of a large file are written once into the cache, a few at a time, under
a key made of the file's content, and mapped into memory from there. JSON is parsed by Python's own
parser, and the table has its rows as text: a library that infers column types would change values
(`"1"` and `2` in one column become numbers) and could not name the line of an error.
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
from operator import methodcaller
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
from quadriga.observe.tracking.jsonl import jsonable
from quadriga.observe.watchdog import waiting

_PARQUET_SUFFIXES = (".parquet", ".pq")
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_PARQUET_SUFFIXES, *_JSON_SUFFIXES)
_SAVE_TO_DISK_FILES = ("dataset_info.json", "dataset_dict.json")
"""Files by which a folder from `save_to_disk` of Hugging Face's datasets is recognized."""
SILENCE_S = 60.0
"""Seconds without a byte after which a web server counts as lost."""
MAPPED_BYTES = 64 << 20
"""Files of at least this size are mapped from the cache instead of held in memory."""
_MAX_BATCH_ROWS = 4096
"""Most rows that are read from a file at a time."""
_MAX_BATCH_BYTES = 64 << 20
"""Approximate limit on the bytes that are read from a file at a time."""
_JSON_TEXT_SCHEMA = pa.schema([("json", pa.string())])
"""Schema of the tables of JSON files: one column, with the JSON text of each row."""
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
"""Fields by which stores of fsspec tell versions of a file apart."""


class RowTable:
    """The rows of one file, or of a block of it.

    A table of a whole file is pickled without its rows: the process that unpickles it opens the
    cache entry, or else the file, again. A table of a block is pickled with its rows.

    Args:
        path: the file.
        rows: the rows. For a JSON file this is one column, with the JSON text of each row.
        json_columns: of a JSON file, all columns that any row has. Unused for Parquet.
        digest: SHA-256 of the whole file's content. None: computed when it is needed.
        first: number in the file of the table's first row; above 0 for a later block.
        chat_columns: columns with chats and tool schemas, whose null fields are dropped when rows
            of Parquet are read (`drop_null_fields`).
        entry: folder in the cache that the rows are mapped from. None: the rows are in memory.
        is_whole_file: whether the rows are all rows of the file, as `read_table` returns them.

    Attributes:
        columns: names of the columns.
        schema: types of the columns. None: the file is JSON, whose columns have no types.
    """

    def __init__(
        self,
        path: Path,
        rows: pa.Table,
        json_columns: Iterable[str] = (),
        digest: str | None = None,
        first: int = 0,
        chat_columns: Sequence[str] = (),
        *,
        entry: Path | None = None,
        is_whole_file: bool = False,
    ) -> None:
        self.path = path
        self.first = first
        self._rows = rows
        self._is_json = path.suffix.lower() in _JSON_SUFFIXES
        self.columns = tuple(json_columns if self._is_json else rows.column_names)
        self.schema = None if self._is_json else rows.schema
        self._digest = digest
        self._chat_columns = chat_columns
        self._entry = entry
        self._is_whole_file = is_whole_file

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle a table of a whole file without its rows (`reopen_table`), and a block with them."""
        if not self._is_whole_file:
            return super().__reduce_ex__(protocol)
        return reopen_table, (self.path, self._entry, self.digest, self._chat_columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Values by column of the table's row `row`; None where the row has no value."""
        # There is one batch, of one row.
        [[values]] = self.batches(self.columns, 1, range(row, row + 1))
        return values

    def batches(
        self, columns: Sequence[str], size: int, rows: range | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        """Read some columns of the rows, batch by batch.

        Args:
            columns: names of the columns.
            size: rows of a batch; the last one may have fewer.
            rows: numbers of the rows in this table. None: all rows.

        Returns:
            The batches: lists of rows, each a dictionary of these columns. A column that a row of
            JSON lacks is None.
        """
        if rows is None:
            rows = range(len(self))
        # The table of a JSON file has a single column, so columns are selected after parsing.
        table = self._rows if self._is_json else self._rows.select(columns)
        for start in range(rows.start, rows.stop, size):
            batch = table.slice(start, min(size, rows.stop - start))
            if self._is_json:
                # Parsed batch by batch: a large file's rows would not fit in memory as objects.
                json_rows = map(json.loads, batch.column(0).to_pylist())
                yield [{column: row.get(column) for column in columns} for row in json_rows]
                continue
            arrow_rows = batch.to_pylist()
            for row in arrow_rows:
                drop_null_fields(row, self._chat_columns)
            yield arrow_rows

    def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table with a column for each of `columns`.

        Raises:
            pyarrow.ArrowException: a column has values of several types.
        """
        if not self._is_json:
            return self._rows
        [rows] = self.batches(self.columns, len(self))
        return pa.Table.from_pylist(rows)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole file's content, also for a table that has a block of the file."""
        return self._digest or _file_digest(self.path)


def drop_null_fields(row: dict[str, Any], columns: Iterable[str]) -> None:
    """Remove the null fields of chats and tool schemas from a row of an Arrow table, in place.

    Arrow gives each struct in a column the fields of all structs there, and fills the ones that a
    struct did not have with null. A chat template would write these nulls into the prompt.

    Args:
        row: values by column.
        columns: the columns to clean, or fields of struct columns, such as `extra_info.messages`.
    """
    for name in columns:
        # A name with a dot may be the name of a column, or the path to a field of a column.
        *path, field_name = [name] if name in row else name.split(".")
        # Follow the path to the struct that has the field. The row itself has the columns; None if
        # the row lacks a struct on the path.
        struct: Any = row
        for part in path:
            struct = struct.get(part) if isinstance(struct, dict) else None
        if isinstance(struct, dict) and field_name in struct:
            struct[field_name] = _without_null_fields(struct[field_name])


def _without_null_fields(value: Any) -> Any:
    """Copy a nested value, without the dictionary entries that are None."""
    if isinstance(value, Mapping):
        return {
            key: _without_null_fields(field) for key, field in value.items() if field is not None
        }
    if isinstance(value, list | np.ndarray):  # pandas returns lists of Parquet as arrays
        return [_without_null_fields(item) for item in value]
    return value


def _file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class _JsonFacts:
    """Columns and bad lines of a JSON file, collected while it is read.

    Attributes:
        columns: all columns that any row has, in the order in which they first appear. They are
            the keys of a dictionary, which serves as an ordered set.
        bad: for each bad line its place ("line 3"), what the line has, and what was expected.
    """

    columns: dict[str, None] = field(default_factory=dict)
    bad: list[tuple[str, str, str]] = field(default_factory=list)


def read_table(
    path: Path,
    cache_dir: str | Path | None = None,
    bad_lines: list[DataError] | None = None,
    chat_columns: Sequence[str] = (),
) -> RowTable:
    """Read the rows of a parquet, json or jsonl file.

    Args:
        path: a local file. Its suffix tells its format.
        cache_dir: keeps the rows of large files, in `rows/` inside it. None: rows are in memory.
        bad_lines: gets an error for each bad line of JSON; these lines are left out. None: the
            first error is raised.
        chat_columns: columns with chats and tool schemas. The null fields that Parquet adds to
            structs in them are removed when rows are read.

    Returns:
        The rows of the file.

    Raises:
        DataError: the file is damaged, has no rows, or has another suffix. The error names the
            file, and the line if there is one.
    """
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise DataError(
            str(path), got=f"a {suffix or 'missing'} suffix", expected=".parquet, .json or .jsonl"
        )

    facts = _JsonFacts()
    digest: str | None = None
    entry: Path | None = None
    try:
        # `batches` is an iterator: no row is read until the table or the cache entry is made.
        if suffix in _PARQUET_SUFFIXES:
            # Not `read_table` of pyarrow, which makes a column of a folder's name such as `split=train`.
            parquet = pq.ParquetFile(path)
            groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
            num_bytes = sum(group.total_byte_size for group in groups)  # uncompressed
            schema = parquet.schema_arrow
            # As many rows of average size as fit in a batch: rows with images are large.
            rows_by_size = _MAX_BATCH_BYTES * parquet.metadata.num_rows // max(num_bytes, 1)
            batches = parquet.iter_batches(max(1, min(_MAX_BATCH_ROWS, rows_by_size)))
        else:
            num_bytes = path.stat().st_size
            schema = _JSON_TEXT_SCHEMA
            batches = _read_json_batches(path, facts, keeps_bad=bad_lines is not None)
        if cache_dir is None or num_bytes < MAPPED_BYTES:
            rows = pa.Table.from_batches(batches, schema)
        else:
            # The key depends on the content and not on the path, so copies of a file share an
            # entry.
            digest = _file_digest(path)
            identity = f"{digest} {path.suffix} {pa.__version__}"
            key = hashlib.sha256(identity.encode()).hexdigest()[:32]
            entry = Path(cache_dir).expanduser().absolute() / "rows" / key
            rows, facts = _map_cached_rows(path, entry, schema, batches, facts)
    except (pa.ArrowException, OSError) as error:
        raise _damaged_file_error(path, error) from error

    # A cache entry has the bad lines too (`facts`), so they are reported at each start.
    errors = _bad_line_errors(path, facts)
    if bad_lines is not None:
        bad_lines += errors
    elif errors:
        raise errors[0]
    if len(rows) == 0:
        got = "no rows"
        if errors:
            got = f"{len(errors)} bad lines only, the first: {errors[0]}"
        raise DataError(
            str(path),
            got=got,
            expected="at least one row",
            fix="Write the file again or leave it out.",
        )
    return RowTable(
        path,
        rows,
        facts.columns,
        digest,
        chat_columns=chat_columns,
        entry=entry,
        is_whole_file=True,
    )


def reopen_table(
    path: Path, entry: Path | None, digest: str, chat_columns: Sequence[str]
) -> RowTable:
    """Open the table of a file again, in another process than the one that called `read_table`.

    Args:
        path: the file.
        entry: folder in the cache that the rows are mapped from. None: the file is read again.
        digest: SHA-256 of the file's content when it was read first.
        chat_columns: as for `read_table`.

    Returns:
        The same rows.

    Raises:
        DataError: the file is read again, and its content has changed.
    """
    if entry is not None:
        # No check of the content is needed: the name of the entry depends on it.
        rows, facts = _open_cache_entry(entry)
        return RowTable(
            path,
            rows,
            facts.columns,
            digest,
            chat_columns=chat_columns,
            entry=entry,
            is_whole_file=True,
        )
    # The errors of bad lines are dropped: they were reported when the file was read first.
    table = read_table(path, bad_lines=[], chat_columns=chat_columns)
    if table.digest != digest:
        raise DataError(
            str(path),
            got="content that has changed",
            expected="the content that was read first",
            fix="Leave the file as it is while it is read.",
        )
    return table


def read_blocks(
    path: Path,
    num_rows: int,
    start: int = 0,
    bad_lines: list[DataError] | None = None,
    chat_columns: Sequence[str] = (),
) -> Iterator[RowTable]:
    """Read the rows of a parquet, json or jsonl file block by block.

    Args:
        path: a local file.
        num_rows: most rows of a block. A block of a parquet file also ends where its row group
            ends.
        start: number of the first row to return; it must be the first row of a block.
        bad_lines: as for `read_table`. Errors are added before the block with these lines is
            returned.
        chat_columns: as for `read_table`.

    Returns:
        The blocks.

    Raises:
        DataError: the file is damaged. The error names the file, and the line if there is one.
    """
    if path.suffix.lower() not in _PARQUET_SUFFIXES:
        yield from _read_json_blocks(path, num_rows, start, bad_lines)
        return
    first = 0  # number of the first row that is still to come
    try:
        parquet = pq.ParquetFile(path)
        for group in range(parquet.num_row_groups):
            end = first + parquet.metadata.row_group(group).num_rows
            if end <= start:
                # The row group is skipped without decoding it.
                first = end
                continue
            # Blocks do not span row groups, so a resumed run can skip whole groups.
            for batch in parquet.iter_batches(num_rows, row_groups=[group]):
                if first >= start:
                    rows = pa.Table.from_batches([batch])
                    yield RowTable(path, rows, first=first, chat_columns=chat_columns)
                first += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise _damaged_file_error(path, error) from error


def _read_json_blocks(
    path: Path, num_rows: int, start: int, bad_lines: list[DataError] | None
) -> Iterator[RowTable]:
    """Read the rows of a JSON file block by block. Arguments and errors as for `read_blocks`."""
    first = 0  # number of the batch's first row; bad lines are not counted
    facts = _JsonFacts()
    for batch in _read_json_batches(path, facts, num_rows, keeps_bad=bad_lines is not None):
        if first >= start:
            if bad_lines is not None:
                bad_lines += _bad_line_errors(path, facts)
            if len(batch):
                rows = pa.Table.from_batches([batch])
                yield RowTable(path, rows, facts.columns, first=first)
        # Each bad line is reported once, with its block; lines before `start` are not reported.
        facts.bad.clear()
        first += len(batch)


def _bad_line_errors(path: Path, facts: _JsonFacts) -> list[DataError]:
    """Make an error for each bad line of a file."""
    return [
        DataError(f"{path} {line}", got=got, expected=expected) for line, got, expected in facts.bad
    ]


def _damaged_file_error(path: Path, error: Exception) -> DataError:
    """Turn an error of Arrow or of the disk into a DataError about the file."""
    # An error of Arrow may have several lines, of which the first says what is wrong.
    reason = str(error).strip().partition("\n")[0]
    size = path.stat().st_size
    kind = "parquet" if path.suffix.lower() in _PARQUET_SUFFIXES else "JSON"
    return DataError(
        str(path),
        got=f"{size} bytes that are no whole {kind} file ({reason})" if size else "an empty file",
        expected=f"a {kind} file",
        fix="Write or download it again.",
    )


def _map_cached_rows(
    path: Path, entry: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], facts: _JsonFacts
) -> tuple[pa.Table, _JsonFacts]:
    """Map the rows of a file from the cache into memory; write the cache entry first if needed.

    An entry that cannot be read is reported and written again.

    Args:
        path: the file.
        entry: the folder in the cache.
        schema: types of the columns in `batches`.
        batches: iterator over the rows. It is used only if the entry has to be written.
        facts: filled by `batches` while the rows of a JSON file are read; empty for Parquet. They
            are stored with the rows.

    Returns:
        The rows, and the facts that were stored with them.

    Raises:
        DataError: the cache cannot be written, or `batches` raises it for a bad line.
        pyarrow.ArrowException: the file is damaged.
    """
    num_rows = 0  # rows written so far, for the report of a long wait
    make_directory(entry.parent, where="data.cache_dir")
    # Mode "a" never truncates: the lock's path may be a link that leads to another file.
    with (
        entry.with_suffix(".lock").open("ab") as lock,
        waiting(f"another process to write {entry}"),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have written the entry while this one waited for the lock.
        if entry.is_dir():
            try:
                # ValueError and TypeError: the JSON of `facts` is damaged, or has other fields.
                return _open_cache_entry(entry)
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
            # Written last: `facts` is complete only when all rows have been read.
            (draft / "facts.json").write_text(json.dumps(asdict(facts)), encoding="utf-8")
        return _open_cache_entry(entry)


def _open_cache_entry(entry: Path) -> tuple[pa.Table, _JsonFacts]:
    """Map the rows of a cache entry into memory, and read the facts that are stored with them."""
    facts = json.loads((entry / "facts.json").read_text(encoding="utf-8"))
    stream = pa.ipc.open_stream(pa.memory_map(str(entry / "rows.arrow")))
    return stream.read_all(), _JsonFacts(**facts)


def _read_json_batches(
    path: Path, facts: _JsonFacts, num_rows: int = _MAX_BATCH_ROWS, *, keeps_bad: bool
) -> Iterator[pa.RecordBatch]:
    """Read the rows of a JSON file as JSON texts, each of which is checked to be an object.

    Args:
        path: the file.
        facts: gets the columns and bad lines that are found.
        num_rows: most rows of a batch.
        keeps_bad: whether bad lines are added to `facts`. Otherwise the first one raises an error.

    Returns:
        Batches of the schema `_JSON_TEXT_SCHEMA`; the last one may be empty.

    Raises:
        DataError: a line is bad, and `keeps_bad` is false.
    """
    texts = []
    num_bytes = 0
    for line, raw in _read_json_texts(path):
        try:
            text = raw.decode()
            row = json.loads(text)
        except UnicodeDecodeError as error:
            got = f"bytes that are not UTF-8 ({error})"
            expected = "text in UTF-8"
        except (ValueError, RecursionError) as error:
            got = f"text that is no JSON ({error})"
            expected = "one JSON object per line"
        else:
            # A good row ends this pass of the loop; what follows is for bad lines.
            if isinstance(row, dict):
                facts.columns.update(dict.fromkeys(row))
                texts.append(text)
                num_bytes += len(raw)
                # Rows differ in size by orders of magnitude, so their bytes are limited too.
                if len(texts) == num_rows or num_bytes >= _MAX_BATCH_BYTES:
                    yield pa.record_batch([texts], schema=_JSON_TEXT_SCHEMA)
                    texts = []
                    num_bytes = 0
                continue
            got = f"a JSON {type(row).__name__}"
            expected = "an object with a value for each column"
        if not keeps_bad:
            raise DataError(f"{path} {line}", got=got, expected=expected)
        facts.bad.append((line, got, expected))
    yield pa.record_batch([texts], schema=_JSON_TEXT_SCHEMA)


def _read_json_texts(path: Path) -> Iterator[tuple[str, bytes]]:
    """Read the text of each row of a JSON file, which has a row per line, or is one list of rows.

    Returns:
        For each row its place, for errors, and its JSON text. The place is "line 3", counted from
        1, or for a list "row 3", counted from 0.

    Raises:
        DataError: the file begins as a list, and is not valid JSON.
    """
    with path.open("rb") as file:
        # Editors on Windows put a byte order mark in front, which is skipped.
        has_mark = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
        first_byte = file.tell() if has_mark else 0
        file.seek(first_byte)

        # A list of rows begins with a bracket.
        first_character = file.read(1)
        while first_character.isspace():
            first_character = file.read(1)
        file.seek(first_byte)

        if path.suffix.lower() != ".json" or first_character != b"[":
            # Lines of a binary file end at "\n" only. `str.splitlines` would also end them at
            # U+2028 and U+0085, which a JSON string may contain.
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number}", line
            return
        try:
            rows = json.load(file)
        except UnicodeDecodeError as error:
            raise DataError(
                str(path), got=f"bytes that are not UTF-8 ({error})", expected="text in UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                str(path), got=f"text that is no JSON ({error})", expected="a list of JSON objects"
            ) from error
        for number, row in enumerate(rows):
            yield f"row {number}", json.dumps(row).encode()


def resolve_files(names: FileNames, cache_dir: str | Path, *, where: str) -> list[Path]:
    """Find the files behind names, and copy remote files into the cache.

    Args:
        names: a path, a glob, a URL, or a list of these.
        cache_dir: remote files are copied to `files/` inside it.
        where: the configuration key, for errors.

    Returns:
        Local files in the order of the names. The files of a glob are in alphabetical order.

    Raises:
        DataError: there is no name, a file does not exist, a glob matches nothing, or a store
            cannot be read.
    """
    name_list = [names] if isinstance(names, str | Path) else list(names)
    if not name_list or not all(str(name) for name in name_list):
        raise DataError(where, got="no file", expected="a path, a glob, a URL or a list of these")
    cache = Path(cache_dir).expanduser() / "files"
    files = []
    for name in name_list:
        files += _resolve(str(name), cache, where)
    return files


def _resolve(name: str, cache: Path, where: str) -> list[Path]:
    """Find the files of one path, glob or URL; copy remote ones into the folder `cache`.

    Raises:
        DataError: a file does not exist, the glob matches nothing, or the store cannot be read.
    """
    is_url = "://" in name
    # In a URL a question mark starts the query, so it does not make the name a glob. Nor do the
    # brackets in the name of a file that exists, such as `data[1].parquet`.
    pattern = name.replace("?", "") if is_url else name
    is_pattern = has_magic(pattern) and not Path(name).exists()
    if name.startswith(("http://", "https://")) and not is_pattern:
        return [_download_to_cache(name, cache, where)]
    try:
        if name.startswith("s3://") and find_spec("s3fs") is None:
            # The package for this store is not installed, but pyarrow has a client of its own.
            store, _ = FileSystem.from_uri(f"s3://{urlsplit(name).netloc}")
            filesystem = ArrowFSWrapper(store)
            path_in_store = name.removeprefix("s3://")
        else:
            filesystem, path_in_store = url_to_fs(name if is_url else str(Path(name).expanduser()))
        filesystem.invalidate_cache()  # the process may have listed an earlier version
        paths = sorted(filesystem.glob(path_in_store)) if is_pattern else [path_in_store]
        if not paths:
            raise DataError(
                where, got=f"{name!r}, which matches no file", expected="at least one file"
            )
        if not isinstance(filesystem, LocalFileSystem):
            return [_copy_to_cache(filesystem, path, cache) for path in paths]
    except DataError:
        raise
    except Exception as error:
        # Each store has exceptions of its own, which often do not name the file.
        raise DataError(
            where,
            got=f"{name!r}: {type(error).__name__}: {error}",
            expected="a file that fsspec can open",
            fix="Check the address, the credentials, and the package for this kind of store.",
        ) from error
    files = [Path(path) for path in paths]
    for file in files:
        _require_file(file, where)
    return files


def _require_file(file: Path, where: str) -> None:
    """Raise a DataError if a path is a folder, or does not exist."""
    if file.is_dir():
        fix = f"Name its files, as in {file}/*.parquet."
        if any((file / name).is_file() for name in _SAVE_TO_DISK_FILES):
            fix = (
                "The folder was written by save_to_disk of datasets. Convert it with"
                f" load_from_disk({str(file)!r}).to_parquet(FILE). If it has several splits, call"
                " to_parquet for one of them, as in load_from_disk(...)['train']."
            )
        raise DataError(where, got=f"{file}, a folder", expected="files", fix=fix)
    if not file.is_file():
        raise DataError(
            where, got=f"{file}, which does not exist", expected="a file", fix="Check the path."
        )


def _download_to_cache(url: str, cache: Path, where: str) -> Path:
    """Download a document into the cache, unless its current version is there; return the copy.

    Raises:
        DataError: the server cannot be reached, or sends a web page.
    """
    try:
        with document(url, SILENCE_S) as (headers, chunks):
            # Servers differ in which of these headers they send; missing ones are None.
            version = [headers.get(name) for name in ("etag", "last-modified", "content-length")]
            target = cache / _cache_name(url, version)
            # Without any of these headers the copy may be out of date, so it is made again.
            if target.is_file() and any(version):
                return target
            num_bytes = 0
            with (
                waiting(f"{url} to be copied", lambda: f"{num_bytes / 2**20:.1f} MB are there"),
                written_aside(target, where="data.cache_dir") as draft,
                draft.open("wb") as file,
            ):
                for chunk in chunks:
                    if num_bytes == 0:
                        _refuse_web_page(chunk, url, where)
                    file.write(chunk)
                    num_bytes += len(chunk)
            return target
    except ServerLostError as error:
        raise DataError(
            where,
            got=f"{url!r}: {error}",
            expected="a file",
            fix="Check the address and the network, or download it and name the file.",
        ) from error


def _refuse_web_page(first_chunk: bytes, url: str, where: str) -> None:
    """Raise a DataError if a document is an HTML page, such as one that asks for a login."""
    beginning = first_chunk.lstrip()[:14].lower()
    if beginning.startswith((b"<!doctype html", b"<html")):
        raise DataError(
            where,
            got=f"{url!r}, a page of HTML",
            expected="a data file",
            fix="Name the file itself (on the hub /resolve/, not /blob/), or log in.",
        )


def _cache_name(url: str, *version: Any) -> str:
    """Name of a remote file's copy: a hash of URL and version, then the last part of the URL."""
    key = hashlib.sha256(repr((url, *version)).encode()).hexdigest()[:20]
    return f"{key}-{PurePosixPath(urlsplit(url).path).name}"


def _copy_to_cache(filesystem: fsspec.AbstractFileSystem, path: str, cache: Path) -> Path:
    """Copy a remote file into the cache, unless its current version is there; return the copy.

    Raises:
        ServerLostError: the store cannot be reached, or no longer has the file.
        DataError: the cache cannot be written.
    """
    info = filesystem.info(path)
    url = filesystem.unstrip_protocol(path)
    version = sorted(
        (key, str(value)) for key, value in info.items() if key.lower() in _VERSION_FIELDS
    )
    target = cache / _cache_name(url, info.get("size"), version)
    if not target.is_file():
        with written_aside(target, where="data.cache_dir") as draft:
            try:
                filesystem.get_file(path, str(draft))
            except (FileNotFoundError, ConnectionError, TimeoutError) as error:
                # `written_aside` would report these OSErrors as errors of the cache's disk.
                raise ServerLostError(str(error)) from error
    return target


def make_directory(path: Path, *, where: str) -> Path:
    """Create a directory and its parents, if they do not exist.

    Args:
        path: the directory.
        where: the configuration key, for errors.

    Returns:
        `path`.

    Raises:
        DataError: the directory cannot be created.
    """
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
    """Context manager: yield a temporary path to write to, and rename it to `target` on success.

    Readers never see a half-written target. After an error the temporary file or folder is removed.

    Args:
        target: a file or a folder. One that exists is replaced.
        where: the configuration key, for errors of the disk.

    Raises:
        DataError: the disk is full, or the place cannot be written. Any OSError raised inside the
            context becomes this error.
    """
    make_directory(target.parent, where=where)
    # In the same folder, because a rename is atomic only within one file system.
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        yield draft
        # The safetensors library makes files that only their owner can read: give them the
        # permissions of the folder.
        for file in draft.glob("*.safetensors"):
            file.chmod(draft.stat().st_mode & 0o666)
        if draft.is_dir() and target.is_dir():
            # A rename cannot replace a folder with files: the old one is moved aside first.
            old = draft.with_suffix(".old")
            os.rename(target, old)
            os.rename(draft, target)
            shutil.rmtree(old)
        else:
            os.replace(draft, target)
    except OSError as error:
        raise DataError(
            where,
            got=f"{target} ({error.strerror or error})",
            expected="a place that can be written",
            fix="Free some space, change the permissions, or choose another directory.",
        ) from error
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)


def write_once(content: bytes, folder: Path) -> Path:
    """Write a Parquet file of the cache, named after its content, unless it exists already.

    Args:
        content: the bytes of the Parquet file.
        folder: folder in the cache; created if it does not exist.

    Returns:
        The file.

    Raises:
        DataError: the file cannot be written.
    """
    file = folder / f"{hashlib.sha256(content).hexdigest()[:20]}.parquet"
    if not file.is_file():
        with written_aside(file, where="data.cache_dir") as draft:
            draft.write_bytes(content)
    return file


def write_data_file(rows: list[dict[str, Any]], folder: Path, label: str, *, where: str) -> Path:
    """Write rows to a file that is named after its content, so that equal rows share a file.

    The format is JSON lines, or Parquet if JSON cannot hold a value, such as bytes.

    Args:
        rows: the rows, as dictionaries of columns.
        folder: where the file goes; created if it does not exist.
        label: beginning of the file's name; errors name the rows by it too.
        where: configuration key that the folder comes from.

    Returns:
        The file.

    Raises:
        DataError: parquet cannot hold a value either, or the file cannot be written.
    """
    try:
        lines = []
        for row in rows:
            # Arrays and tensors become lists; other objects have no `tolist` and raise.
            value = jsonable(row, methodcaller("tolist"))
            lines.append(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
        suffix = "jsonl"
        # UTF-8 cannot hold half a surrogate pair: it becomes an escape such as `\ud800`, as in
        # JSON.
        content = "".join(lines).encode("utf-8", "backslashreplace")
    except (TypeError, AttributeError):
        suffix = "parquet"
        stream = pa.BufferOutputStream()
        try:
            pq.write_table(pa.Table.from_pylist(rows), stream)
        except pa.ArrowException as error:
            raise DataError(
                label,
                got=str(error),
                expected="rows that a parquet file can hold",
                fix="Give each column one type, of numbers, texts, bytes, lists and dictionaries.",
            ) from error
        content = stream.getvalue().to_pybytes()
    path = folder / f"{label}_{hashlib.sha256(content).hexdigest()[:12]}.{suffix}"
    with written_aside(path, where=where) as draft:
        draft.write_bytes(content)
    return path
