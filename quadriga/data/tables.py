# SPDX-License-Identifier: Apache-2.0
"""Reads a parquet, json or jsonl file into rows, with errors that name the file and the row.

Files stay apart after they are read: they may differ in their columns and in the shape of nested ones, which a common
table would either refuse or fill with empty fields.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.errors import DataError

_PARQUET, _JSON, _JSON_LINES = {".parquet", ".pq"}, {".json"}, {".jsonl", ".ndjson"}


class RowTable:
    """The rows of one file.

    Attributes:
        path: the file.
        columns: names of the columns, those of any row.
    """

    def __init__(self, path: Path, columns: Iterable[str], rows: pa.Table | list[dict[str, Any]]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self._rows = rows
        self._digest = ""

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

    def where(self, row: int) -> str:
        """How an error names a row; rows are counted from 0."""
        return f"{self.path} row {row}"

    @property
    def digest(self) -> str:
        """Hash of the file's content, computed once."""
        if not self._digest:
            with self.path.open("rb") as file:
                self._digest = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digest


def read_table(path: Path) -> RowTable:
    """Read a file by its suffix.

    Raises:
        DataError: another suffix, a file that cannot be parsed, or one without rows.
    """
    suffix = path.suffix.lower()
    if suffix in _PARQUET:
        table = _read_parquet(path)
    elif suffix in _JSON | _JSON_LINES:
        rows = _read_json(path, is_lines=suffix in _JSON_LINES)
        table = RowTable(path, dict.fromkeys(key for row in rows for key in row), rows)
    else:
        raise DataError(str(path), got=f"a {suffix or 'missing'} suffix", expected=".parquet, .json or .jsonl")
    if len(table) == 0:
        raise DataError(str(path), got="no rows", expected="at least one", fix="Write the file again or leave it out.")
    return table


def _read_parquet(path: Path) -> RowTable:
    try:
        # One file is read as one file: a folder name such as `split=train` above it adds no column.
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        size = path.stat().st_size
        raise DataError(
            str(path),
            got=f"{size} bytes that are no whole parquet file ({_first_line(error)})" if size else "an empty file",
            expected="a parquet file",
            fix="Write or download it again.",
        ) from error
    return RowTable(path, table.column_names, table)


def _read_json(path: Path, *, is_lines: bool) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(str(path), got=f"bytes that are not UTF-8 ({error})", expected="text in UTF-8") from error
    if is_lines or not text.lstrip().startswith("["):
        return _parse_lines(path, text)
    rows = _parse(text, str(path))
    for number, row in enumerate(rows):
        _check_is_object(row, f"{path} row {number}")
    return rows


def _parse_lines(path: Path, text: str) -> list[dict[str, Any]]:
    rows = []
    # Not splitlines(): a JSON string may hold the separators U+2028 and U+0085 as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path} line {number}"
            rows.append(_check_is_object(_parse(line, where), where))
    return rows


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(where, got=f"text that is no JSON ({error})", expected="one JSON object per line") from error


def _check_is_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(where, got=f"a JSON {type(row).__name__}", expected="an object with a value for each column")
    return row


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
