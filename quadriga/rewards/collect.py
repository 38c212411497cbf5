# SPDX-License-Identifier: Apache-2.0
"""From outcomes, one a sample, to the rewards of a batch; and the point where too many errors stop a run.

B sequences, T response positions.
"""

import logging
import math
from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch

from quadriga.errors import RewardError
from quadriga.observe.metrics import Metric
from quadriga.protocol.columns import object_array
from quadriga.protocol.fields import FIELDS
from quadriga.rewards.base import RewardOutput
from quadriga.rewards.outcome import Outcome
from quadriga.rewards.samples import Samples

logger = logging.getLogger(__name__)

ERROR_COLUMN = "reward_error"


def allowed_failures(num_samples: int, max_error_rate: float) -> int:
    """How many of so many samples may fail."""
    # 0.29 * 100 is 28.999999999999996, and 29 of 100 are not more than 0.29.
    return math.floor(num_samples * max_error_rate + 1e-9)


def collect(samples: Samples, outcomes: Sequence[Outcome], max_error_rate: float) -> RewardOutput:
    """The rewards of a batch.

    Args:
        samples: what was graded.
        outcomes: what became of each.
        max_error_rate: share of failed samples that is still accepted, in [0, 1].

    Raises:
        RewardError: if more have failed; it ends with the first failure's own traceback.
    """
    _report_failures(samples, outcomes, max_error_rate)
    scores = torch.zeros(len(outcomes), samples.response_length, dtype=torch.float32)
    if samples.response_length:
        # A response without a single token keeps its score at the first position, where no mask lets it into a loss.
        last = (samples.lengths - 1).clamp(min=0)
        scores[torch.arange(len(outcomes)), last] = torch.tensor(
            [outcome.score for outcome in outcomes], dtype=torch.float32
        )
    extra = _columns(outcomes)
    metrics = {**_error_metrics(outcomes), **_extra_metrics(extra)}
    return RewardOutput(scores, {ERROR_COLUMN: object_array(outcome.error for outcome in outcomes), **extra}, metrics)


def _report_failures(samples: Samples, outcomes: Sequence[Outcome], max_error_rate: float) -> None:
    failed = [row for row, outcome in enumerate(outcomes) if outcome.error and outcome.kind != "skipped"]
    if not failed:
        return
    first = failed[0]
    found = f"{len(failed)} of {len(outcomes)} samples could not be graded"
    cause = f"The first, row {first} of data source {samples.rows[first]['data_source']}: {outcomes[first].error}"
    if len(failed) > allowed_failures(len(outcomes), max_error_rate):
        raise RewardError(
            "reward",
            got=f"{found} (grading stopped there)" if any(outcome.kind == "skipped" for outcome in outcomes) else found,
            expected=f"at most {max_error_rate:.0%} (reward_model.max_error_rate)",
            fix=cause,
        )
    logger.warning("%s and count as 0. %s", found, cause)


def _columns(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.extra)
    taken = [name for name in names if name == ERROR_COLUMN or name in FIELDS]
    if taken:
        raise RewardError(
            "score function",
            got=f"{', '.join(taken)} in the dict it returned",
            expected="names that no column of the batch has",
            fix="Rename the entry, or leave it out.",
        )
    return {name: object_array(outcome.extra.get(name) for outcome in outcomes) for name in names}


def _error_metrics(outcomes: Sequence[Outcome]) -> dict[str, Metric]:
    num_errors = sum(bool(outcome.error) for outcome in outcomes)
    num_timeouts = sum(outcome.kind == "timeout" for outcome in outcomes)
    return {
        "reward/errors": Metric(num_errors, "sum"),
        "reward/timeouts": Metric(num_timeouts, "sum"),
        "reward/error_rate": Metric(num_errors / max(len(outcomes), 1), "mean", weight=len(outcomes)),
    }


def _extra_metrics(extra: dict[str, np.ndarray]) -> dict[str, Metric]:
    metrics = {}
    for name, column in extra.items():
        values = [value for value in column if value is not None]
        if values and all(isinstance(value, Real) for value in values):
            metrics[f"reward/extra/{name}"] = Metric(math.fsum(values) / len(values), "mean", weight=len(values))
    return metrics
