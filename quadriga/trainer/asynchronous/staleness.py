# SPDX-License-Identifier: Apache-2.0
"""Staleness of the tokens of a batch: versions between the weights that drew a token and those that
its training step begins with.

This module checks and measures it. `Schedule.may_start` bounds it, and `Schedule._drop_leftovers`
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
    drawn = staleness[mask]
    if len(drawn) and not 0 <= int(drawn.min()) <= int(drawn.max()) <= rules.max_staleness:
        got = f"step {step}: tokens {int(drawn.min())} to {int(drawn.max())} versions old"
        raise RolloutError("async_training", got=got, expected=f"0 to {rules.max_staleness}")

    # Tokens that the model did not draw have version -1; they must not count as the oldest.
    oldest = versions.masked_fill(~mask, int(versions.max())).amin(-1)
    is_interrupted = versions.amax(-1) > oldest
    metrics = {"interruptions": Metric(is_interrupted.sum(), "sum")}
    if not len(drawn):
        return metrics
    metrics["staleness_mean"] = Metric(drawn.double().mean(), weight=len(drawn))
    metrics["staleness_max"] = Metric(drawn.max(), "max")
    shares = torch.bincount(drawn, minlength=rules.max_staleness + 1) / len(drawn)
    for lag, share in enumerate(shares):
        metrics[f"lag_{lag}_share"] = Metric(share, weight=len(drawn))
    return metrics


def token_versions(rows: DataProto) -> torch.Tensor:
    """Version of the weights that drew each token [B, T]. -1: the model did not draw it.

    Raises:
        RolloutError: a response token has no version.
    """
    if "token_versions" in rows.batch.keys():
        versions = rows.batch["token_versions"]
        if bool((versions >= 0)[rows.batch["response_mask"].bool()].all()):
            return versions
    raise RolloutError(
        "async_training",
        got="responses without the version of each token",
        expected="one for each",
        fix="A loop of your own gives them to Conversation.extend; or leave async_training off.",
    )
