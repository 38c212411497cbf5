# SPDX-License-Identifier: Apache-2.0
"""The distance between the log-probabilities of trainer and rollout: values by hand, what lies outside the mask."""

from math import log

import pytest
import torch

from quadriga.algorithms.mismatch import log_prob_mismatch

NAN = float("nan")


def test_by_hand() -> None:
    """Probabilities 1/2, 1/4, 1/5 against 1/4, 1/4, 2/5: the first and the last are off by a factor of two."""
    ours = torch.tensor([[0.5, 0.25, NAN], [0.2, NAN, NAN]]).log()
    theirs = torch.tensor([[0.25, 0.25, NAN], [0.4, NAN, NAN]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert log_prob_mismatch(ours, theirs, mask) == {
        "log_prob_diff_mean": pytest.approx(2 * log(2) / 3),
        "log_prob_diff_max": pytest.approx(log(2)),
        "prob_diff_mean": pytest.approx((0.25 + 0.2) / 3),
    }


def test_the_same_numbers_are_no_mismatch() -> None:
    """Nor does it matter which side is which, in which dtype the mask is, or that one side has a gradient."""
    ours = torch.tensor([[-1.0, -2.0, -30.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True]])
    assert set(log_prob_mismatch(ours, ours.detach().clone(), mask).values()) == {0.0}
    other = torch.tensor([[-1.5, -2.0, -29.0]])
    assert log_prob_mismatch(ours, other, mask) == log_prob_mismatch(other, ours, mask.float())


def test_one_token_far_off_shows_in_the_maximum() -> None:
    """A difference of 20 nats between two tokens that never happen hardly moves the probabilities."""
    ours, theirs = torch.full((1, 10), -1.0), torch.full((1, 10), -1.0)
    ours[0, 3], theirs[0, 3] = -20.0, -40.0
    found = log_prob_mismatch(ours, theirs, torch.ones(1, 10))
    assert found["log_prob_diff_max"] == 20.0 and found["log_prob_diff_mean"] == 2.0
    assert 0 < found["prob_diff_mean"] < 1e-9


def test_an_empty_mask_gives_zeros() -> None:
    """A batch without a token to learn from."""
    nothing = torch.full((2, 3), NAN)
    assert log_prob_mismatch(nothing, nothing, torch.zeros(2, 3)) == {
        "log_prob_diff_mean": 0.0,
        "log_prob_diff_max": 0.0,
        "prob_diff_mean": 0.0,
    }
