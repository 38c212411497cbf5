# SPDX-License-Identifier: Apache-2.0
"""Paths, lists, globs and URLs become local files."""

from pathlib import Path

import fsspec
import pytest

from quadriga.data.files import resolve_files
from quadriga.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.fixture
def memory():
    """fsspec's store in memory: the real remote path, without a network."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_path_list_and_glob(folder: Path):
    assert names(resolve_files(folder / "a.jsonl", folder, where="k")) == ["a.jsonl"]
    assert names(resolve_files(str(folder / "*.jsonl"), folder, where="k")) == ["a.jsonl", "b.jsonl"]
    listed = [str(folder / "c.json"), f"file://{folder}/b.jsonl", str(folder / "?.json")]
    assert names(resolve_files(listed, folder, where="k")) == ["c.json", "b.jsonl", "c.json"]


def test_a_name_with_a_bracket_that_exists_is_not_a_pattern(folder: Path):
    (folder / "x[1].json").write_text("{}")
    assert names(resolve_files(str(folder / "x[1].json"), folder, where="k")) == ["x[1].json"]


def test_home_is_understood(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder))
    assert resolve_files("~/a.jsonl", folder, where="k") == [folder / "a.jsonl"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "no file"),
        ([], "no file"),
        ("missing.parquet", "missing.parquet, which does not exist"),
        ("nothing-*.parquet", "matches no file"),
        ("nosuchscheme://x/y.parquet", "expected a file that fsspec can open"),
    ],
)
def test_errors_name_the_key_and_the_file(tmp_path: Path, name: str | list, message: str):
    with pytest.raises(DataError, match=message) as caught:
        resolve_files(name, tmp_path, where="data.val_files")
    assert caught.value.where == "data.val_files"


def test_a_folder_is_refused_with_the_pattern_to_use(tmp_path: Path):
    with pytest.raises(DataError, match=r"a folder.*\*\.parquet"):
        resolve_files(tmp_path, tmp_path, where="k")


def test_remote_files_are_copied_once_and_again_when_they_change(
    memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory.pipe("/bucket/train.jsonl", b"one")
    fetched = []
    original = type(memory).get_file

    def count(self, path, *args, **kwargs):
        fetched.append(path)
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(type(memory), "get_file", count)
    first = resolve_files("memory://bucket/*.jsonl", tmp_path, where="k")
    again = resolve_files("memory://bucket/train.jsonl", tmp_path, where="k")
    assert first == again
    assert first[0].read_bytes() == b"one"
    assert first[0].suffix == ".jsonl"
    assert len(fetched) == 1
    memory.pipe("/bucket/train.jsonl", b"two")
    changed = resolve_files("memory://bucket/train.jsonl", tmp_path, where="k")
    assert changed[0].read_bytes() == b"two"
    assert changed != first


def test_a_copy_that_fails_leaves_nothing_behind(memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory.pipe("/bucket/train.jsonl", b"one")

    def fail(self, path, target, **kwargs):
        Path(target).write_bytes(b"half")
        raise ConnectionError("the line is down")

    monkeypatch.setattr(type(memory), "get_file", fail)
    with pytest.raises(DataError, match="the line is down"):
        resolve_files("memory://bucket/train.jsonl", tmp_path, where="k")
    assert list((tmp_path / "files").iterdir()) == []
