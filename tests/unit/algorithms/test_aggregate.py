# SPDX-License-Identifier: Apache-2.0
"""Loss aggregation: values by hand, and parts that sum to the whole however the batch is cut."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.algorithms.aggregate import LOSS_AGG_MODES, LossCounts, agg_loss, token_weights
from quadriga.errors import ConfigError

NAN = float("nan")
LOSSES = torch.tensor(
    [[1.0, 3.0, NAN, NAN], [5.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN], [1.0, 2.0, 3.0, 2.0]]
)
MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 17 / 7),
        ("token-sum", 17),
        ("seq-mean-token-sum", (4 + 5 + 8) / 3),
        ("seq-mean-token-mean", (2 + 5 + 2) / 3),
        ("seq-mean-token-sum-norm", (4 + 5 + 8) / 3 / 4),
        ("rollout-mean-token-mean", (2 + 5 + 2) / 3),
    ],
)
def test_golden_values(mode: str, expected: float) -> None:
    """Sequences of 2, 1, 0 and 4 tokens: the empty one is no sequence, and NaN outside the mask is not read."""
    assert float(agg_loss(LOSSES, MASK, mode)) == pytest.approx(expected, rel=1e-6)
    assert float(agg_loss(LOSSES, MASK.bool(), mode)) == pytest.approx(expected, rel=1e-6)


def test_length_of_the_normed_mode() -> None:
    """A given constant goes before the width of the mask."""
    loss = agg_loss(LOSSES, MASK, "seq-mean-token-sum-norm", loss_scale_factor=10)
    assert float(loss) == pytest.approx(17 / 3 / 10, rel=1e-6)


def test_counts() -> None:
    """Tokens, and sequences that have one; parts add up."""
    expected = LossCounts(batch_num_tokens=7, global_batch_size=3, num_rollouts=3)
    assert LossCounts.of(MASK) == expected
    assert LossCounts.of(MASK[:1]) + LossCounts.of(MASK[1:]) == LossCounts.of(MASK)


def test_mean_of_rollouts_with_several_sequences() -> None:
    """Sequences 0 and 3 are a rollout with a mean of 12 / 6, sequence 1 another with 5 / 1. Parts of the batch add up
    to (2 + 5) / 2, even if they cut a rollout, and so do their counts."""
    tokens = torch.tensor([6, 1, 0, 6])
    mode = "rollout-mean-token-mean"
    loss = agg_loss(LOSSES, MASK, mode, rollout_num_tokens=tokens)
    assert float(loss) == pytest.approx(3.5, rel=1e-6)
    parts = [slice(0, 1), slice(1, 3), slice(3, 4)]
    counts = [LossCounts.of(MASK[part], tokens[part]) for part in parts]
    assert sum(count.num_rollouts for count in counts) == pytest.approx(2, abs=1e-12)
    losses = [
        agg_loss(LOSSES[part], MASK[part], mode, num_rollouts=2, rollout_num_tokens=tokens[part])
        for part in parts
    ]
    assert float(sum(losses)) == pytest.approx(3.5, rel=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_empty_mask_is_zero(mode: str) -> None:
    """Alone, and as an empty micro-batch of a batch that is not: loss 0, gradient 0, no NaN."""
    for counts in ({}, {"batch_num_tokens": 7, "global_batch_size": 3}):
        losses = torch.ones(2, 3, requires_grad=True)
        loss = agg_loss(losses, torch.zeros(2, 3), mode, **counts)
        loss.backward()
        assert loss.item() == 0.0 and not losses.grad.any()


def test_unknown_mode() -> None:
    """The nearest name is offered."""
    with pytest.raises(ConfigError, match="Did you mean 'token-mean'"):
        agg_loss(LOSSES, MASK, "token_mean")


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    cuts=st.lists(st.integers(0, 9), max_size=4),
    mode=st.sampled_from(LOSS_AGG_MODES),
    seed=st.integers(0, 9),
)
def test_any_split_sums_to_the_whole(
    lengths: list[int], cuts: list[int], mode: str, seed: int
) -> None:
    """Value and gradient, in float64 to 1e-12, with the parts in their own order.

    Does not prove that an engine passes the right counts; tests/numerics does.
    """
    width = 5
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    losses = torch.randn(
        len(lengths), width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    whole_input, part_input = losses.clone().requires_grad_(), losses.clone().requires_grad_()
    whole = agg_loss(whole_input, mask, mode)
    counts = LossCounts.of(mask)
    edges = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]
    parts = [
        agg_loss(
            part_input[start:stop],
            mask[start:stop],
            mode,
            batch_num_tokens=counts.batch_num_tokens,
            global_batch_size=counts.global_batch_size,
        )
        for start, stop in pairwise(edges)
    ]
    whole.backward()
    for part in parts:
        part.backward()
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(part_input.grad, whole_input.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_weights_packed_like_tokens(mode: str) -> None:
    """Losses and weights without their padding give the same sum."""
    weights = token_weights(MASK, mode, batch_num_tokens=7, global_batch_size=3)
    kept = MASK.bool()
    assert float((LOSSES[kept] * weights[kept]).sum()) == pytest.approx(
        float(agg_loss(LOSSES, MASK, mode)), rel=1e-6
    )
    assert not weights[~kept].any()
