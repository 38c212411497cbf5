# SPDX-License-Identifier: Apache-2.0
"""DAPO's mathematics, with and without symbols."""

import pytest

from quadriga.rewards.graders.math_dapo import compute_score


@pytest.mark.parametrize(
    ("response", "truth", "acc"),
    [
        ("think\nAnswer: 34", "34", 1),
        ("Answer: 3\nno:\nanswer: $34$.", "34", 1),
        ("Answer: 34\nno: Answer: 35", "34", 0),
        (r"**Answer:** \boxed{1,234}", "1234", 1),
        (r"so \boxed{204}", "204", 1),
        (r"Answer: x = 5", "5", 1),
        (r"Answer: 34\text{ cm}", "34cm", 1),
        (r"Answer: \dfrac{1}{2}", r"\frac{1}{2}", 1),
        ("Answer: .5", "0.5", 1),
        ("Answer: .5", "5", 0),
        ("**Answer:** .5**.", "0.5", 1),
        ("Answer: 3.", "3", 1),
        (r"Answer: 50\%", "50", 1),
        (r"Answer: 50%", r"50\%", 1),
        (r"Answer: 11\text{:}30", "11:30", 1),
        (r"Answer: \varnothing", r"\emptyset", 1),
        ("Answer: 7 3/4", "31/4", 1),
        ("Answer: 7 3/4", "73/4", 0),
        ("Answer: x >= 5", "5", 0),
        (r"Answer: \neq 5", "5", 0),
        ("it is 34", "34", 0),
        ("", "34", 0),
    ],
)
def test_texts_and_numbers(response, truth, acc):
    result = compute_score(response, truth, use_symbols=False)
    assert (result["acc"], result["score"]) == (acc, 1.0 if acc else -1.0)


def test_meaning_counts_where_math_verify_is_there():
    assert compute_score(r"Answer: $\frac{4}{8}$", "0.5")["score"] == 1.0
    assert compute_score(r"Answer: $\frac{4}{8}$", "0.5", use_symbols=False)["score"] == -1.0
    assert compute_score(r"Answer: $(x-1)(x+1)$", "x^2-1", wrong_score=0.0)["score"] == 1.0
    assert compute_score("Answer: x", "x^2-1", wrong_score=0.0)["score"] == 0.0
    assert compute_score("Answer: 7 3/4", "7.75")["score"] == 1.0
    for wrong, truth in ((r"\neq 5", "5"), ("MATH", "HTAM"), ("(2,1)", r"\{1,2\}")):
        assert compute_score(f"Answer: {wrong}", truth)["score"] == -1.0


@pytest.mark.parametrize("wrong_score", [-1.0, 0.0])
def test_a_response_that_cannot_be_evaluated_gets_what_a_wrong_one_gets(wrong_score):
    result = compute_score("Answer: $9^{9^{9^9}}$", "3", wrong_score=wrong_score)
    assert (result["score"], result["acc"]) == (wrong_score, 0.0)
    assert "digits" in result["ungradable"]
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("Answer: 3", "9^{9^{9^9}}")


def test_a_truth_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match="ground truth: got '  '"):
        compute_score("Answer: 3", "  ")
