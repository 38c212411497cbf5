# SPDX-License-Identifier: Apache-2.0
"""What a score function may return, and what it may not."""

import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from quadriga.rewards.outcome import error_outcome, read_outcome, read_outcomes


@pytest.mark.parametrize(
    "returned",
    [
        0.5,
        Fraction(1, 2),
        np.float32(0.5),
        np.array(0.5),
        torch.tensor(0.5),
        {"score": 0.5},
        {"score": np.float64(0.5)},
    ],
)
def test_numbers_of_every_kind_are_scores(returned):
    outcome = read_outcome(returned)
    assert (outcome.score, outcome.error, outcome.kind) == (0.5, "", "graded")
    assert type(outcome.score) is float


def test_a_bool_is_a_score():
    assert read_outcome(True).score == 1.0
    assert read_outcome(np.bool_(False)).error == ""


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("1.0", "returned str '1.0', expected a number"),
        (None, "returned None, expected a number"),
        (float("nan"), "returned nan, expected a finite number"),
        (float("-inf"), "returned -inf"),
        (1e39, "returned 1e+39, expected a finite number that float32 can hold"),
        (10**400, "too large for a float"),
        ([1.0], "returned list"),
        (torch.tensor([1.0, 0.0]), "returned Tensor tensor([1., 0.]), expected a number"),
        (1j, "returned complex"),
        ({"acc": 1.0}, "a dict with acc, expected one with 'score'"),
        ({"score": "good"}, "'score' str 'good'"),
        ({"score": np.nan}, "'score' nan"),
    ],
)
def test_what_is_no_number_is_an_error(returned, words):
    outcome = read_outcome(returned)
    assert words in outcome.error
    assert (outcome.score, outcome.kind) == (0.0, "invalid")


def test_the_rest_of_a_dict_becomes_plain_and_can_be_pickled():
    class Odd:
        def __str__(self):
            return "odd"

    returned = {
        "score": 1,
        "acc": np.float32(1),
        "parts": (np.arange(2), {"a": torch.ones(2)}),
        "x": Odd(),
        "f": None,
    }
    outcome = pickle.loads(pickle.dumps(read_outcome(returned)))
    assert outcome.extra == {
        "acc": 1.0,
        "parts": [[0, 1], {"a": [1.0, 1.0]}],
        "x": "odd",
        "f": None,
    }


def test_a_traceback_begins_in_the_grader():
    def grader():
        raise KeyError("answer")

    try:
        grader()
    except KeyError as error:
        outcome = error_outcome(error)
    assert outcome.kind == "raised"
    assert outcome.error.startswith("Traceback (most recent call last):")
    assert "in grader" in outcome.error
    assert "in test_a_traceback" not in outcome.error
    assert outcome.error.endswith("KeyError: 'answer'")


def test_a_traceback_of_megabytes_is_cut_in_the_middle():
    error = error_outcome(ValueError("w" * 3_000_000)).error
    assert error.startswith("ValueError: www") and len(error) < 8100
    assert "(2,992,012 characters are left out)" in error


def test_a_graders_own_limit_counts_as_timeout():
    assert error_outcome(TimeoutError("too hard")).kind == "timeout"


def test_a_batch_is_read_entry_by_entry():
    outcomes = read_outcomes([1, "x", {"score": 0.5, "acc": True}], 3)
    assert [outcome.kind for outcome in outcomes] == ["graded", "invalid", "graded"]
    assert [outcome.score for outcome in read_outcomes(np.array([0.25, 1.0]), 2)] == [0.25, 1.0]


@pytest.mark.parametrize("returned", [None, 1.0, "ab", [1.0], {0: 1.0, 1: 0.0}, iter([1, 2])])
def test_a_batch_of_the_wrong_shape_is_an_error_of_every_sample(returned):
    outcomes = read_outcomes(returned, 2)
    assert [outcome.kind for outcome in outcomes] == ["invalid"] * 2
    assert "expected a list of 2 scores" in outcomes[0].error
