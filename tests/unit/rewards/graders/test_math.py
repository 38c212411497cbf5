# SPDX-License-Identifier: Apache-2.0
"""Answers compared by meaning.

Not shown here: that math-verify is right about every form of mathematics; its own tests do that.
"""

import threading

import pytest

import quadriga.rewards.graders.math as grader
from quadriga.rewards.graders.math import compute_score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"The answer is $\boxed{\frac{1}{2}}$. Check: 3 + 4 = 7.", "0.5", 1.0),
        (r"\boxed{-\frac{3}{4}}", "-0.75", 1.0),
        (r"\boxed{-\frac{3}{4}}", "0.75", 0.0),
        (r"\boxed{\$1,234}", "1234", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"\boxed{x^2-1}", r"$(x-1)(x+1)$", 1.0),
        (r"\boxed{3}? No, wait: \boxed{4}", r"\boxed{4}", 1.0),
        (r"\boxed{3} and \boxed{4}", "3", 0.0),
        (r"\boxed{3}, so \boxed{\frac{4", "3", 0.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        ("in all $\\frac{8}{4}$ apples", "2", 1.0),
        ("so the result is 42", "42", 1.0),
        ("I do not know", "42", 0.0),
        (r"\boxed{}", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_equal_meaning_is_right(response, truth, score):
    assert compute_score(response, truth)["score"] == score


@pytest.mark.parametrize(
    ("one", "other", "score"),
    [
        (r"50\%", "50", 1.0),
        ("50%", r"50\%", 1.0),
        ("3.", "3", 1.0),
        ("7 3/4", "7.75", 1.0),
        ("-7 3/4", "-7.75", 1.0),
        ("7 3/4", "73/4", 0.0),
        (r"\emptyset", r"\varnothing", 1.0),
        (r"11\text{:}30", "11:30", 1.0),
        (r"\neq 5", "5", 0.0),
        (r"\neq 5", r"\ne 5", 1.0),
        (r"x \neq 5", r"x \ne 5", 1.0),
        ("MATH", "HTAM", 0.0),
        ("MATH", r"\text{math}", 1.0),
        ("xyz", "zyx", 1.0),
        ("(2,1)", r"\{1,2\}", 0.0),
        ("(1,2)", r"\{1,2\}", 0.0),
        ("2, 1", r"\{1,2\}", 1.0),
        (r"\left(2, 1\right)", "(2,1)", 1.0),
    ],
)
def test_forms_are_read_alike_on_both_sides(one, other, score):
    assert compute_score(rf"\boxed{{{one}}}", other)["score"] == score
    assert compute_score(rf"\boxed{{{other}}}", one)["score"] == score


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"\frac{1}{2006!}", r"\frac{1}{2004!}", 0.0),
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}", 0.0),
        (r"2^{-99}", r"\frac{1}{2^{99}}", 1.0),
        (r"\{1, \frac{1}{2^{98}}\}", r"\{1, \frac{1}{2^{99}}\}", 0.0),
        ("0.0000001", "0.0000002", 0.0),
        ("0.000333", r"\frac{1}{3000}", 1.0),
        ("0.333333", r"\frac{1}{3}", 1.0),
    ],
)
def test_small_numbers_are_told_apart(answer, truth, score):
    assert compute_score(rf"\boxed{{{answer}}}", truth)["score"] == score


def test_equal_numbers_are_the_same_vote():
    assert (
        compute_score(r"\boxed{\frac{1}{2}}", "1")["pred"]
        == compute_score(r"\boxed{0.5}", "1")["pred"]
        == "0.5"
    )
    assert compute_score(r"\boxed{x + 1}", "1")["pred"] == "x + 1"
    assert compute_score("nothing", "1")["pred"] is None


def test_a_truth_that_is_no_mathematics_raises():
    with pytest.raises(ValueError, match="ground truth: got ''"):
        compute_score(r"\boxed{1}", "")


@pytest.mark.parametrize(
    ("answer", "truth", "reason"),
    [
        (r"9^{9^{9^{9}}}", "3", "digits"),
        (r"2^{10^9} \mod 7", "2", "digits"),
        ("-" * 3000 + "1", "1", "operators"),
        ("(" * 40 + "1" + ")" * 40, "1", "nested"),
        ("1:00", "12:00", "nan or zoo"),
    ],
)
@pytest.mark.parametrize("form", ["\\boxed{%s}", "so it is $%s$"])
def test_a_response_that_cannot_be_evaluated_is_a_wrong_answer(answer, truth, reason, form):
    result = compute_score(form.replace("%s", answer), truth)
    assert result["score"] == 0.0
    assert reason in result["ungradable"]


def test_an_unused_expression_that_cannot_be_evaluated_costs_nothing():
    assert compute_score("as $9^{9^{9^9}}$ is odd, the answer is $3$", "3")["score"] == 1.0


def test_a_response_that_takes_too_much_cpu_time_is_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(grader, "CPU_LIMIT_S", 0.3)
    result = compute_score(r"\boxed{(a+b+c+d+e+f)^{150}}", "x^2+1")
    assert (result["score"], result["ungradable"]) == (
        0.0,
        "CPULimitError: it took more than 0.3 s of CPU time",
    )


@pytest.mark.parametrize("truth", [r"9^{9^{9^{9}}}", "(" * 40 + "1" + ")" * 40])
def test_a_truth_that_cannot_be_evaluated_raises(truth):
    with pytest.raises(ValueError, match="ground truth: got"):
        compute_score(r"\boxed{1}", truth)


def test_a_thread_can_grade_too():
    results = []
    thread = threading.Thread(
        target=lambda: results.append(compute_score(r"\boxed{\frac{2}{4}}", "0.5")["score"])
    )
    thread.start()
    thread.join()
    assert results == [1.0]
