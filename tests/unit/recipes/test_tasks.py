# SPDX-License-Identifier: Apache-2.0
"""`prepare_data`: the quickstart's task, names and options that are wrong, and the schema of the files."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from quadriga.errors import DataError
from quadriga_recipes import largest_number
from quadriga_recipes.tasks import prepare_data


def read(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def texts(path: Path) -> list[str]:
    return [row["prompt"][0]["content"] for row in read(path)]


def test_a_row_of_the_quickstart(tmp_path: Path):
    paths = prepare_data("largest", tmp_path, num_train=5, num_val=3)
    assert {split: path.name for split, path in paths.items()} == {
        "train": "train.parquet",
        "val": "val.parquet",
    }
    rows = read(paths["train"])
    assert [row["extra_info"] for row in rows] == [{"split": "train", "index": i} for i in range(5)]
    for row in rows:
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        [message] = row["prompt"]
        pattern = r"Which is the largest: (\d\d), (\d\d) or (\d\d)\? Answer with just the number\."
        numbers = [int(number) for number in re.fullmatch(pattern, message["content"]).groups()]
        assert len(set(numbers)) == 3
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(max(numbers))}
        assert (row["data_source"], message["role"]) == ("quadriga/largest", "user")


def test_validation_is_held_out_and_does_not_depend_on_the_seed(tmp_path: Path):
    runs = [
        prepare_data("largest", tmp_path / str(seed), num_train=3000, num_val=200, seed=seed)
        for seed in (0, 1)
    ]
    val = [texts(run["val"]) for run in runs]
    train = [texts(run["train"]) for run in runs]
    assert val[0] == val[1]
    assert train[0] != train[1]
    for part in train:
        assert len(set(part)) == 3000
        assert not set(part) & set(val[0])
    assert (
        texts(
            prepare_data("largest", tmp_path / "again", num_train=3000, num_val=200, seed=1)[
                "train"
            ]
        )
        == train[1]
    )


def test_held_out_even_where_training_takes_everything_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(largest_number, "_COUNT", 5)
    monkeypatch.setattr(largest_number, "NUM_PROMPTS", 60)
    train, val = largest_number.draw_problems(num_train=50, num_val=10, seed=7)
    assert len({problem.text for problem in [*train, *val]}) == 60
    with pytest.raises(DataError, match="at most 60 together"):
        largest_number.draw_problems(num_train=51, num_val=10, seed=7)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm9k", {}, "one of largest, gsm8k, gsm8k_tools, math, .*, reasoning_gym:TASK"),
        ("largest", {"source": "x"}, "the rows are generated"),
        ("largest", {"num_val": 0}, "--num-val 0"),
    ],
)
def test_wrong_names_and_options(tmp_path: Path, name: str, options: dict, message: str):
    with pytest.raises(DataError, match=message):
        prepare_data(name, tmp_path, **options)


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"prepare data: got .*file"):
        prepare_data("largest", tmp_path / "file", num_train=1, num_val=1)
