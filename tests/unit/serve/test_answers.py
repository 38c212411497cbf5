# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in answers, for engines that report only some of them."""

import math

import pytest

from quadriga.rollout import Completion, SamplingParams
from quadriga.serve.answers import sampled_log_probs
from quadriga.serve.errors import CallError
from quadriga.serve.requests import Call


@pytest.mark.parametrize(
    ("sampling", "log_prob", "expected"),
    [
        (SamplingParams(4), -1.0, [-1.0]),
        (SamplingParams(4, temperature=0), -1.0, [0.0]),
        (SamplingParams(4, top_p=0.5), -1.0, None),
        (SamplingParams(4, temperature=0.5), math.nan, None),
    ],
)
def test_log_probs_of_another_distribution_are_not_passed_on(
    sampling: SamplingParams, log_prob: float, expected: list[float] | None
) -> None:
    """With filters, the number before them is not an answer, nor is NaN at another temperature."""
    completion = Completion([5], [log_prob], "stop", 0)
    silent = Call([1], sampling, has_seed=False, with_log_probs=False)
    assert sampled_log_probs(silent, completion) == expected
    asking = Call([1], sampling, has_seed=False, with_log_probs=True)
    if expected is None:
        with pytest.raises(CallError, match="logprobs: got none from the engine, or NaN"):
            sampled_log_probs(asking, completion)
    else:
        assert sampled_log_probs(asking, completion) == expected
