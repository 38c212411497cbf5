# SPDX-License-Identifier: Apache-2.0
"""What every reward manager takes and gives."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quadriga.rewards.outcome import Outcome

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quadriga.observe.metrics import Metric
    from quadriga.protocol import DataProto


@dataclass
class RewardOutput:
    """The rewards of a batch of `B` responses of up to `T` tokens.

    Attributes:
        scores: [B, T] float32, zero but for the last valid token of each response, where its score stands.
        extra: further facts about each sample, object arrays [B]: "reward_error" (why there is no score; "" where
            there is one),
            and what the score function returned in addition to the score, None where a sample has no such entry.
        metrics: "reward/errors", "reward/timeouts", "reward/error_rate", and "reward/extra/NAME", the mean of each
            numeric entry.
    """

    scores: "torch.Tensor"
    extra: "dict[str, np.ndarray]" = field(default_factory=dict)
    metrics: "dict[str, Metric]" = field(default_factory=dict)


@dataclass(frozen=True)
class Grading:
    """Rewards that are being computed while their caller does something else.

    Attributes:
        result: waits for the rewards. An error of a grader is raised here.
        cancel: the rewards are not wanted any more: when it returns, no process of the manager grades them.
    """

    result: Callable[[], RewardOutput]
    cancel: Callable[[], object]


class RewardManager:
    """Turns responses into rewards. A subclass is registered by name; it has `begin`, or `__call__` alone.

    The loop calls `begin` once the responses are there, and joins the `Grading` where it reads the rewards. With
    `rollout.mode=async` each response is given to `grade_one` as soon as it is written, and `begin` gets the outcomes.

    It is made from the configuration, and the tokenizer that decodes the responses.
    """

    grades_early: bool = False
    """Whether there is a `grade_one`."""

    has_grades: bool = False
    """Whether `begin` leaves work to be done while its caller goes on."""

    def __call__(self, data: "DataProto") -> RewardOutput:
        """Grade the responses of a batch, and wait for their rewards; see `begin`."""
        return self.begin(data).result()

    def begin(self, data: "DataProto", outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        """Begin to grade the responses of a batch.

        Args:
            data: tensors `responses` [B, T] and `attention_mask` [B, P+T]; the data source's column, `reward_model`
                with a "ground_truth" each, and `extra_info` (optional). It is read before this returns; its columns
                may change afterwards, its rows may not.
            outcomes: [B] those of `grade_one`, None for a response that is not graded yet.

        Returns:
            the rewards, to be joined. Joining raises RewardError if more than `reward_model.max_error_rate` of the
            samples could not be graded.

        Raises:
            RewardError: a column or a ground truth is missing.
        """
        done: Future[RewardOutput] = Future()
        done.set_result(self(data))
        return Grading(done.result, done.cancel)

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        """Grade one response. What is wrong with it or its grader is part of the outcome.

        Args:
            row: `data_source`, `solution_str`, `ground_truth`, `extra_info`; see `samples.Samples`.

        Raises:
            RewardError: no response of this data source can be graded.
        """
        raise NotImplementedError(f"{type(self).__name__} grades batches only")

    def close(self) -> None:
        """Free what the manager holds, above all its processes."""
