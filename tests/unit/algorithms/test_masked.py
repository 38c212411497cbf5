# SPDX-License-Identifier: Apache-2.0
"""Masked sums, means, whitening and mismatch: values by hand, NaN outside the mask, nothing under it."""

from math import exp, log

import pytest
import torch

from quadriga.algorithms.masked import (
    log_prob_mismatch,
    masked_mean,
    masked_sum,
    masked_whiten,
    spread,
)

NAN = float("nan")
VALUES = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


def test_sum_and_mean() -> None:
    """Over everything and by row; an empty row is 0."""
    assert float(masked_sum(VALUES, MASK)) == 9.0
    assert masked_sum(VALUES, MASK, dim=-1).tolist() == [3.0, 6.0, 0.0]
    assert float(masked_mean(VALUES, MASK)) == 3.0
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [1.5, 6.0, 0.0]


def test_no_gradient_outside_the_mask() -> None:
    """A NaN that is not read must not come back as a NaN gradient either."""
    values = VALUES.clone().requires_grad_()
    masked_mean(values, MASK).backward()
    torch.testing.assert_close(values.grad, MASK / 3.0)


def test_whiten() -> None:
    """1, 2, 6: mean 3, unbiased variance 7."""
    expected = torch.tensor([-2.0, -1.0, 3.0]) / 7**0.5
    torch.testing.assert_close(masked_whiten(VALUES, MASK)[MASK.bool()], expected)
    torch.testing.assert_close(
        masked_whiten(VALUES, MASK, shift_mean=False)[MASK.bool()], expected + 3
    )
    assert not masked_whiten(VALUES, MASK)[~MASK.bool()].any()


def test_whiten_without_variance() -> None:
    """Equal values, a single value, none at all."""
    assert not masked_whiten(torch.full((3, 3), 0.1), torch.ones(3, 3)).any()
    assert not masked_whiten(VALUES, torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 0]])).any()
    assert not masked_whiten(VALUES, torch.zeros(3, 3)).any()
    assert not masked_whiten(VALUES, torch.zeros(3, 3), shift_mean=False).any()


def test_spread() -> None:
    """One value per row, on the tokens of the row only."""
    assert spread(torch.tensor([5.0, 7.0, NAN]), MASK).tolist() == [[5, 5, 0], [7, 0, 0], [0, 0, 0]]


def test_mismatch_by_hand() -> None:
    """Probabilities 1/2, 1/4, 1/5 against 1/4, 1/4, 2/5: the first and the last are off by a factor of two."""
    ours = torch.tensor([[0.5, 0.25, NAN], [0.2, NAN, NAN]]).log()
    theirs = torch.tensor([[0.25, 0.25, NAN], [0.4, NAN, NAN]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert log_prob_mismatch(ours, theirs, mask) == {
        "log_prob_diff_mean": pytest.approx(2 * log(2) / 3),
        "log_prob_diff_max": pytest.approx(log(2)),
        "prob_diff_mean": pytest.approx((0.25 + 0.2) / 3),
        # Trainer over rollout is 2, 1, 1/2: the logarithms cancel, ratio - 1 - log(ratio) does not.
        "kl": pytest.approx(0.0, abs=1e-7),
        "kl_k3": pytest.approx(((1 - log(2)) + (-0.5 + log(2))) / 3),
    }


def test_the_same_numbers_are_no_mismatch() -> None:
    """Nor does it matter which side is which, in which dtype the mask is, or that one side has a gradient."""
    ours = torch.tensor([[-1.0, -2.0, -30.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True]])
    assert set(log_prob_mismatch(ours, ours.detach().clone(), mask).values()) == {0.0}
    other = torch.tensor([[-1.5, -2.0, -29.0]])
    there, back = log_prob_mismatch(ours, other, mask), log_prob_mismatch(other, ours, mask.float())
    distances = ("log_prob_diff_mean", "log_prob_diff_max", "prob_diff_mean")
    assert [there[name] for name in distances] == [back[name] for name in distances]


def test_divergence_has_a_direction() -> None:
    """The rollout takes its own token for likelier than the trainer does: it diverges, by what both say on average."""
    ours, theirs = torch.full((1, 4), -2.0), torch.full((1, 4), -1.5)
    found = log_prob_mismatch(ours, theirs, torch.ones(1, 4))
    assert found["kl"] == 0.5 and log_prob_mismatch(theirs, ours, torch.ones(1, 4))["kl"] == -0.5
    assert found["kl_k3"] == pytest.approx(exp(-0.5) - 1 + 0.5)


def test_k3_is_the_divergence_on_average() -> None:
    """Over tokens drawn from the rollout, both estimators approach the divergence that the two distributions have."""
    generator = torch.Generator().manual_seed(0)
    rollout, trainer = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    tokens = torch.multinomial(rollout, 200_000, replacement=True, generator=generator)[None]
    found = log_prob_mismatch(
        trainer.log()[tokens], rollout.log()[tokens], torch.ones(tokens.shape)
    )
    divergence = float((rollout * (rollout / trainer).log()).sum())
    assert found["kl"] == pytest.approx(divergence, abs=2e-3)
    assert found["kl_k3"] == pytest.approx(divergence, abs=5e-4)


def test_one_token_far_off_shows_in_the_maximum() -> None:
    """A difference of 20 nats between two tokens that never happen hardly moves the probabilities."""
    ours, theirs = torch.full((1, 10), -1.0), torch.full((1, 10), -1.0)
    ours[0, 3], theirs[0, 3] = -20.0, -40.0
    found = log_prob_mismatch(ours, theirs, torch.ones(1, 10))
    assert found["log_prob_diff_max"] == 20.0 and found["log_prob_diff_mean"] == 2.0
    assert 0 < found["prob_diff_mean"] < 1e-9


def test_an_empty_mask_has_no_mismatch() -> None:
    """A batch without a token to learn from."""
    nothing = torch.full((2, 3), NAN)
    assert log_prob_mismatch(nothing, nothing, torch.zeros(2, 3)) == {
        "log_prob_diff_mean": 0.0,
        "log_prob_diff_max": 0.0,
        "prob_diff_mean": 0.0,
        "kl": 0.0,
        "kl_k3": 0.0,
    }
