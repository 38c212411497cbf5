# SPDX-License-Identifier: Apache-2.0
"""Rewards of the rows of a rollout and of the turns of a row."""

import pytest
import torch

from quadriga.errors import RewardError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.protocol.times import GRADED_AT, TIMES
from quadriga.rewards.outcome import Outcome, read_outcome
from quadriga.rewards.samples import Samples, collect
from quadriga.trainer.rollout_rows import forget_times, scored_rows, with_turn_rewards


def test_rewards_of_turns_stand_at_their_last_tokens() -> None:
    """The sum is the score; a row without rewards of turns keeps its score at its last token."""
    scores = torch.tensor([[0.0, 0.0, 0.0, 1.5, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0]])
    attention = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    columns = {
        "turn_spans": object_array([[(0, 1), (2, 4)], [(0, 3)]]),
        "turn_rewards": object_array([[0.5, 0.75], []]),
    }
    batch = DataProto.from_dict({"attention_mask": attention}, columns)
    rewards = with_turn_rewards(scores, batch)
    assert rewards.tolist() == [[0.5, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0]]


def test_samples_without_a_score() -> None:
    """They are no failures, and a batch that has no others is an error."""
    unscored = read_outcome({"score": None, "reason": "draw"})
    assert unscored == Outcome(0.0, {"reason": "draw"}, "", "unscored")
    samples = Samples([{}, {}], torch.tensor([1, 1]), 1, ["row 0", "row 1"])
    output = collect(samples, [unscored, read_outcome(0.0)], max_error_rate=0.0)
    assert output.metrics["reward/unscored"].value == 1
    extras = [{"unscored": value} for value in output.extra["unscored"]]
    batch = DataProto.from_dict({"x": torch.zeros(2)}, {"reward_extra": object_array(extras)})
    assert scored_rows(batch).tolist() == [False, True]
    with pytest.raises(RewardError, match="no sample with a score"):
        collect(samples, [unscored, unscored], max_error_rate=0.0)


def test_times_of_another_run_are_not_known() -> None:
    """A checkpoint of an older version gets the columns, so that its rows can join new ones."""
    tensors = {"responses": torch.ones(2, 3), "token_level_scores": torch.zeros(2, 3)}
    rows = DataProto.from_dict(tensors)
    forget_times(rows)
    assert rows.batch[TIMES].shape == (2, 3) and rows.batch[TIMES].isnan().all()
    assert rows.batch[GRADED_AT].shape == (2,) and rows.batch[GRADED_AT].isnan().all()
    conversations = DataProto.from_dict(
        {"responses": torch.ones(1, 3)}, {"num_turns": object_array([1])}
    )
    forget_times(conversations)
    assert list(conversations.batch.keys()) == ["responses"]
