# SPDX-License-Identifier: Apache-2.0
"""Reading parquet, json and jsonl, whole or broken."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.data.files import read_table
from quadriga.errors import DataError

ROWS = [{"a": 1, "nested": {"x": "é"}}, {"a": 2, "nested": {"x": "\u2028"}}, {"a": 3, "nested": None}]


@pytest.mark.parametrize("name", ["t.parquet", "t.json", "t.jsonl", "lines.json"])
def test_the_formats_agree(write, name: str):
    path = (
        write("t.jsonl", ROWS).rename(write("x.jsonl", ROWS).with_name(name))
        if name == "lines.json"
        else write(name, ROWS)
    )
    table = read_table(path)
    assert len(table) == 3
    assert table.columns == ("a", "nested")
    assert [table[i] for i in range(3)] == ROWS
    assert list(table.column_batches("a", 2)) == [[1, 2], [3]]


def test_json_rows_may_lack_keys(write):
    table = read_table(write("t.jsonl", [{"a": 1}, {"b": "x"}]))
    assert table[0] == {"a": 1, "b": None}
    assert list(table.column_batches("b", 9)) == [[None, "x"]]


def test_a_folder_name_adds_no_column(write):
    assert read_table(write("split=train/t.parquet", ROWS)).columns == ("a", "nested")


def test_the_digest_follows_the_content(write):
    first = read_table(write("a.jsonl", ROWS)).digest
    assert read_table(write("b.jsonl", ROWS)).digest == first
    assert read_table(write("a.jsonl", ROWS[:2])).digest != first


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.parquet", b"", "an empty file, expected a parquet file"),
        ("t.parquet", b"PAR1 this is no parquet file", "28 bytes that are no whole parquet file"),
        ("t.jsonl", b"", "no rows, expected at least one"),
        ("t.json", b"[]", "no rows, expected at least one"),
        ("t.jsonl", b'{"a": 1}\n\n{"a": ', "line 3: got text that is no JSON"),
        ("t.jsonl", b'{"a": 1}\n[1]', "line 2: got a JSON list"),
        ("t.json", b'[{"a": 1}, 5]', "row 1: got a JSON int"),
        ("t.jsonl", b"\xff\xfe", "not UTF-8"),
        ("t.csv", b"a,b", r"a \.csv suffix, expected \.parquet, \.json or \.jsonl"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_table(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_parquet_file_cut_in_the_middle(write):
    path = write("t.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="no whole parquet file"):
        read_table(path)


def test_a_parquet_file_with_columns_but_no_rows(tmp_path: Path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="no rows"):
        read_table(tmp_path / "t.parquet")
