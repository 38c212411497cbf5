# SPDX-License-Identifier: Apache-2.0
"""Short answers: the three metrics, by hand."""

import pytest

from quadriga.rewards.graders.question_answering import compute_score, normalize


def test_values_by_hand():
    """Answer "president barack h obama" (4 words), accepted "barack obama" (2): 2 in common, F1 = 2*2/(4+2) = 2/3."""
    result = compute_score(
        "so <answer>President Barack H. Obama</answer>", {"target": ["Barack Obama", "Obama"]}
    )
    assert (result["em"], result["sub_match"], result["score"]) == (0.0, 1.0, 0.0)
    assert result["f1"] == pytest.approx(2 / 3)
    assert result["pred"] == "president barack h obama"


@pytest.mark.parametrize(
    ("response", "truth", "em", "sub_match"),
    [
        ("<answer>The Beatles!</answer>", "beatles", 1, 1),
        ("<answer>x</answer> <answer> Paris </answer>", ["Paris"], 1, 1),
        ("<answer>Paris</answer> <answer>London</answer>", ["Paris"], 0, 0),
        ("<answer>Parisian</answer>", "Paris", 0, 0),
        ("Paris", "Paris", 0, 0),
        ("<answer></answer>", "Paris", 0, 0),
    ],
)
def test_matches(response, truth, em, sub_match):
    result = compute_score(response, truth)
    assert (result["em"], result["sub_match"]) == (em, sub_match)


def test_words_are_counted():
    assert compute_score("<answer>c c b</answer>", "c b b")["f1"] == pytest.approx(2 * 2 / 6)
    assert compute_score("<answer>x</answer>", "y")["f1"] == 0.0
    assert normalize("The  U.S. of\nA") == "us of"


def test_the_metric_is_chosen():
    response = "<answer>in Paris</answer>"
    assert compute_score(response, "Paris", metric="sub_match")["score"] == 1.0
    assert compute_score(response, "Paris", metric="f1")["score"] == pytest.approx(2 / 3)
    assert compute_score(response, "Rome", format_score=0.1)["score"] == 0.1
    with pytest.raises(ValueError, match="'em', 'sub_match' or 'f1'"):
        compute_score(response, "Paris", metric="bleu")


@pytest.mark.parametrize("truth", [None, [], {"answer": "x"}, [3], "", ["the"]])
def test_a_truth_without_an_answer_is_an_error(truth):
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("<answer>x</answer>", truth)
