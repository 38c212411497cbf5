# SPDX-License-Identifier: Apache-2.0
"""Tasks of reasoning-gym: what is written can be graded by the library's own scorer."""

import json
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from quadriga.errors import DataError
from quadriga_recipes.reasoning_gym import encode_metadata
from quadriga_recipes.tasks import prepare_data

# Not imported where tests are collected, which every process does.
pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning_gym")


def read(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("task", ["chain_sum", "gsm_symbolic", "countdown"])
def test_the_librarys_scorer_grades_what_was_written(tmp_path: Path, task: str):
    paths = prepare_data(f"reasoning_gym:{task}", tmp_path, num_train=4, num_val=3)
    score = import_module("reasoning_gym").get_score_answer_fn(task)
    for row in read(paths["train"]) + read(paths["val"]):
        extra, answer = row["extra_info"], row["reward_model"]["ground_truth"]
        assert (row["data_source"], extra["task"]) == (f"reasoning_gym/{task}", task)
        assert row["prompt"][0]["content"].startswith(extra["question"])
        entry = {
            "question": extra["question"],
            "answer": answer,
            "metadata": json.loads(extra["metadata"]),
        }
        assert entry["metadata"]["source_dataset"] == task
        assert score(answer=answer, entry=entry) == 1.0
        assert score(answer="surely not", entry=entry) < 0.5


def test_validation_is_held_out_and_does_not_depend_on_the_seed(tmp_path: Path):
    contents = []
    for seed in (0, 0, 1):
        paths = prepare_data(
            "reasoning_gym:chain_sum", tmp_path, num_train=60, num_val=20, seed=seed
        )
        contents.append(
            [
                [row["extra_info"]["question"] for row in read(paths[split])]
                for split in ("train", "val")
            ]
        )
    first, again, other = contents
    assert first == again
    assert first[1] == other[1]
    assert first[0] != other[0]
    assert not set(first[0]) & set(first[1])
    assert len(set(first[1])) == 20


def test_values_that_json_does_not_know_become_text():
    entry = {"question": "q", "answer": "a", "metadata": {"share": Fraction(3, 4)}}
    assert encode_metadata(entry, lambda answer, entry: 1.0) == '{"share": "3/4"}'


def test_answers_that_only_a_scorer_can_tell_stay_empty(tmp_path: Path):
    paths = prepare_data("reasoning_gym:graph_color", tmp_path, num_train=2, num_val=2)
    assert [row["reward_model"]["ground_truth"] for row in read(paths["train"])] == [None, None]


def test_tuples_are_marked_only_where_the_scorer_minds():
    entry = {"question": "q", "answer": "a", "metadata": {"out": ((1, 2), [3]), "n": 1}}
    assert encode_metadata(entry, lambda answer, entry: 1.0) == '{"out": [[1, 2], [3]], "n": 1}'
    strict = encode_metadata(
        entry, lambda answer, entry: float(isinstance(entry["metadata"]["out"], tuple))
    )
    assert json.loads(strict)["out"] == {"__tuple__": [{"__tuple__": [1, 2]}, [3]]}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("chain_sums", "Did you mean .*chain_sum"),
        ("composite", "no such task"),
        ("zzzz", "There are ab,"),
    ],
)
def test_unknown_tasks(tmp_path: Path, task: str, message: str):
    with pytest.raises(DataError, match=message):
        prepare_data(f"reasoning_gym:{task}", tmp_path)
