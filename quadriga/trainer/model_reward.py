# SPDX-License-Identifier: Apache-2.0
"""A reward manager beside a reward model: the score of a response is the sum of what both say.

B responses, T response positions.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.observe.timing import PhaseTimer
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards import (
    EarlyRewardManager,
    Grading,
    MeanwhileRewardManager,
    Outcome,
    RewardManager,
    RewardOutput,
)
from quadriga.workers import RewardModelWorker
from quadriga.workers.base import reward_model_inputs

logger = logging.getLogger(__name__)


class ModelReward:
    """See `rewards.RewardManager`.

    Args:
        model: scores every response.
        graders: add to it; where there is nothing to grade by, zero.
    """

    def __init__(self, model: RewardModelWorker, graders: RewardManager) -> None:
        self.model, self.graders = model, graders

    @cached_property
    def reads_chats(self) -> bool:
        """Whether the reward model has a chat template of its own."""
        return self.model.reads_chats()

    def __call__(self, data: DataProto) -> RewardOutput:
        """`rm_scores` [B, T] go to the batch, and their sum with the graders' scores to the output.

        Metrics beside the graders': mean, max and min of `reward/rm_score` and `reward/rule_score`, the two summands;
        `reward/rm_cut`, inputs of the reward model that were too long; `timing_s/rm`, seconds.
        """
        return self._added(data, self.graders)

    @property
    def has_grades(self) -> bool:
        """See `MeanwhileRewardManager`: whether the graders can work while the reward model scores, and after it."""
        return isinstance(self.graders, MeanwhileRewardManager) and self.graders.has_grades

    def start_grading(self, data: DataProto) -> Grading:
        """See `MeanwhileRewardManager.start_grading`.

        The graders begin. The reward model scores before this returns: a group of workers has one caller, the driver.
        """
        assert isinstance(self.graders, MeanwhileRewardManager), "see has_grades"
        rule = self.graders.start_grading(data)
        try:
            added = self._scored(data)
        except BaseException:
            rule.cancel()
            raise
        return Grading(lambda: added(rule.result()), rule.cancel)

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        """See `EarlyRewardManager`: the graders' part; a reward model scores batches."""
        return await self._early_graders.grade_one(row)

    def collect_graded(self, data: DataProto, outcomes: Sequence[Outcome]) -> RewardOutput:
        """As `__call__`, where the graders' part is known."""
        return self._added(data, lambda data: self._early_graders.collect_graded(data, outcomes))

    @property
    def _early_graders(self) -> EarlyRewardManager:
        assert isinstance(self.graders, EarlyRewardManager), "samples are graded alone only by managers that can"
        return self.graders

    def _added(self, data: DataProto, graders: Callable[[DataProto], RewardOutput]) -> RewardOutput:
        return self._scored(data)(graders(data))

    def _scored(self, data: DataProto) -> Callable[[RewardOutput], RewardOutput]:
        """Have the reward model score. Returns what adds its scores to the graders' output."""
        timer = PhaseTimer()
        with timer.phase("rm"):
            scored = self.model.compute_rm_score(reward_model_inputs(data, with_chats=self.reads_chats))
        told = reduce_metrics(scored.meta_info.pop("metrics"))
        if told["reward/rm_cut"]:
            logger.warning(
                "reward model: %d of %d inputs were too long (reward_model.max_length) and lost their beginning.",
                told["reward/rm_cut"],
                len(data),
            )
        data.union(scored)
        by_model = data.batch["rm_scores"]
        totals = by_model.sum(-1)

        def added(rule: RewardOutput) -> RewardOutput:
            metrics = {
                **rule.metrics,
                **_spread("reward/rm_score", totals),
                **_spread("reward/rule_score", rule.scores.sum(-1)),
                "reward/rm_cut": Metric(told["reward/rm_cut"], "sum"),
                "timing_s/rm": Metric(timer.seconds["rm"], "sum"),
            }
            extra = {**rule.extra, "rm_score": object_array(totals.tolist())}
            return RewardOutput(by_model + rule.scores, extra, metrics)

        return added

    def close(self) -> None:
        """End the graders; the reward model ends with its group."""
        self.graders.close()


def _spread(name: str, scores: torch.Tensor) -> dict[str, Metric]:
    """Mean, max and min of some scores."""
    return {
        f"{name}/mean": Metric(float(scores.mean()), "mean", weight=len(scores)),
        f"{name}/max": Metric(float(scores.max()), "max"),
        f"{name}/min": Metric(float(scores.min()), "min"),
    }
