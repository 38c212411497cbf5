# SPDX-License-Identifier: Apache-2.0
"""Groups of answers that differ, until there are enough of them."""

import logging
from collections.abc import Callable
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


def answered(scores: list[list[float]], first: int = 0, extras: list[dict[str, Any]] | None = None) -> DataProto:
    """Groups of answers with these scores; the score stands at the second of three tokens."""
    flat = torch.tensor([score for group in scores for score in group])
    uids = [f"1-{first + number}" for number, group in enumerate(scores) for _ in group]
    return DataProto.from_dict(
        {"token_level_scores": flat[:, None] * torch.tensor([[0.0, 1.0, 0.0]])},
        {"uid": np.array(uids, dtype=object), "reward_extra": object_array(extras or [{} for _ in uids])},
        {"metrics": {"tokens": Metric(len(uids), "sum")}, "global_steps": 1},
    )


def group_filter(batch_size: int, **settings: Any) -> GroupFilter:
    filter_groups = {"enable": True, **settings}
    return GroupFilter(Config(data={"train_batch_size": batch_size}, algorithm={"filter_groups": filter_groups}))


def source(*batches: list[list[float]]) -> tuple[Callable[[int], DataProto], list[int]]:
    """Batches one after the other, and what was told with each call."""
    told: list[int] = []

    def give(num_before: int) -> DataProto:
        told.append(num_before)
        return answered(batches[len(told) - 1], first=num_before)

    return give, told


def test_off_it_asks_once() -> None:
    give, told = source([[1.0, 1.0]])
    batch = group_filter(1, enable=False).fill(give)
    assert told == [0] and batch.non_tensor_batch["uid"].tolist() == ["1-0", "1-0"]
    assert "filter_groups/num_batches" not in batch.meta_info["metrics"]


def test_it_asks_until_the_batch_is_full() -> None:
    """0.1 three times is equal, though its deviation in floating point is not zero."""
    equal, differ = [0.1, 0.1, 0.1], [0.0, 1.0, 0.0]
    give, told = source([equal, differ], [equal, equal], [differ, differ])
    batch = group_filter(2).fill(give)
    assert told == [0, 2, 4]
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


def test_rows_that_were_dealt_to_ranks_come_back_in_order() -> None:
    dealt = answered([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    dealt.batch["row_index"] = torch.arange(6)
    dealt.reorder([4, 0, 2, 5, 3, 1])
    batch = group_filter(2).fill(lambda _: dealt)
    assert batch.non_tensor_batch["uid"].tolist() == ["1-0", "1-0", "1-2", "1-2"]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [0.0, 1.0, 1.0, 0.0]
    # The rows are dealt again: they are fewer, and each rank gets others.
    assert "row_index" not in batch.batch.keys()


def test_limit() -> None:
    give, told = source([[1.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]])
    expected = (
        r"got 1 groups of answers that differ in seq_reward after 2 batches of prompts "
        r"\(4 groups, 3 of them equal: 2 with 0, 1 with 1\), expected 3, data\.train_batch_size"
    )
    with pytest.raises(DataError, match=expected):
        group_filter(3, max_num_gen_batches=2, metric="seq_reward").fill(give)
    assert told == [0, 2]


def test_without_a_limit_it_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    give, _ = source(*[[[1.0, 1.0]]] * 20, [[0.0, 1.0]])
    with caplog.at_level(logging.WARNING):
        batch = group_filter(1, max_num_gen_batches=0).fill(give)
    assert len(batch) == 2
    assert "0 of 1 groups after 20 batches of prompts (20 groups, 20 of them equal: 20 with 1)" in caplog.text


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
    batch = group_filter(1, metric="acc").fill(lambda _: answered(scores, extras=extras))
    assert batch.non_tensor_batch["uid"].tolist() == ["1-1", "1-1"]
    metrics = reduce_metrics(batch.meta_info["metrics"])
    assert metrics["filter_groups/num_equal"] == 3.0
    assert metrics["filter_groups/acc/mean"] == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "graders that say nothing but the score, expected score"),
        ({"acc": 1, "pred": "x", "reward_error": ""}, "graders that say acc, pred, expected score"),
        ({"f1": "high"}, "got str 'high' from the grader, expected a number"),
    ],
)
def test_metric_that_no_grader_gives(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=rf"filter_groups\.metric=f1: .*{said}"):
        metric_of_rows(answered([[0.0, 1.0]], extras=[extra, extra]), "f1")
