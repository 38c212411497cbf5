# SPDX-License-Identifier: Apache-2.0
"""GSM8K, strict and flexible."""

import pytest

from quadriga.rewards.graders.gsm8k import compute_score

STRICT = [
    ("so 70 + 2.\n#### 72", "72", 1.0),
    ("#### 72.00", "72", 1.0),
    ("#### $1,234.", "1234", 1.0),
    ("####-5", "-5", 1.0),
    ("#### **72**", "72", 1.0),
    ("#### `$1,234`", "1234", 1.0),
    ("#### -$5 in all", "-5", 1.0),
    ("#### 71\nno, #### 72", "72", 1.0),
    ("#### 72\nno, #### 71", "72", 0.0),
    ("the answer is 72", "72", 0.0),
    ("#### the answer is 72", "72", 0.0),
    ("", "72", 0.0),
]


@pytest.mark.parametrize(("response", "truth", "score"), STRICT)
def test_strict_wants_the_mark(response, truth, score):
    assert compute_score(response, truth)["score"] == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("the answer is 72", "72", 1.0),
        ("72 apples, not 71", "72", 0.0),
        ("that is -$1,200.50", "-1200.5", 1.0),
        ("I do not know", "72", 0.0),
    ],
)
def test_flexible_takes_the_last_number(response, truth, score):
    assert compute_score(response, truth, method="flexible")["score"] == score


def test_the_truth_may_be_the_whole_worked_answer():
    truth = "She sold 48/2 = <<48/2=24>>24 clips.\n#### 1,072"
    assert compute_score("#### 1072", truth) == {"score": 1.0, "pred": "1072"}


def test_a_wrong_number_in_the_right_form_can_be_worth_something():
    assert compute_score("#### 3", "4", format_score=0.1) == {"score": 0.1, "pred": "3"}
    assert compute_score("3", "4", format_score=0.1) == {"score": 0.0, "pred": None}


def test_an_unreadable_truth_or_method_raises():
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("#### 3", "three")
    with pytest.raises(ValueError, match="'lenient'"):
        compute_score("#### 3", "3", method="lenient")
