# SPDX-License-Identifier: Apache-2.0
"""GSM8K from local files."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.errors import DataError
from quadriga_recipes.tasks import prepare_data


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(count: int, start: int = 0) -> list[dict]:
    return [{"question": f"q{i}", "answer": f"Think.\n#### 1,00{i}"} for i in range(start, start + count)]


def questions(path: Path) -> list[str]:
    return [row["extra_info"]["question"] for row in pq.read_table(path).to_pylist()]


def test_a_folder_with_train_and_test(tmp_path: Path):
    lines(tmp_path / "train.jsonl", make(4))
    pq.write_table(pa.Table.from_pylist(make(2, start=4)), tmp_path / "test-00000-of-00001.parquet")
    paths = prepare_data("gsm8k", tmp_path / "out", source=str(tmp_path))
    assert questions(paths["train"]) == ["q0", "q1", "q2", "q3"]
    assert questions(paths["val"]) == ["q4", "q5"]
    row = pq.read_table(paths["val"]).to_pylist()[1]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1005"}
    assert row["prompt"][0]["content"].startswith("q5\n\n")
    assert "####" in row["prompt"][0]["content"]
    assert row["extra_info"]["answer"] == "Think.\n#### 1,005"


def test_of_a_single_file_a_part_is_held_out(tmp_path: Path):
    source = lines(tmp_path / "data.jsonl", make(20))
    paths = prepare_data("gsm8k", tmp_path / "out", source=str(source), num_train=9, num_val=5, seed=3)
    train, val = questions(paths["train"]), questions(paths["val"])
    assert (len(train), len(val)) == (9, 5)
    assert not set(train) & set(val)
    tenth = prepare_data("gsm8k", tmp_path / "out", source=str(source))
    assert (len(questions(tenth["train"])), len(questions(tenth["val"]))) == (18, 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [({"question": "q", "answer": "no number"}, "row 0: .*ends in"), ({"question": "q"}, "expected a column 'answer'")],
)
def test_rows_that_are_not_gsm8k(tmp_path: Path, row: dict, message: str):
    with pytest.raises(DataError, match=message):
        prepare_data("gsm8k", tmp_path / "out", source=str(lines(tmp_path / "data.jsonl", [row])))


def test_a_folder_without_such_files(tmp_path: Path):
    lines(tmp_path / "train.jsonl", make(1))
    with pytest.raises(DataError, match=r"with train\.jsonl, expected a file, or a folder"):
        prepare_data("gsm8k", tmp_path / "out", source=str(tmp_path))
