# SPDX-License-Identifier: Apache-2.0
"""The loss of pairs and its slopes, and how rows become batches of the engine."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.trainer.sft import bradley_terry, conversations_batch, pairs_batch


def test_the_loss_of_a_pair_by_hand() -> None:
    """Margins ln 3 and -ln 3: P(right) = 3/4 and 1/4, so losses ln 4/3 and ln 4; slopes of the mean -(1 - P) / 2."""
    margin = math.log(3)
    losses, slopes = bradley_terry(torch.tensor([[1.0 + margin, 1.0], [1.0, 1.0 + margin]]))
    assert losses.tolist() == pytest.approx([math.log(4 / 3), math.log(4)])
    assert slopes.tolist() == [pytest.approx([-0.125, 0.125]), pytest.approx([-0.375, 0.375])]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=9))
def test_slopes_are_the_derivative_of_the_mean_loss(scores: list[tuple[float, float]]) -> None:
    """Against torch's own derivative of -log sigmoid, written out; what a model makes of them is not shown here."""
    leaf = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    mean = torch.nn.functional.softplus(leaf[:, 1] - leaf[:, 0]).mean()
    (derivative,) = torch.autograd.grad(mean, leaf)
    losses, slopes = bradley_terry(leaf.detach())
    torch.testing.assert_close(slopes, derivative)
    torch.testing.assert_close(losses.mean(), mean.detach())


def test_a_broken_score_is_seen_in_the_loss() -> None:
    losses, _ = bradley_terry(torch.tensor([[math.nan, 0.0]]))
    assert losses.isnan().all()


def test_pairs_are_two_rows_each_scored_behind_their_last_token() -> None:
    rows = DataProto.from_single_dict(
        {
            "input_ids": torch.tensor([[[5, 6, 7, 0], [5, 6, 8, 9]]]),
            "attention_mask": torch.tensor([[[1, 1, 1, 0], [1, 1, 1, 1]]]),
            "position_ids": torch.tensor([[[0, 1, 2, 0], [0, 1, 2, 3]]]),
            "num_prompt_tokens": torch.tensor([2]),
        }
    )
    batch = pairs_batch(rows).batch
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0, 0], [5, 6, 8, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[0, 1, 0], [0, 0, 1]]


def test_conversations_lose_the_padding_that_all_share() -> None:
    ids = torch.tensor([[3, 4, 5, 0, 0], [3, 6, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(5) * mask}
    loss_mask = torch.tensor([[0, 0, 1, 0, 0], [0, 1, 0, 0, 0]])
    batch = conversations_batch(
        DataProto.from_single_dict(columns | {"loss_mask": loss_mask})
    ).batch
    assert batch["input_ids"].tolist() == [[3, 4, 5], [3, 6, 0]]
    assert batch["response_mask"].tolist() == [[0, 1], [1, 0]]


def test_a_batch_of_single_tokens_is_refused() -> None:
    ids = torch.tensor([[3]])
    columns = dict.fromkeys(("input_ids", "attention_mask", "position_ids", "loss_mask"), ids // 3)
    with pytest.raises(DataError, match="rows of one token"):
        conversations_batch(DataProto.from_single_dict(columns))
