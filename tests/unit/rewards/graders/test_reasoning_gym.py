# SPDX-License-Identifier: Apache-2.0
"""The library's own scorers, reached through a row's extra_info."""

import json

import pytest
from reasoning_gym import create_dataset

from quadriga.rewards.graders.reasoning_gym import compute_score


@pytest.fixture(scope="module")
def countdown():
    return create_dataset("countdown", size=1, seed=1)[0]


def test_the_task_decides_what_is_right(countdown):
    numbers, target = countdown["metadata"]["numbers"], countdown["metadata"]["target"]
    other_form = f"({countdown['answer']}) + 0*{numbers[0]}"
    extra_info = {"entry": countdown}
    right = compute_score(f"I try <answer>{countdown['answer']}</answer>", None, extra_info, task="countdown")
    assert right == {"score": 1.0, "pred": countdown["answer"]}
    # A number used twice breaks the rules of this task, though the value is right: only the library's scorer can know.
    assert eval(other_form) == target
    assert compute_score(f"<answer>{other_form}</answer>", None, extra_info, task="countdown")["score"] < 1.0


def test_a_row_may_hold_json_or_metadata_only(countdown):
    answer = countdown["answer"]
    for extra_info in (
        {"entry": json.dumps(countdown)},
        {"metadata": json.dumps(countdown["metadata"]), "index": 0},
        {"metadata": countdown["metadata"]},
    ):
        assert compute_score(answer, answer, extra_info)["score"] == 1.0


def test_without_tags_the_whole_response_is_the_answer(countdown):
    assert compute_score(f" {countdown['answer']}\n", None, {"entry": countdown})["pred"] == countdown["answer"]


@pytest.mark.parametrize("extra_info", [None, {"index": 3}, {"entry": "[1]"}])
def test_a_row_without_an_entry_raises(extra_info):
    with pytest.raises(ValueError, match="extra_info"):
        compute_score("5", "5", extra_info, task="countdown")


def test_an_unknown_task_raises(countdown):
    with pytest.raises(ValueError, match="no_such_task"):
        compute_score("5", "5", {"entry": countdown}, task="no_such_task")
