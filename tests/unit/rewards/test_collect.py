# SPDX-License-Identifier: Apache-2.0
"""Outcomes become rewards, extras and metrics, or stop the run."""

import logging

import pytest
import torch

from quadriga.errors import RewardError
from quadriga.rewards.outcome import Outcome, failure
from quadriga.rewards.samples import Samples, allowed_failures, collect


def samples(*lengths, response_length=4):
    rows = [{"data_source": f"source {row}"} for row in range(len(lengths))]
    return Samples(rows, torch.tensor(lengths, dtype=torch.int64), response_length)


def graded(score, **extra):
    return Outcome(score, extra, "", "graded")


def test_the_score_stands_at_the_last_valid_token():
    output = collect(samples(1, 3, 4, 0), [graded(0.5), graded(-1.0), graded(2.0), graded(0.25)], 0.0)
    expected = [[0.5, 0, 0, 0], [0, 0, -1, 0], [0, 0, 0, 2], [0.25, 0, 0, 0]]
    assert output.scores.dtype == torch.float32
    torch.testing.assert_close(output.scores, torch.tensor(expected))
    assert output.metrics["reward/error_rate"].value == 0


def test_extras_are_columns_with_gaps():
    outcomes = [graded(1.0, acc=True, pred="5"), graded(0.0, parts=[1, 2]), graded(0.0, acc=False, pred=None)]
    output = collect(samples(1, 1, 1), outcomes, 0.0)
    assert output.extra["acc"].tolist() == [True, None, False]
    assert output.extra["pred"].tolist() == ["5", None, None]
    assert output.extra["parts"].tolist() == [None, [1, 2], None]
    assert output.extra["reward_error"].tolist() == ["", "", ""]
    assert all(column.shape == (3,) for column in output.extra.values())
    # The mean of two values out of three, and none for texts and lists.
    metric = output.metrics["reward/extra/acc"]
    assert (metric.value, metric.weight) == (0.5, 2.0)
    assert "reward/extra/pred" not in output.metrics and "reward/extra/parts" not in output.metrics


def test_failures_are_counted_kept_and_said(caplog):
    outcomes = [graded(1.0), failure("raised", "Traceback: bad"), failure("timeout", "too slow"), graded(1.0)]
    with caplog.at_level(logging.WARNING):
        output = collect(samples(1, 1, 1, 1), outcomes, 0.5)
    assert output.scores.sum(dim=1).tolist() == [1, 0, 0, 1]
    assert output.extra["reward_error"].tolist() == ["", "Traceback: bad", "too slow", ""]
    values = {name: metric.value for name, metric in output.metrics.items()}
    assert values == {"reward/errors": 2, "reward/timeouts": 1, "reward/error_rate": 0.5}
    assert output.metrics["reward/error_rate"].weight == 4
    assert "2 of 4 samples could not be graded and count as 0. The first, row 1 of data source source 1" in caplog.text


def test_too_many_failures_stop_the_run_with_the_first_traceback():
    outcomes = [graded(1.0), failure("raised", "Traceback:\n  KeyError: 'x'"), failure("invalid", "returned None")]
    with pytest.raises(RewardError) as caught:
        collect(samples(1, 1, 1), outcomes, 0.5)
    message = str(caught.value)
    assert "2 of 3 samples could not be graded, expected at most 50% (reward_model.max_error_rate)" in message
    assert message.endswith("The first, row 1 of data source source 1: Traceback:\n  KeyError: 'x'")


def test_a_round_that_stopped_early_says_so():
    outcomes = [failure("skipped", "not graded"), failure("timeout", "slow"), failure("timeout", "slow")]
    with pytest.raises(RewardError, match=r"2 of 3 .*\(grading stopped there\).*row 1"):
        collect(samples(1, 1, 1), outcomes, 0.5)


@pytest.mark.parametrize(
    ("num_samples", "rate", "allowed"),
    [(4, 0.5, 2), (5, 0.5, 2), (100, 0.29, 29), (3, 0.0, 0), (3, 1.0, 3), (0, 0.5, 0)],
)
def test_the_share_is_a_whole_number_of_samples(num_samples, rate, allowed):
    assert allowed_failures(num_samples, rate) == allowed


@pytest.mark.parametrize("name", ["reward_error", "uid", "data_source"])
def test_an_extra_cannot_replace_a_column_of_the_batch(name):
    with pytest.raises(RewardError, match=f"got {name} in the dict it returned"):
        collect(samples(1), [graded(1.0, **{name: 1})], 0.0)


def test_an_empty_batch_and_empty_responses():
    assert collect(samples(), [], 0.0).scores.shape == (0, 4)
    assert collect(samples(0, response_length=0), [graded(1.0)], 0.0).scores.shape == (1, 0)
