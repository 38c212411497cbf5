# SPDX-License-Identifier: Apache-2.0
"""Prompt lengths are measured once, in as many processes as asked for, and a damaged entry is measured again."""

from pathlib import Path

import numpy as np
import pytest

from quadriga.config import DataConfig
from quadriga.data import rl_dataset
from quadriga.data.files import read_table
from quadriga.data.rl_dataset import PromptMeter, prompt_lengths
from quadriga.data.token_counts import TokenCounter
from quadriga.data.tokenizing import ChatEncoder
from quadriga.errors import DataError

LENGTHS = [3, 9, 1, 30, 2]
EXPECTED = [length + 2 for length in LENGTHS]


class CountingEncoder(ChatEncoder):
    """Counts the texts that are tokenized."""

    num_texts = 0

    @property
    def counter(self):
        return self

    def bounds(self, texts: list[str], limit: int | None):
        self.num_texts += len(texts)
        return TokenCounter(self.tokenizer).bounds(texts, limit)


@pytest.fixture
def measure(tokenizer, tmp_path: Path):
    """Measure a file with a fresh encoder; returns the lengths and how many texts were tokenized."""

    def run(path: Path, num_workers: int = 1, **template_kwargs) -> tuple[list[int], int, list[DataError]]:
        encoder = CountingEncoder(tokenizer, template_kwargs)
        found, errors = prompt_lengths(
            read_table(path),
            PromptMeter(encoder, None, DataConfig()),
            cache_dir=tmp_path / "cache",
            num_workers=num_workers,
        )
        return found.tolist(), encoder.num_texts, errors

    return run


@pytest.fixture
def path(write, row) -> Path:
    return write("t.parquet", [row(length) for length in LENGTHS])


def only_entry(tmp_path: Path) -> Path:
    [entry] = (tmp_path / "cache" / "prompt_lengths").iterdir()
    return entry


def test_a_second_start_tokenizes_nothing(measure, path: Path):
    assert measure(path) == (EXPECTED, 5, [])
    assert measure(path) == (EXPECTED, 0, [])


def test_other_content_or_arguments_are_measured(measure, path: Path, write, row):
    measure(path)
    assert measure(path, shout=True) == ([length + 1 for length in EXPECTED], 5, [])
    write("t.parquet", [row(4)])
    assert measure(path) == ([6], 1, [])


def test_the_same_content_elsewhere_is_known(measure, path: Path):
    measure(path)
    assert measure(path.rename(path.with_name("moved.parquet"))) == (EXPECTED, 0, [])


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other rows", "not an archive"])
def test_a_damaged_entry_is_said_and_rebuilt(measure, path: Path, tmp_path: Path, damage: str, capsys):
    measure(path)
    entry = only_entry(tmp_path)
    content = bytearray(entry.read_bytes())
    if damage == "cut":
        entry.write_bytes(content[:-30])
    elif damage == "flip":
        # A byte of the array itself, well behind the headers of archive and array.
        at = content.index(np.int64(EXPECTED[0]).tobytes())
        content[at] ^= 1
        entry.write_bytes(content)
    elif damage == "other rows":
        with entry.open("wb") as file:
            np.savez(file, lengths=np.arange(3))
    else:
        entry.write_bytes(b"" if damage == "empty" else b"hello")
    assert measure(path) == (EXPECTED, 5, [])
    assert "is damaged" in capsys.readouterr().out
    assert measure(path) == (EXPECTED, 0, [])


def test_processes_give_what_one_gives(measure, path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rl_dataset, "BATCH_ROWS", 2)
    lengths, num_texts_here, _ = measure(path, num_workers=3)
    assert lengths == EXPECTED
    assert num_texts_here == 0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_prompt_that_is_none_names_file_and_row(measure, write, row, monkeypatch, num_workers: int):
    monkeypatch.setattr(rl_dataset, "BATCH_ROWS", 2)
    path = write("bad.jsonl", [row(), row(), row(), row(prompt=[])])
    for num_texts in (4 if num_workers == 1 else 0, 1):  # measured, and what was found at the next start
        lengths, num_measured, errors = measure(path, num_workers=num_workers)
        assert (lengths, num_measured) == ([4, 4, 4, rl_dataset.BAD], num_texts)
        assert [error.where for error in errors] == [f"{path} row 3, column 'prompt'"]


def test_a_cache_that_cannot_be_written(tokenizer, path: Path, tmp_path: Path, capsys):
    (tmp_path / "occupied").write_text("")
    meter = PromptMeter(ChatEncoder(tokenizer, {}), None, DataConfig())
    lengths, _ = prompt_lengths(read_table(path), meter, cache_dir=tmp_path / "occupied")
    assert lengths.tolist() == prompt_lengths(read_table(path), meter, cache_dir=tmp_path / "free")[0].tolist()
    assert "data.cache_dir: got" in (said := capsys.readouterr().out) and "measured at each start" in said
