# SPDX-License-Identifier: Apache-2.0
"""Responses as rows for people, and as files that are whole; prompts repeated for their responses."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.config import DataConfig
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.redact import HIDDEN
from quadriga.rewards import RewardManager, RewardOutput
from quadriga.rewards.by_name import ROW
from quadriga.trainer.responses import grade, repeat_prompts, sample_rows, write_samples


class Gives(RewardManager):
    """The same rewards for every batch."""

    def __init__(self, output: RewardOutput) -> None:
        self.output = output

    def __call__(self, data: DataProto) -> RewardOutput:
        return self.output


def test_rows_hold_texts_without_padding_and_special_tokens(
    answers: DataProto, graded: Callable, tokenizer: object
) -> None:
    grade(Gives(graded([1.0, 0.5, 0.0], acc=[1, 0, None])), answers)
    rows = sample_rows(answers, tokenizer, DataConfig())
    assert rows[0] == {
        "uid": "p",
        "data_source": "x",
        "input": "a",
        "output": "bc",
        "output_with_special_tokens": "bci",
        "ground_truth": "bc",
        "score": 1.0,
        "acc": 1,
    }
    assert [(row["input"], row["output"], row["ground_truth"]) for row in rows[1:]] == [
        ("a", "b", "bc"),
        ("ab", "c", None),
    ]


def test_grader_cannot_overwrite_what_was_asked_and_answered(
    answers: DataProto, graded: Callable, tokenizer: object
) -> None:
    """A grader may return any name beside its score."""
    grade(Gives(graded([1.0, 0.5, 0.0], output=["x", "y", "z"])), answers)
    rows = sample_rows(answers, tokenizer, DataConfig())
    assert rows[0]["output"] == "bc"
    assert rows[0]["reward/output"] == "x"


def test_rows_tell_of_conversations(
    answers: DataProto, graded: Callable, tokenizer: object
) -> None:
    answers.non_tensor_batch["num_turns"] = np.array([2, 4, 3], dtype=object)
    answers.non_tensor_batch["finish_reason"] = np.array(["stop", "length", "stop"], dtype=object)
    grade(Gives(graded([1.0, 0.5, 0.0])), answers)
    rows = sample_rows(answers, tokenizer, DataConfig())
    assert [(row["num_turns"], row["finish_reason"]) for row in rows] == [
        (2, "stop"),
        (4, "length"),
        (3, "stop"),
    ]


def test_rows_have_the_columns_that_were_moved_into_extra_info(
    answers: DataProto, graded: Callable, tokenizer: object
) -> None:
    facts = {"uid": "mine", "values": [1], "split": "train"}
    answers.non_tensor_batch["extra_info"] = object_array([facts, {}, None])
    grade(Gives(graded([1.0, 0.5, 0.0])), answers)
    first, second, third = sample_rows(answers, tokenizer, DataConfig())
    assert (first["uid"], first["data/uid"], first["values"]) == ("p", "mine", [1])
    assert "split" not in first
    assert {"values", "data/uid"}.isdisjoint([*second, *third])
    assert first["row"] == {"extra_info": {"split": "train"}} and "row" not in second


def test_rows_keep_the_columns_of_the_data_file(
    answers: DataProto, graded: Callable, tokenizer: object
) -> None:
    """Without pictures and secrets; null in a file that has other columns than its neighbours is left out."""
    columns = answers.non_tensor_batch
    columns["answer"] = object_array(["5", None, np.array([6, 7])])
    columns["images"] = object_array([[{"bytes": b"png"}], None, None])
    columns["source"] = object_array([{"api_key": "sk-1", "raw": b"png"}, None, None])
    # The reward functions of a Python program find all columns here.
    columns["extra_info"] = object_array([{ROW: {"answer": "5"}}, None, None])
    grade(Gives(graded([1.0, 0.5, 0.0])), answers)
    first, second, third = sample_rows(answers, tokenizer, DataConfig())
    assert first["row"] == {"answer": "5", "source": {"api_key": HIDDEN, "raw": "<bytes>"}}
    assert "row" not in second and third["row"] == {"answer": [6, 7]}


def test_file_has_a_line_for_each_row(tmp_path: Path) -> None:
    """Whatever graders return is written: numpy's numbers and arrays, texts of any language, objects by their text."""
    rows = [
        {"score": np.float32(0.5), "tokens": np.arange(2), "text": "größer\nals"},
        {
            "score": 1.0,
            "path": Path("x"),
            "rate": float("nan"),
            "nested": {"rates": [float("inf"), np.float64("-inf")]},
        },
    ]
    path = write_samples(tmp_path / "deep" / "er", 7, rows)
    assert path == tmp_path / "deep" / "er" / "7.jsonl"
    # Strict JSON, which has no word for NaN.
    read = [
        json.loads(line, parse_constant=pytest.fail)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert read == [
        {"score": 0.5, "tokens": [0, 1], "text": "größer\nals", "step": 7},
        {
            "score": 1.0,
            "path": "x",
            "rate": "NaN",
            "nested": {"rates": ["Infinity", "-Infinity"]},
            "step": 7,
        },
    ]
    assert [entry.name for entry in path.parent.iterdir()] == ["7.jsonl"]


def test_later_rows_of_a_step_replace_earlier_ones(tmp_path: Path) -> None:
    """A resumed run writes the steps behind its checkpoint again."""
    write_samples(tmp_path, 1, [{"score": 0.0}, {"score": 0.0}])
    path = write_samples(tmp_path, 1, [{"score": 1.0}])
    assert [json.loads(line)["score"] for line in path.read_text().splitlines()] == [1.0]


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"rollout_data_dir .*got .*below .*created and written"):
        write_samples(tmp_path / "file" / "below", 1, [{"score": 1.0}])


def test_samples_are_numbered_within_their_prompt() -> None:
    prompts = DataProto.from_dict({"x": torch.tensor([7, 8])}, {"uid": ["a", "b"]})
    samples = repeat_prompts(prompts, 3)
    assert samples.batch["x"].tolist() == [7, 7, 7, 8, 8, 8]
    assert samples.non_tensor_batch["sample_index"].tolist() == [0, 1, 2, 0, 1, 2]
    assert samples.non_tensor_batch["sample_index"].dtype == np.dtype(object)
    assert "sample_index" not in prompts.non_tensor_batch
