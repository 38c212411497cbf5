# SPDX-License-Identifier: Apache-2.0
"""Graders under verl's names: its arguments, its returns."""

import pytest

from quadriga_verl.shim import scores


@pytest.mark.parametrize(
    ("data_source", "response", "truth", "expected"),
    [
        ("openai/gsm8k", "so #### 1,234", "1234", 1.0),
        ("openai/gsm8k", "so 1234", "1234", 0.0),
        ("lighteval/MATH", r"is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("math", "Answer: 5", "5", {"score": 1.0, "acc": True, "pred": "5"}),
        ("math_dapo_reasoning", "Answer: 5", "6", {"score": -1.0, "acc": False, "pred": "5"}),
        ("searchR1_nq", "<answer>The Nile</answer>", {"target": ["Nile"]}, 1.0),
    ],
)
def test_by_data_source(data_source: str, response: str, truth: object, expected: object) -> None:
    found = scores.default_compute_score(data_source, response, truth)
    if isinstance(found, dict):
        found = {**found, "acc": bool(found["acc"])}
    assert found == expected


def test_a_data_source_without_a_grader() -> None:
    with pytest.raises(NotImplementedError, match="got 'poems'"):
        scores.default_compute_score("poems", "a", "b")


def test_boxes() -> None:
    text = r"first \boxed{1}, then \boxed{\frac{1}{2}}"
    assert scores.last_boxed_only_string(text) == r"\boxed{\frac{1}{2}}"
    assert scores.last_boxed_only_string("none") is None
    for boxed in (r"\boxed{\frac{1}{2}}", r"\boxed \frac{1}{2}", r"\fbox{\frac{1}{2}}"):
        assert scores.remove_boxed(boxed) == r"\frac{1}{2}"
    with pytest.raises(ValueError, match="got '5'"):
        scores.remove_boxed("5")


def test_answers() -> None:
    assert scores.gsm8k_extract_solution("#### 1,000") == "1000"
    assert scores.gsm8k_extract_solution("1000") is None
    assert scores.gsm8k_compute_score("#### 3", "4", format_score=0.1) == 0.1
    assert scores.is_equiv(r"\frac{1}{2}", "0.5") and not scores.is_equiv("1", "2")
    assert scores.is_equiv(None, None) and not scores.is_equiv(None, "1")
    assert scores.math_compute_score("the answer is 5", "5") == 0.0  # no box
    assert scores.math_verify_compute_score("the answer is 5", "5") == 1.0
    assert scores.math_dapo_verify(r"so \boxed{7}", "7", True) == (True, "7")
    assert scores.em_check("The Nile", ["nile"]) and not scores.em_check("the Nile river", ["nile"])
    assert scores.subem_check("the Nile river", ["nile"])
    form = r"<think> t </think> \boxed{5}"
    assert scores.geo3k_compute_score(form, "5") == 1.0
    assert scores.geo3k_compute_score("5", "5", use_boxed=False) == pytest.approx(0.9)
