# SPDX-License-Identifier: Apache-2.0
"""Numbers for samples and rows, and the order in which they go to ranks."""

import numpy as np
import pytest
import torch

from quadriga.config import ActorConfig
from quadriga.protocol import DataProto
from quadriga.trainer.ranks import deal_rows, in_first_order, with_samples


@pytest.fixture
def batch() -> DataProto:
    """Prompts of 1 and 3 tokens with three answers each, whose lengths are 1 to 6."""
    lengths = torch.tensor([[1, 6], [1, 5], [1, 4], [3, 1], [3, 2], [3, 3]])
    columns = torch.arange(9)
    attention = ((columns < 3) & (columns >= 3 - lengths[:, :1])) | ((columns >= 3) & (columns < 3 + lengths[:, 1:]))
    return DataProto.from_dict(
        {"attention_mask": attention.long(), "responses": torch.zeros(6, 6).long(), "row": torch.arange(6)},
        {"uid": ["p"] * 3 + ["q"] * 3},
    )


def test_samples_are_numbered_within_their_prompt() -> None:
    prompts = DataProto.from_dict({"x": torch.tensor([7, 8])}, {"uid": ["a", "b"]})
    samples = with_samples(prompts, 3)
    assert samples.batch["x"].tolist() == [7, 7, 7, 8, 8, 8]
    assert samples.non_tensor_batch["sample_index"].tolist() == [0, 1, 2, 0, 1, 2]
    assert samples.non_tensor_batch["sample_index"].dtype == np.dtype(object)
    assert "sample_index" not in prompts.non_tensor_batch


def test_one_rank_leaves_the_batch_as_it_is(batch: DataProto) -> None:
    assert deal_rows(batch, 1, 3, ActorConfig()) == {}
    assert "row_index" not in batch.batch.keys()
    assert in_first_order("abcdef", batch) == list("abcdef")


def test_rows_are_dealt_and_found_again(batch: DataProto) -> None:
    metrics = deal_rows(batch, 2, 3, ActorConfig(ppo_mini_batch_size=2))
    assert metrics["balance/imbalance"] < metrics["balance/imbalance_before"]
    assert torch.equal(batch.batch["row"], batch.batch["row_index"])
    assert batch.batch["row"].tolist() != list(range(6))
    assert in_first_order(batch.batch["row"].tolist(), batch) == list(range(6))
    lengths = [int(part.batch["attention_mask"].sum()) for part in batch.chunk(2)]
    assert abs(lengths[0] - lengths[1]) <= 3


def test_each_mini_batch_is_dealt_evenly(batch: DataProto) -> None:
    """Of the three rows of a prompt, each a mini-batch of its own, both ranks have some."""
    deal_rows(batch, 2, 3, ActorConfig(ppo_mini_batch_size=1))
    assert [sum(row < 3 for row in part.batch["row"].tolist()) for part in batch.chunk(2)] == [2, 1]


def test_a_shuffled_batch_is_dealt_as_one(batch: DataProto) -> None:
    """What its mini-batches will be is drawn later: the samples of a prompt stay together, or all are spread alike."""
    shuffled, whole = batch.select(), batch.select()
    first = deal_rows(shuffled, 2, 3, ActorConfig(ppo_mini_batch_size=1, shuffle=True))
    assert first == deal_rows(whole, 2, 3, ActorConfig(ppo_mini_batch_size=2))
    assert torch.equal(shuffled.batch["row"], whole.batch["row"])


def test_prompts_count_for_each_row_where_they_are_not_shared(batch: DataProto) -> None:
    before = [deal_rows(batch.select(), 2, 3, ActorConfig(use_prefix_sharing=is_shared)) for is_shared in (True, False)]
    assert before[0]["balance/imbalance_before"] != before[1]["balance/imbalance_before"]
