# SPDX-License-Identifier: Apache-2.0
"""Groups of responses that differ, until there are enough of them."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.config import Config
from quadriga.errors import DataError, RewardError
from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.trainer.group_filter import GroupFilter, metric_of_rows


def graded(
    scores: list[list[float]], first: int = 0, extras: list[dict[str, Any]] | None = None
) -> DataProto:
    """Groups of responses with these scores; the score stands at the second of three tokens."""
    flat = torch.tensor([score for group in scores for score in group])
    uids = [f"1-{first + number}" for number, group in enumerate(scores) for _ in group]
    return DataProto.from_dict(
        {"token_level_scores": flat[:, None] * torch.tensor([[0.0, 1.0, 0.0]])},
        {
            "uid": np.array(uids, dtype=object),
            "reward_extra": object_array(extras or [{} for _ in uids]),
        },
        {"metrics": {"tokens": Metric(len(uids), "sum")}, "global_steps": 1},
    )


def group_filter(batch_size: int, **settings: Any) -> GroupFilter:
    filter_groups = {"enable": True, **settings}
    return GroupFilter(
        Config(data={"train_batch_size": batch_size}, algorithm={"filter_groups": filter_groups})
    )


def fill(groups: GroupFilter, *batches: list[list[float]]) -> list[int]:
    """Give it batch after batch until it is full. Returns how many prompts there were before each."""
    before = []
    for scores in batches:
        if groups.is_full:
            break
        before.append(groups.num_groups)
        groups.add(graded(scores, first=groups.num_groups))
    return before


def test_batches_are_taken_until_enough_groups_differ() -> None:
    """0.1 three times is equal, though its deviation in floating point is not zero."""
    equal, differ = [0.1, 0.1, 0.1], [0.0, 1.0, 0.0]
    groups = group_filter(2)
    assert fill(groups, [equal, differ], [equal, equal], [differ, differ], [differ, differ]) == [
        0,
        2,
        4,
    ]
    batch = groups.batch()
    assert batch.non_tensor_batch["uid"].tolist() == ["1-1"] * 3 + ["1-4"] * 3
    metrics = reduce_metrics(batch.meta_info["metrics"])
    assert metrics == {
        "tokens": 18.0,
        "filter_groups/num_batches": 3.0,
        "filter_groups/num_groups": 6.0,
        "filter_groups/num_equal": 3.0,
        "filter_groups/num_surplus": 1.0,
        "filter_groups/score/mean": pytest.approx((9 * 0.1 + 3) / 18),
    }


def test_limit() -> None:
    expected = (
        r"got 1 groups of responses that differ in seq_reward after 2 batches of prompts "
        r"\(4 groups, 3 of them equal: 2 with 0, 1 with 1\), expected 3, data\.train_batch_size"
    )
    with pytest.raises(DataError, match=expected):
        fill(
            group_filter(3, max_num_gen_batches=2, metric="seq_reward"),
            [[1.0, 1.0], [0.0, 1.0]],
            [[0.0, 0.0], [0.0, 0.0]],
        )
    groups = group_filter(1, max_num_gen_batches=1)
    fill(groups, [[0.0, 1.0]])
    assert groups.is_full, "the last batch may be the one that fills it"


def test_without_a_limit_it_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    groups = group_filter(1, max_num_gen_batches=0)
    with caplog.at_level(logging.WARNING):
        fill(groups, *[[[1.0, 1.0]]] * 20, [[0.0, 1.0]])
    assert len(groups.batch()) == 2
    assert (
        "0 of 1 groups after 20 batches of prompts (20 groups, 20 of them equal: 20 with 1)"
        in caplog.text
    )


def test_groups_differ_in_what_graders_say() -> None:
    """Scores that differ by length only, say, are equal in accuracy; rows without a value are not compared."""
    extras = [
        {"acc": True},
        {"acc": True},
        {"acc": 1.0},
        {"acc": 0},
        {"acc": None},
        {"acc": 1},
        {"acc": float("nan")},
        {},
    ]
    scores = [[0.9, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    groups = group_filter(1, metric="acc")
    groups.add(graded(scores, extras=extras))
    batch = groups.batch()
    assert batch.non_tensor_batch["uid"].tolist() == ["1-1", "1-1"]
    metrics = reduce_metrics(batch.meta_info["metrics"])
    assert metrics["filter_groups/num_equal"] == 3.0
    assert metrics["filter_groups/acc/mean"] == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "graders that return nothing but the score, expected score"),
        (
            {"acc": 1, "pred": "x", "reward_error": ""},
            "graders that return acc, pred, expected score",
        ),
        ({"f1": "high"}, "got str 'high' from the grader, expected a number"),
    ],
)
def test_metric_that_no_grader_gives(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=rf"filter_groups\.metric=f1: .*{said}"):
        metric_of_rows(graded([[0.0, 1.0]], extras=[extra, extra]), "f1")
