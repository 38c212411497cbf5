# SPDX-License-Identifier: Apache-2.0
"""Responses of lengths that are drawn beforehand: `actor_rollout_ref.model.external_lib` of `benchmarks/async.py`.

With it a process that generates ends the response number `sample` to the prompt `STEP-ROW` after the tokens that
`lengths_of` says for them, whatever the model writes; so every run of the same steps has the same lengths.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np

from quadriga.rollout import sequences
from quadriga.workers import stream

SETTINGS = "DRAWN_LENGTHS"
"""The variable that has the median, the longest, both in tokens, and the standard deviation of the logarithms."""


def lengths_of(step: int, row: int, count: int) -> np.ndarray:
    """Tokens of the responses [count] to a prompt."""
    median, longest, sigma = map(float, os.environ[SETTINGS].split())
    drawn = np.exp(np.random.default_rng([step, row]).normal(np.log(median), sigma, count))
    return drawn.clip(1, longest).round().astype(int)


_requests_of = sequences.requests_of


def requests_of(prompts: Any, *args: Any) -> Any:
    """As of `rollout.sequences`, with the tokens of each response."""
    token_ids, requests = _requests_of(prompts, *args)
    columns = prompts.non_tensor_batch
    for number, (uid, sample) in enumerate(
        zip(columns["uid"], columns["sample_index"], strict=True)
    ):
        step, row = map(int, uid.split("-"))
        length = int(lengths_of(step, row, int(sample) + 1)[-1])
        requests[number] = replace(requests[number], max_tokens=length, ignore_eos=True)
    return token_ids, requests


if SETTINGS in os.environ:
    sequences.requests_of = stream.requests_of = requests_of
