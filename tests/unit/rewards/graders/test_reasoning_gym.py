# SPDX-License-Identifier: Apache-2.0
"""The library's own scorers, reached through a row's extra_info."""

import json
from importlib import import_module

import pytest

import quadriga.rewards.graders.reasoning_gym as grader
from quadriga.rewards.graders.reasoning_gym import MissingKeyError, compute_score
from quadriga_recipes.reasoning_gym import encode_metadata


def entry_of(task, seed=3):
    # Not imported where tests are collected, which every process does.
    return import_module("reasoning_gym").create_dataset(task, size=1, seed=seed)[0]


def score_of(task):
    return import_module("reasoning_gym").get_score_answer_fn(task)


@pytest.fixture(scope="module")
def countdown():
    return entry_of("countdown", seed=1)


def test_the_task_decides_what_is_right(countdown):
    numbers, target = countdown["metadata"]["numbers"], countdown["metadata"]["target"]
    other_form = f"({countdown['answer']}) + 0*{numbers[0]}"
    extra_info = {"entry": countdown}
    right = compute_score(
        f"I try <answer>{countdown['answer']}</answer>", None, extra_info, task="countdown"
    )
    assert right == {"score": 1.0, "pred": countdown["answer"]}
    # A number used twice breaks the rules of this task, though the value is right: only the library's scorer can know.
    assert eval(other_form) == target
    assert (
        compute_score(f"<answer>{other_form}</answer>", None, extra_info, task="countdown")["score"]
        < 1.0
    )


def test_a_row_may_hold_json_or_metadata_only(countdown):
    answer = countdown["answer"]
    for extra_info in (
        {"entry": json.dumps(countdown)},
        {"metadata": json.dumps(countdown["metadata"]), "index": 0},
        {"metadata": countdown["metadata"]},
    ):
        assert compute_score(answer, answer, extra_info)["score"] == 1.0


def test_without_tags_the_whole_response_is_the_answer(countdown):
    assert (
        compute_score(f" {countdown['answer']}\n", None, {"entry": countdown})["pred"]
        == countdown["answer"]
    )


@pytest.mark.parametrize("extra_info", [None, {"index": 3}, {"entry": "[1]"}])
def test_a_row_without_an_entry_raises(extra_info):
    with pytest.raises(ValueError, match="extra_info"):
        compute_score("5", "5", extra_info, task="countdown")


@pytest.mark.parametrize("task", ["arc_agi", "rearc", "countdown"])
def test_the_reference_answer_of_a_prepared_row_scores_one(task):
    """Two of these tasks compare tuples, which JSON does not have."""
    entry = entry_of(task)
    metadata = encode_metadata(entry, score_of(task))
    assert ("__tuple__" in metadata) == (task != "countdown")
    extra_info = {"question": entry["question"], "metadata": metadata}
    assert (
        compute_score(
            f"<answer>{entry['answer']}</answer>", entry["answer"], extra_info, task=task
        )["score"]
        == 1.0
    )
    assert (
        compute_score("<answer>0 0</answer>", entry["answer"], extra_info, task=task)["score"] < 0.5
    )


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("prime_factorization", "foo bar"),
        ("prime_factorization", "5 × 7 and so on"),
        ("coin_flip", "1e400"),
        ("game_of_life", "{}"),
        ("boxnet", "[[1, 2]]"),
        ("boxnet", "null"),
    ],
)
def test_an_answer_that_a_scorer_cannot_parse_is_wrong(task, answer):
    entry = entry_of(task)
    # Without this the test would prove nothing.
    with pytest.raises((ValueError, TypeError, OverflowError, KeyError, AttributeError)):
        score_of(task)(answer=answer, entry=entry)
    assert compute_score(f"<answer>{answer}</answer>", None, {"entry": entry}, task=task) == {
        "score": 0.0,
        "pred": answer,
    }


@pytest.mark.parametrize("answer", ["[[1, 2]]", "{}"])
def test_a_missing_entry_of_the_metadata_is_not_the_answers_fault(answer):
    with pytest.raises(MissingKeyError, match="initial_state"):
        compute_score(answer, None, {"metadata": {"row_num": 1}}, task="boxnet")
    with pytest.raises(MissingKeyError, match="metadata"):
        compute_score(answer, None, {"entry": {"question": "?", "answer": None}}, task="boxnet")


def test_a_row_whose_own_answer_cannot_be_parsed_is_not_the_answers_fault():
    entry = entry_of("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        compute_score("foo", None, {"entry": {**entry, "answer": "seven"}})
    with pytest.raises(AttributeError):
        compute_score("[[1, 2]]", None, {"metadata": {"initial_state": 3}}, task="boxnet")


def test_an_unknown_task_raises(countdown):
    with pytest.raises(ValueError, match="no_such_task"):
        compute_score("5", "5", {"entry": countdown}, task="no_such_task")


def test_an_answer_that_takes_its_scorer_too_long_is_wrong_and_an_entry_that_does_raises(
    monkeypatch,
):
    def score(answer, entry):
        while answer == "hard":
            pass
        return 1.0

    monkeypatch.setattr(grader, "_scorer", lambda task: score)
    monkeypatch.setattr(grader, "CPU_LIMIT_S", 0.1)
    entry = {"answer": "1", "metadata": {"source_dataset": "any"}}
    graded = compute_score("hard", None, {"entry": entry})
    assert (graded["score"], graded["ungradable"]) == (
        0.0,
        "CPULimitError: it took more than 0.1 s of CPU time",
    )
    with pytest.raises(ValueError, match="whose own answer cannot be scored"):
        compute_score("hard", None, {"entry": entry | {"answer": "hard"}})
