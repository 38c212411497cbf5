# SPDX-License-Identifier: Apache-2.0
"""Word for word."""

import pytest

from quadriga.rewards.graders.exact_match import compute_score


def test_only_blanks_are_forgiven():
    assert compute_score("  New \n York ", "New York") == {"score": 1.0, "pred": "New York"}
    assert compute_score("new york", "New York")["score"] == 0.0
    assert compute_score("new york", "New York", ignore_case=True)["score"] == 1.0
    assert compute_score("New York!", "New York")["score"] == 0.0


def test_several_answers_may_be_right():
    assert compute_score("NYC", ["New York", "NYC"])["score"] == 1.0


@pytest.mark.parametrize("truth", [None, 5, [], ["a", 5]])
def test_a_truth_that_is_no_text_raises(truth):
    with pytest.raises((ValueError, TypeError)):
        compute_score("a", truth)
