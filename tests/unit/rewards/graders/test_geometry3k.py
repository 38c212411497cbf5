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
    assert (result["acc"], result["format"]) == (acc, form)
    assert result["score"] == pytest.approx(0.9 * acc + 0.1 * form)
    assert compute_score(response, r"2\sqrt{2}", format_weight=0.5)["score"] == pytest.approx(0.5 * acc + 0.5 * form)
