# SPDX-License-Identifier: Apache-2.0
"""The rewards of a batch: begun once its responses are there, joined where they are read.

    now          generate -> begin -> join -> old log-probs -> reference -> values -> advantages -> ...
    meanwhile    generate -> begin ─> old log-probs -> reference -> values ─> join -> advantages -> ...
                               └────── graders, in processes of their own ─────┘
    early        the rollout gives each response to a grader as soon as it is written: `begin` finds the outcomes

B responses, T response positions.
"""

import logging
from collections.abc import Sequence
from functools import cached_property

from quadriga.config import Config
from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.observe.timing import PhaseTimer
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards import Grading, Outcome, RewardManager, RewardOutput
from quadriga.trainer.metrics import spread
from quadriga.workers import RewardModelWorker
from quadriga.workers.base import CHAT_OBJECTS, model_inputs

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


def joins_late(reward: RewardManager, config: Config) -> bool:
    """Whether a step goes on while its rewards are computed: `reward_model.launch_reward_fn_async`, where it can.

    What the configuration alone rules out is told by its checks; what the manager cannot do is told here.
    """
    if not config.reward_model.launch_reward_fn_async or config.algorithm.filter_groups.enable:
        return False
    if not reward.has_grades:
        beside = ", and the reward model is called by the driver as the other models are" * config.reward_model.enable
        logger.warning(
            "reward_model.launch_reward_fn_async: not used: the reward manager %s has no graders that work meanwhile "
            "(begin)%s.",
            config.reward_model.reward_manager,
            beside,
        )
    return reward.has_grades


class ModelReward(RewardManager):
    """A reward model beside graders: the score of a response is the sum of both; graders give 0 where nothing is
    graded.

    Metrics beside the graders': mean, max and min of `reward/rm_score` and `reward/rule_score`, the two summands;
    `reward/rm_cut`, inputs of the reward model that were too long; `timing_s/rm`, seconds.
    """

    def __init__(self, model: RewardModelWorker, graders: RewardManager) -> None:
        self.model, self.graders = model, graders
        self.has_grades, self.close = graders.has_grades, graders.close

    @cached_property
    def reads_chats(self) -> bool:
        """Whether the reward model has a chat template of its own."""
        return self.model.reads_chats()

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        """The graders begin, and the reward model scores: its `rm_scores` [B, T] are in the batch when this returns.

        A group of workers has one caller, the driver: so only the graders go on meanwhile.
        """
        timer = PhaseTimer()
        rule = self.graders.begin(data, outcomes)
        try:
            with timer.phase("rm"):
                inputs = model_inputs(data, objects=CHAT_OBJECTS if self.reads_chats else ())
                scored = self.model.compute_rm_score(inputs)
        except BaseException:
            rule.cancel()
            raise
        told = reduce_metrics(scored.meta_info.pop("metrics"))
        if told["reward/rm_cut"]:
            logger.warning(
                "reward model: %d of %d inputs were too long (reward_model.max_length) and lost their beginning.",
                told["reward/rm_cut"],
                len(data),
            )
        data.union(scored)
        by_model = data.batch["rm_scores"]

        def result() -> RewardOutput:
            graded, totals = rule.result(), by_model.sum(-1)
            both = spread("reward/rm_score", totals) | spread("reward/rule_score", graded.scores.sum(-1))
            metrics = {
                **graded.metrics,
                # The last part of the name is how it combines: mean, max or min.
                **{name: Metric(value, name.rpartition("/")[2], len(totals)) for name, value in both.items()},
                "reward/rm_cut": Metric(told["reward/rm_cut"], "sum"),
                "timing_s/rm": Metric(timer.seconds["rm"], "sum"),
            }
            extra = {**graded.extra, "rm_score": object_array(totals.tolist())}
            return RewardOutput(by_model + graded.scores, extra, metrics)

        return Grading(result, rule.cancel)
