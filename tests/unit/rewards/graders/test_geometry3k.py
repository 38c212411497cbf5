# SPDX-License-Identifier: Apache-2.0
"""Answer and form, weighted."""

import pytest

from quadriga.rewards.graders.geometry3k import compute_score


@pytest.mark.parametrize(
    ("response", "acc", "form"),
    [
        (r"<think>so</think> \boxed{2\sqrt{2}}", 1, 1),
        (r"\boxed{\sqrt{8}}", 1, 0),
        (r"<think>so</think> \boxed{3}", 0, 1),
        (r"<think>so</think> 2\sqrt{2}", 0, 0),
        ("", 0, 0),
    ],
)
def test_parts_and_sum(response, acc, form):
    result = compute_score(response, r"2\sqrt{2}")
    assert result["ungradable"] == ""
    assert (result["acc"], result["format"]) == (acc, form)
    assert result["score"] == pytest.approx(0.9 * acc + 0.1 * form)
    assert compute_score(response, r"2\sqrt{2}", format_weight=0.5)["score"] == pytest.approx(
        0.5 * acc + 0.5 * form
    )


def test_an_answer_that_cannot_be_evaluated_keeps_what_its_form_earns():
    result = compute_score(r"<think>so</think> \boxed{9^{9^{9^9}}}", "3")
    assert result["score"] == pytest.approx(0.1)
    assert "digits" in result["ungradable"]
