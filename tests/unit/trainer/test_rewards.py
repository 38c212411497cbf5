# SPDX-License-Identifier: Apache-2.0
"""The rewards of a batch, begun and joined; a reward model's scores and the graders', added."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.rewards import Grading, Outcome, RewardManager, RewardOutput
from quadriga.trainer.responses import BatchRewards, ModelReward, grade


class Judge:
    """A reward model that will have scored the rows 1, 2, 3 at their last token, and notes what it was sent."""

    def __init__(self, *, reads_chats: bool = False, num_cut: int = 0) -> None:
        self.answer, self.num_cut = reads_chats, num_cut
        self.sent: DataProto | None = None

    def reads_chats(self) -> bool:
        return self.answer

    def compute_rm_score(self, data: DataProto) -> DataProtoFuture:
        self.sent = data
        mask = data.batch["response_mask"]
        scores = torch.zeros(mask.shape)
        scores[torch.arange(3), mask.sum(-1) - 1] = torch.tensor([1.0, 2.0, 3.0])
        metrics = {"reward/rm_cut": [Metric(self.num_cut, "sum"), Metric(0, "sum")]}
        metrics["timing_s/rm"] = [Metric(1, "max"), Metric(2, "max")]
        rows = DataProto.from_dict(tensors={"rm_scores": scores}, meta_info={"metrics": metrics})
        return DataProtoFuture(lambda _: rows, [], resolve=list)


class Graders(RewardManager):
    """A manager that gives each response a tenth."""

    is_closed = False

    def __init__(self) -> None:
        self.outcomes: list[object] = []

    def __call__(self, data: DataProto) -> RewardOutput:
        mask = data.batch["response_mask"]
        scores = torch.zeros(mask.shape)
        scores[torch.arange(3), mask.sum(-1) - 1] = 0.1
        return RewardOutput(scores, {"pred": ["x"] * 3}, {"reward/errors": Metric(0, "sum")})

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def batch(answers: DataProto) -> DataProto:
    answers.batch["position_ids"] = answers.batch["attention_mask"]
    answers.non_tensor_batch["raw_prompt"] = answers.non_tensor_batch["reward_model"]
    return answers


def value(output: RewardOutput, name: str) -> float:
    return output.metrics[name].value


def test_scores_are_added_and_told_apart(
    batch: DataProto, caplog: pytest.LogCaptureFixture
) -> None:
    judge, graders = Judge(), Graders()
    reward = ModelReward(judge, graders)
    output = reward(batch)
    torch.testing.assert_close(output.scores.sum(-1), torch.tensor([1.1, 2.1, 3.1]))
    # Answers of 3, 1 and 1 tokens: the sum stands where both stand.
    assert output.scores.nonzero().tolist() == [[0, 2], [1, 0], [2, 0]]
    assert batch.batch["rm_scores"].sum(-1).tolist() == [1, 2, 3]
    assert output.extra["rm_score"].tolist() == [1, 2, 3] and output.extra["pred"] == ["x"] * 3
    assert [value(output, f"reward/rm_score/{kind}") for kind in ("mean", "max", "min")] == [
        2,
        3,
        1,
    ]
    assert value(output, "reward/rule_score/mean") == pytest.approx(0.1)
    assert value(output, "reward/errors") == value(output, "reward/rm_cut") == 0
    assert value(output, "timing_s/rm") == 2
    assert caplog.text == ""
    reward.close()
    assert graders.is_closed


@pytest.mark.parametrize(("reads_chats", "sent"), [(False, set()), (True, {"raw_prompt", "uid"})])
def test_chats_travel_where_they_are_read(
    batch: DataProto, reads_chats: bool, sent: set[str]
) -> None:
    judge = Judge(reads_chats=reads_chats)
    ModelReward(judge, Graders())(batch)
    assert set(judge.sent.non_tensor_batch) == sent
    assert set(judge.sent.batch.keys()) == {
        "input_ids",
        "attention_mask",
        "position_ids",
        "response_mask",
    }


def test_what_was_cut_is_said(batch: DataProto, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        output: Any = ModelReward(Judge(num_cut=2), Graders())(batch)
    assert value(output, "reward/rm_cut") == 2
    assert "2 of 3 inputs were too long (reward_model.max_length)" in caplog.text


class Elsewhere(Graders):
    """Grades only when it is waited for; tells what became of it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, data: DataProto, outcomes: object = None) -> Grading:
        self.events.append("started")
        self.outcomes = outcomes
        return Grading(lambda: self(data), lambda: self.events.append("cancelled"))


def test_graders_begin_before_the_model_scores(batch: DataProto) -> None:
    """The sum is the same; neither is waited for before the join."""
    graders = Elsewhere()
    reward = ModelReward(Judge(), graders)
    grading = reward.begin(batch)
    assert graders.events == ["started"] and "rm_scores" not in batch.batch.keys()
    output = grading.result()
    assert batch.batch["rm_scores"].sum(-1).tolist() == [1, 2, 3]
    torch.testing.assert_close(output.scores.sum(-1), torch.tensor([1.1, 2.1, 3.1]))
    assert value(output, "reward/rm_score/mean") == 2 and output.extra["pred"] == ["x"] * 3
    grading.cancel()
    assert graders.events == ["started", "cancelled"]


def test_graders_end_where_the_model_fails(batch: DataProto) -> None:
    class Broken(Judge):
        def compute_rm_score(self, data: DataProto) -> DataProtoFuture:
            raise RuntimeError("no memory")

    graders = Elsewhere()
    with pytest.raises(RuntimeError, match="no memory"):
        ModelReward(Broken(), graders).begin(batch)
    assert graders.events == ["started", "cancelled"]


def test_a_manager_that_is_only_called_grades_at_the_join(batch: DataProto) -> None:
    rewards = BatchRewards(Graders(), batch)
    assert "token_level_scores" not in batch.batch.keys()
    output = rewards.join(batch)
    assert rewards.is_joined and batch.batch["token_level_scores"] is output.scores
    assert [extra["pred"] for extra in batch.non_tensor_batch["reward_extra"]] == ["x"] * 3


def test_outcomes_of_responses_that_were_graded_early_are_handed_over(batch: DataProto) -> None:
    """They leave the batch; where there are none, all responses are graded."""
    graders = Elsewhere()
    early = [Outcome(1.0, {}, "", "graded")] * 3
    batch.non_tensor_batch["reward_outcome"] = np.array([None] * 3, dtype=object)
    batch.non_tensor_batch["reward_outcome"][:] = early
    grade(ModelReward(Judge(), graders), batch)
    assert list(graders.outcomes) == early and "reward_outcome" not in batch.non_tensor_batch
    grade(graders, batch)
    assert graders.outcomes is None


def test_only_rewards_that_are_not_joined_are_cancelled(batch: DataProto) -> None:
    graders = Elsewhere()
    BatchRewards(graders, batch).cancel()
    assert graders.events == ["started", "cancelled"]
    rewards = BatchRewards(graders, batch)
    rewards.join(batch)
    rewards.cancel()
    assert graders.events == ["started", "cancelled", "started"]
