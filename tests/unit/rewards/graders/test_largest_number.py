# SPDX-License-Identifier: Apache-2.0
"""The quickstart's grader."""

import pytest

from quadriga.rewards.graders.largest_number import compute_score


@pytest.mark.parametrize(
    ("response", "score", "pred"),
    [
        ("82", 1.0, "82"),
        ("The largest is 82.", 1.0, "82"),
        ("27, 82, 18: it is **82**", 1.0, "82"),
        ("82 is larger than 27", 0.0, "27"),
        ("-82", 0.0, "-82"),
        ("828", 0.0, "828"),
        ("eighty-two", 0.0, None),
        ("", 0.0, None),
    ],
)
def test_the_last_number_decides(response, score, pred):
    assert compute_score(response, "82") == {"score": score, "pred": pred}
