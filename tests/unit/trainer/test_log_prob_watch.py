# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities that differ: what passes, what is told, what stops."""

import logging
import math

import pytest

from quadriga.config import RolloutConfig
from quadriga.errors import RolloutError
from quadriga.trainer.log_prob_watch import LogProbWatch


def watch(**limits: float) -> LogProbWatch:
    return LogProbWatch(RolloutConfig(**limits))


def metrics(mean: float, kl: float = 0.0) -> dict[str, float]:
    return {"rollout/log_prob_diff_mean": mean, "rollout/log_prob_diff_max": 9.0, "rollout/kl": kl}


def test_small_differences_pass_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    found = watch().look(metrics(0.1, kl=math.log(1.25)), 3)
    assert found == {"rollout/ppl_ratio": pytest.approx(1.25)}
    assert watch().look({}, 3) == {}
    assert caplog.text == ""


def test_a_difference_above_the_first_limit_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watch(log_prob_diff_warn=0.1, log_prob_diff_stop=0.5).look(metrics(0.25), 3)
    assert "step 3: the rollout's log-probabilities have a mean difference of 0.25 nats (at most 9)" in caplog.text
    assert "log_prob_diff_warn=0.1" in caplog.text


def test_a_difference_above_the_second_limit_stops() -> None:
    with pytest.raises(RolloutError, match=r"step 3: got a mean difference of 0\.75 nats.*at most 0\.5 \(.*diff_stop"):
        watch(log_prob_diff_stop=0.5).look(metrics(0.75), 3)


def test_what_is_no_number_stops_without_a_limit() -> None:
    with pytest.raises(RolloutError, match=r"mean difference of nan nats .* expected a number"):
        watch().look(metrics(math.nan), 1)


def test_ratio_too_large_for_a_number() -> None:
    assert watch().look(metrics(0.0, kl=800.0), 1) == {"rollout/ppl_ratio": math.inf}
