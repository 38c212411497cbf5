# SPDX-License-Identifier: Apache-2.0
"""What every reward manager takes and gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quadriga.rewards.outcome import Outcome

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


@dataclass(frozen=True)
class Grading:
    """Responses that are being graded while whoever asked for it does something else.

    Attributes:
        result: waits for the rewards. It raises what `RewardManager.__call__` would have raised.
        cancel: the rewards are for nobody any more: when it returns, no process of the manager grades them.
    """

    result: "Callable[[], RewardOutput]"
    cancel: "Callable[[], None]"


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


@runtime_checkable
class MeanwhileRewardManager(RewardManager, Protocol):
    """A manager whose graders are elsewhere, so that a step goes on while they work."""

    @property
    def has_grades(self) -> bool:
        """Whether there is something to be graded meanwhile."""
        ...

    def start_grading(self, data: "DataProto") -> Grading:
        """Begin to grade a batch; see `RewardManager.__call__`.

        Args:
            data: as there. It is read before this returns; its columns may change afterwards, its rows may not.

        Raises:
            RewardError: a column or a ground truth is missing.
        """
        ...


@runtime_checkable
class EarlyRewardManager(RewardManager, Protocol):
    """A manager that can grade a sample alone, as soon as it is there, while others are still being written."""

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        """Grade one sample. What is wrong with the sample or its grader is part of the outcome.

        Args:
            row: `data_source`, `solution_str`, `ground_truth`, `extra_info`; see `samples.Samples`.

        Raises:
            RewardError: no sample of this data source can be graded.
        """
        ...

    def collect_graded(self, data: "DataProto", outcomes: Sequence[Outcome]) -> RewardOutput:
        """The rewards of a batch whose rows were graded one by one; see `RewardManager.__call__`.

        Args:
            data: as there.
            outcomes: of `grade_one`, one for each row.
        """
        ...
