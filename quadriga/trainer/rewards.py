# SPDX-License-Identifier: Apache-2.0
"""The rewards of a batch: begun once its responses are there, joined before the advantages.

    generate -> begin ─> old log-probs, reference, values ─> join -> advantages -> ...
                  ├────── graders, in processes of their own ───┤
                  └────── reward model ─────────────────────────┘
    early        the rollout gives each response to a grader as soon as it is written: `begin` finds the outcomes
    in process   graders of the driver's own work at the join, while models in other processes compute

B responses, T response positions.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards import Grading, Outcome, RewardManager, RewardOutput
from quadriga.trainer.metrics import spread
from quadriga.workers import RewardModelWorker
from quadriga.workers.base import CHAT_OBJECTS, MODEL_OBJECTS, model_inputs

logger = logging.getLogger(__name__)


class BatchRewards:
    """The rewards of a batch: grading begins at construction, and the outcomes of early grading leave the batch."""

    def __init__(self, reward: RewardManager, batch: DataProto) -> None:
        self._grading = reward.begin(batch, batch.non_tensor_batch.pop("reward_outcome", None))
        self.is_joined = False

    def join(self, batch: DataProto) -> RewardOutput:
        """Wait for the rewards, and add them to the batch that grading began with: `token_level_scores` [B, T],
        `reward_extra` (what graders return beside the score), and metrics.

        Raises RewardError: too many responses could not be graded.
        """
        output = self._grading.result()
        batch.batch["token_level_scores"] = output.scores
        names = list(output.extra)
        values = zip(*output.extra.values(), strict=True) if names else ([()] * len(batch))
        batch.non_tensor_batch["reward_extra"] = object_array(dict(zip(names, row, strict=True)) for row in values)
        batch.meta_info["metrics"] = {**batch.meta_info.get("metrics", {}), **output.metrics}
        self.is_joined = True
        return output

    def cancel(self) -> None:
        """They are not wanted any more; afterwards nothing grades."""
        if not self.is_joined:
            self._grading.cancel()


def grade(reward: RewardManager, batch: DataProto) -> RewardOutput:
    """The rewards of a batch, waited for; see `BatchRewards.join`."""
    return BatchRewards(reward, batch).join(batch)


class ModelReward(RewardManager):
    """A reward model beside graders: the score of a response is the sum of both; graders give 0 where nothing is
    graded.

    Metrics beside the graders': mean, max and min of `reward/rm_score` and `reward/rule_score`, the two summands;
    `reward/rm_cut`, inputs of the reward model that were too long; `timing_s/rm`, seconds of its slowest rank.
    """

    def __init__(self, model: RewardModelWorker, graders: RewardManager) -> None:
        self.model, self.graders, self.close = model, graders, graders.close

    @cached_property
    def reads_chats(self) -> bool:
        """Whether the reward model has a chat template of its own."""
        return self.model.reads_chats()

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        """The graders and the reward model begin; at the join its `rm_scores` [B, T] come into the batch."""
        rule = self.graders.begin(data, outcomes)
        try:
            inputs = model_inputs(data, [*MODEL_OBJECTS, *(CHAT_OBJECTS if self.reads_chats else ())])
            scores: Any = self.model.compute_rm_score(inputs)
        except BaseException:
            rule.cancel()
            raise

        def result() -> RewardOutput:
            graded, scored = rule.result(), scores.get()
            told = reduce_metrics(scored.meta_info.pop("metrics"))
            if told["reward/rm_cut"]:
                text = "reward model: %d of %d inputs were too long (reward_model.max_length) and lost their beginning."
                logger.warning(text, told["reward/rm_cut"], len(data))
            by_model = data.union(scored).batch["rm_scores"]
            totals = by_model.sum(-1)
            both = spread("reward/rm_score", totals) | spread("reward/rule_score", graded.scores.sum(-1))
            metrics = {
                **graded.metrics,
                # The last part of the name is how it combines: mean, max or min.
                **{name: Metric(value, name.rpartition("/")[2], len(totals)) for name, value in both.items()},
                "reward/rm_cut": Metric(told["reward/rm_cut"], "sum"),
                "timing_s/rm": Metric(told["timing_s/rm"], "max"),
            }
            extra = {**graded.extra, "rm_score": object_array(totals.tolist())}
            return RewardOutput(by_model + graded.scores, extra, metrics)

        return Grading(result, rule.cancel)
