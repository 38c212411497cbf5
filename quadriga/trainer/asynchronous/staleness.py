# SPDX-License-Identifier: Apache-2.0
"""Measures and checks the staleness of tokens.

The staleness of a token is the number of versions between the weights that drew it and those that
its training step begins with. `Schedule.may_start` bounds it, and `Schedule._drop_leftovers`
discards groups that are too old.

Legend: B rows, T response positions.
"""

import torch

from quadriga.errors import RolloutError
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.trainer.asynchronous.rules import Rules


def measure_staleness(batch: DataProto, step: int, rules: Rules) -> dict[str, Metric]:
    """Add `token_staleness` [B, T] to a batch, and check the bound on it.

    Args:
        batch: responses with `token_versions` [B, T] and `response_mask` [B, T].
        step: training step that learns from them.
        rules: rules of the schedule.

    Returns:
        Metrics: rows with tokens of several versions, mean and largest staleness, and the share of
        tokens of each staleness.

    Raises:
        RolloutError: a token is older than allowed, or has no version.
    """
    mask = batch.batch["response_mask"].bool()
    versions = token_versions(batch)
    staleness = (rules.version_at(step) - versions).masked_fill(~mask, 0)
    batch.batch["token_staleness"] = staleness
    ages = staleness[mask]
    if len(ages) and (ages.min() < 0 or ages.max() > rules.max_staleness):
        raise RolloutError(
            "async_training",
            got=f"step {step}: tokens {ages.min()} to {ages.max()} versions old",
            expected=f"0 to {rules.max_staleness}",
        )

    # Masked tokens have version -1, which must not count as the oldest version of a row.
    oldest = versions.masked_fill(~mask, int(versions.max())).amin(-1)
    is_interrupted = versions.amax(-1) > oldest
    metrics = {"interruptions": Metric(is_interrupted.sum(), "sum")}
    if not len(ages):
        return metrics
    metrics["staleness_mean"] = Metric(ages.double().mean(), weight=len(ages))
    metrics["staleness_max"] = Metric(ages.max(), "max")
    shares = torch.bincount(ages, minlength=rules.max_staleness + 1) / len(ages)
    for lag, share in enumerate(shares):
        metrics[f"lag_{lag}_share"] = Metric(share, weight=len(ages))
    return metrics


def token_versions(rows: DataProto) -> torch.Tensor:
    """The version of the weights that drew each token, [B, T]; -1 for tokens that were not drawn.

    Raises:
        RolloutError: a response token has no version.
    """
    if "token_versions" in rows.batch.keys():
        versions = rows.batch["token_versions"]
        if (versions[rows.batch["response_mask"].bool()] >= 0).all():
            return versions
    raise RolloutError(
        "async_training",
        got="responses without the version of each token",
        expected="one for each",
        fix="An agent loop of your own must pass the versions to Conversation.extend. Otherwise set "
        "async_training.enable=False.",
    )
