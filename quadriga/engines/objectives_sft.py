# SPDX-License-Identifier: Apache-2.0
"""Objectives of learning from answers that are given: the likelihood of answers, and the order of their scores.

Legend: b rows of a micro-batch, T response positions.
"""

from collections.abc import Mapping

import torch

from quadriga.algorithms.aggregate import LossCounts
from quadriga.config import ActorConfig
from quadriga.engines.objectives import LossAndMetrics, aggregate
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto

SCORE_SLOPE = "score_slope"
"""Column [B]: by how much the loss of a batch rises when the score of a row does, to first order."""


class LikelihoodObjective:
    """The negative log-likelihood of the tokens under the mask.

    Args:
        config: says how losses of tokens become one.
    """

    name = "train"

    def __init__(self, config: ActorConfig) -> None:
        self.config = config

    def fields(self, data: DataProto) -> tuple[str, ...]:
        """See `Objective.fields`."""
        return ("response_mask",)

    def rows_with_gradient(self, data: DataProto) -> torch.Tensor:
        """All rows with something to learn."""
        return data.batch["response_mask"].bool().any(-1)

    def __call__(self, rows: DataProto, outputs: Mapping[str, torch.Tensor], counts: LossCounts) -> LossAndMetrics:
        """See `Objective.__call__`."""
        mask = rows.batch["response_mask"]
        loss = aggregate(-outputs["log_probs"], mask, self.config, counts)
        num_tokens = float(mask.sum())
        entropy = (outputs["entropy"].detach() * mask).sum() / num_tokens
        return loss, {
            "train/loss": Metric(loss.detach(), "sum"),
            "train/entropy": Metric(entropy, "mean", num_tokens),
        }


class ScoreObjective:
    """Moves the score of each row against its slope.

    The slope of a row is the derivative of the loss by its score, taken at the scores before the step. The gradient of
    slope x score is then the gradient of the loss itself, and the answers that a loss compares need not be in one
    micro-batch, nor in one process.
    """

    name = "train"

    def fields(self, data: DataProto) -> tuple[str, ...]:
        """See `Objective.fields`."""
        return ("response_mask", SCORE_SLOPE)

    def rows_with_gradient(self, data: DataProto) -> torch.Tensor:
        """Rows whose score matters to the loss."""
        return data.batch["response_mask"].bool().any(-1) & (data.batch[SCORE_SLOPE] != 0)

    def __call__(self, rows: DataProto, outputs: Mapping[str, torch.Tensor], counts: LossCounts) -> LossAndMetrics:
        """See `Objective.__call__`; the value means nothing, its gradient is what counts."""
        scores = (outputs["scores"] * rows.batch["response_mask"]).sum(-1)
        return (rows.batch[SCORE_SLOPE] * scores).sum(), {}
