# SPDX-License-Identifier: Apache-2.0
"""Which distribution a log-probability is of, where an engine that others wrote reports one number for each token."""

import math
from typing import Literal

from quadriga.rollout.base import SamplingParams

LogProbsOf = Literal["processed_logprobs", "raw_logprobs"]
"""`processed_logprobs` are those of the distribution that tokens are drawn from, after temperature and filters;
`raw_logprobs` those of the model, before both. The words are vLLM's."""


def has_filters(sampling: SamplingParams) -> bool:
    """Whether some tokens cannot be drawn; the likeliest one always can."""
    return not sampling.is_greedy and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)


def split_log_probs(
    reported: list[float], sampling: SamplingParams, log_probs_of: LogProbsOf
) -> tuple[list[float], list[float]]:
    """`Completion.log_probs` and `Completion.sampling_log_probs` of what an engine reports.

    Where it does not say the first one, it is NaN: a number that is not known, and not one that is nearly right. The
    second one is then empty.
    """
    is_scaled = not sampling.is_greedy and sampling.temperature != 1
    if log_probs_of == "processed_logprobs":
        return ([math.nan] * len(reported) if has_filters(sampling) else reported), list(reported)
    if is_scaled:
        return [math.nan] * len(reported), []
    return reported, [] if has_filters(sampling) else list(reported)
