# SPDX-License-Identifier: Apache-2.0
"""What every reward manager takes and gives."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quadriga.config import Config
    from quadriga.observe.metrics import Metric
    from quadriga.protocol import DataProto


@dataclass
class RewardOutput:
    """The rewards of a batch of `B` responses of up to `T` tokens.

    Attributes:
        scores: [B, T] float32, zero but for the last valid token of each response, where its score stands.
        extra: further facts about each sample, object arrays [B]: "reward_error" (why there is no score; "" where
            there is one),
            and what the score function returned beside the score, None where a sample has no such entry.
        metrics: "reward/errors", "reward/timeouts", "reward/error_rate", and "reward/extra/NAME", the mean of each
            numeric entry.
    """

    scores: "torch.Tensor"
    extra: "dict[str, np.ndarray]" = field(default_factory=dict)
    metrics: "dict[str, Metric]" = field(default_factory=dict)


class RewardManager(Protocol):
    """Turns responses into rewards. A class is registered by name."""

    def __init__(self, config: "Config", tokenizer: Any) -> None:
        """Made from the configuration of the run, and the tokenizer that decodes its responses."""
        ...

    def __call__(self, data: "DataProto") -> RewardOutput:
        """Grade the responses of a batch.

        Args:
            data: tensors `responses` [B, T] and `attention_mask` [B, P+T]; the data source's column, `reward_model`
                with a "ground_truth" each, and `extra_info` (optional).

        Raises:
            RewardError: if more than `reward_model.max_error_rate` of the samples could not be graded.
        """
        ...

    def close(self) -> None:
        """Free what the manager holds, above all its processes."""
        ...
