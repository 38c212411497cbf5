# SPDX-License-Identifier: Apache-2.0
"""Validation metrics against every draw enumerated, by name, and with prompts of unequal size."""

from collections import Counter
from itertools import combinations
from statistics import mean, pstdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.trainer.validate import majority_chances, majority_metrics, score_metrics, validation_metrics

SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.25, -1.0]), min_size=1, max_size=7)


def majority_score(draw: tuple[int, ...], answers: str, scores: list[float]) -> float:
    """The score of the most frequent answer of a draw; of several, the mean, since ties are broken evenly."""
    counts = Counter(answers[i] for i in draw)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return mean(mean(s for s, a in zip(scores, answers, strict=True) if a == winner) for winner in winners)


@settings(deadline=None, max_examples=40)
@given(SCORES)
def test_best_and_worst_equal_enumeration(scores: list[float]) -> None:
    """Mean and deviation of the maximum and the minimum over all subsets."""
    found = score_metrics([np.array(scores)])
    n = len(scores)
    assert found[f"mean@{n}"] == pytest.approx(mean(scores))
    sizes = {k for k in (2, 4) if k < n} | ({n} if n > 1 else set())
    assert {name for name in found if name.startswith("best")} == {
        f"best@{k}/{kind}" for k in sizes for kind in (("mean", "std") if k < n else ("mean",))
    }
    for k in sizes:
        for kind, pick in (("best", max), ("worst", min)):
            values = [pick(draw) for draw in combinations(scores, k)]
            assert found[f"{kind}@{k}/mean"] == pytest.approx(mean(values), abs=1e-12)
            if k < n:
                assert found[f"{kind}@{k}/std"] == pytest.approx(pstdev(values), abs=1e-7)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_majority_equals_enumeration(data: st.DataObject) -> None:
    """Over all subsets, ties broken evenly, answers with differing scores."""
    scores = data.draw(SCORES.filter(lambda values: len(values) > 1))
    n = len(scores)
    answers = data.draw(st.text("abcd", min_size=n, max_size=n))
    found = majority_metrics([np.array(scores)], [answers])
    for k in {2, 4, n}:
        if k <= n:
            values = [majority_score(draw, answers, scores) for draw in combinations(range(n), k)]
            assert found[f"maj@{k}/mean"] == pytest.approx(mean(values), abs=1e-12)


@pytest.mark.parametrize("counts", [(1,), (3, 3), (1, 2, 5), (1, 1, 1, 1), (2, 30, 32), (1,) * 20 + (44,)])
def test_majority_chances_sum_to_one(counts: tuple[int, ...]) -> None:
    """Somebody wins every draw, also of 64; all of the answers drawn, the most frequent one wins."""
    chances = majority_chances(counts)
    np.testing.assert_allclose(chances[1:].sum(1), 1.0, rtol=1e-10)
    winners = np.array(counts) == max(counts)
    np.testing.assert_allclose(chances[-1], winners / winners.sum(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(chances[1], np.array(counts) / sum(counts), rtol=1e-10)


def test_names_and_values() -> None:
    """Two data sources: 4 answers to 2 prompts, and 1 answer to 1; `acc` is the core where there is one."""
    metrics = validation_metrics(
        data_sources=["sums"] * 8 + ["songs"],
        uids=["p", "q"] * 4 + ["r"],
        variables={
            "reward": [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 3.0],
            "acc": [True, False, False, False, False, False, True, True, None],
            "language": ["en"] * 9,
        },
        predictions=["7", "1", "8", None, "8", None, "7", "2", None],
    )
    assert {name for name in metrics if name.startswith("val-core")} == {
        "val-core/sums/acc/mean@4",
        "val-core/sums/acc/best@4/mean",
        "val-core/sums/acc/maj@4/mean",
        "val-core/songs/reward/mean@1",
    }
    assert metrics["val-core/sums/acc/mean@4"] == 0.375 and metrics["val-core/songs/reward/mean@1"] == 3.0
    assert metrics["val-aux/sums/reward/best@2/mean"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert metrics["val-aux/sums/reward/worst@2/mean"] == pytest.approx((1 / 6 + 0) / 2)
    assert metrics["val-core/sums/acc/maj@4/mean"] == pytest.approx((0.5 + 0.0) / 2)
    assert metrics["val-aux/sums/acc/std@4"] == pytest.approx((0.5 + 0.1875**0.5) / 2)
    assert not any("language" in name or "songs/acc" in name or "songs/reward/maj" in name for name in metrics)
    assert "val-aux/sums/acc/best@2/std" in metrics and "val-aux/sums/acc/best@4/std" not in metrics


def test_prompts_of_unequal_size() -> None:
    """3, 2 and 1 answers: N is 3; all count in the mean, the first two in k = 2 and std, the first in k = 3."""
    found = score_metrics([np.array([0.0, 0.0, 1.0]), np.array([0.0, 1.0]), np.array([1.0])])
    assert found["mean@3"] == pytest.approx((1 / 3 + 1 / 2 + 1) / 3)
    assert found["std@3"] == pytest.approx(((2 / 9) ** 0.5 + 0.5) / 2)
    assert found["best@2/mean"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["best@3/mean"] == 1.0 and found["worst@3/mean"] == 0.0
    majority = majority_metrics([np.array([0.0, 0.0, 1.0]), np.array([0.0, 1.0])], ["aab", "ab"])
    assert majority["maj@3/mean"] == 0.0
    assert majority["maj@2/mean"] == pytest.approx(((1 / 3 * 0 + 2 / 3 * 0.5) + 0.5) / 2)


def test_missing_numbers_are_left_out() -> None:
    """An answer without a number of that name is no answer, and NaN does not spread."""
    metrics = validation_metrics(["s"] * 3, ["p"] * 3, {"reward": [1.0, None, float("nan")]})
    assert metrics == {"val-core/s/reward/mean@1": 1.0}


def test_no_random_state_is_touched() -> None:
    """The same call gives the same numbers, and the global generator goes on as if there had been none."""
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    arguments = (["s"] * 6, [1, 1, 1, 2, 2, 2], {"reward": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}, list("abbccc"))
    assert validation_metrics(*arguments) == validation_metrics(*arguments)
    assert np.random.rand() == expected
