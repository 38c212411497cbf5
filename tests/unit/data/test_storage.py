# SPDX-License-Identifier: Apache-2.0
"""Writing beside and renaming."""

from pathlib import Path

import pytest

from quadriga.data.files import written_aside
from quadriga.errors import DataError


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path):
    target = tmp_path / "deep" / "x.txt"
    with written_aside(target, where="k") as draft:
        draft.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["x.txt"]


def test_a_failure_keeps_the_old_file(tmp_path: Path):
    target = tmp_path / "x.txt"
    target.write_text("old")
    with pytest.raises(KeyError), written_aside(target, where="k") as draft:
        draft.write_text("half")
        raise KeyError("stop")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_a_folder_replaces_a_folder(tmp_path: Path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("")
    with written_aside(target, where="k") as draft:
        draft.mkdir()
        (draft / "new").write_text("")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "x.json"
    with (
        pytest.raises(DataError, match=r"data.cache_dir: got .*File exists"),
        written_aside(target, where="data.cache_dir"),
    ):
        pass


def test_a_full_disk_is_one_clear_error(tmp_path: Path):
    with pytest.raises(DataError, match="No space left"), written_aside(tmp_path / "x", where="k") as draft:
        draft.write_text("half")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
