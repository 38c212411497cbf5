# SPDX-License-Identifier: Apache-2.0
"""What goes where when weights are resharded; that it arrives tests/numerics/test_rollout_groups.py shows."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quadriga.errors import WeightSyncError
from quadriga.partition import part_of
from quadriga.weight_sync.reshard import Box, plan


def cut(shape: tuple[int, int], dim: int, parts: int) -> list[Box]:
    """Shards of a weight along one dimension."""
    found = []
    for number in range(parts):
        start, size = [0, 0], list(shape)
        start[dim], size[dim] = part_of(shape[dim], parts, number)
        found.append(Box(tuple(start), tuple(size)))
    return found


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 9)),
    holders=st.integers(1, 4),
    copies=st.integers(1, 2),
    dim=st.integers(0, 1),
    wanting=st.integers(1, 4),
    bucket_bytes=st.integers(48, 600),
)
def test_each_shard_is_filled_once_within_the_buckets(
    shape: tuple[int, int], holders: int, copies: int, dim: int, wanting: int, bucket_bytes: int
) -> None:
    """Rows on some ranks, perhaps twice; another cut on others, of which some are the same ranks."""
    having = [{"w": piece, "norm": Box((0,), (7,))} for piece in cut(shape, 0, holders) * copies]
    asked = [{"w": piece, "norm": Box((0,), (7,))} for piece in cut(shape, dim, wanting)]
    size = max(len(having), len(asked))
    having += [{}] * (size - len(having))
    asked = [{}] * (size - len(asked)) + asked
    buckets, _ = plan(having, asked, {"w": 4, "norm": 4}, bucket_bytes)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    shards = [torch.full(one["w"].shape, -1) if one else None for one in asked]
    for bucket in buckets:
        load = Counter[int]()
        for move in bucket:
            if move.sender != move.receiver:
                load[move.sender] += move.num_bytes
                load[move.receiver] += move.num_bytes
                assert move.num_bytes >= 4 * torch.Size(move.box.shape).numel()
            assert having[move.sender][move.name].overlap(move.box) == move.box
            if move.name == "w":
                target = asked[move.receiver]["w"].view(shards[move.receiver], move.box)
                assert bool((target == -1).all()), "once"
                target.copy_(Box((0, 0), shape).view(whole, move.box))
        rows = {(move.name, move.box.start[0], move.box.shape[0]) for move in bucket}
        assert max(load.values(), default=0) <= bucket_bytes or all(
            count == 1 for _, _, count in rows
        )
    for one, shard in zip(asked, shards, strict=True):
        if one:
            assert shard is not None and torch.equal(
                shard, Box((0, 0), shape).view(whole, one["w"])
            )


def test_what_a_rank_has_does_not_travel() -> None:
    """Of two copies each rank takes its own; a large weight goes in slices, and is counted once."""
    rows = cut((64, 8), 0, 2)
    buckets, num_sliced = plan(
        [{"w": one} for one in rows * 2], [{"w": one} for one in rows * 2], {"w": 4}, 256
    )
    assert (sum(move.num_bytes for bucket in buckets for move in bucket), num_sliced) == (0, 0)
    whole = {"w": Box((0, 0), (64, 8))}
    buckets, num_sliced = plan([whole, {}], [{}, whole], {"w": 4}, 256)
    assert (len(buckets), num_sliced) == (8, 1)


@pytest.mark.parametrize(
    ("having", "wanting", "words"),
    [
        (
            [{"w": Box((0,), (2,))}],
            [{"w": Box((0,), (4,))}],
            "got 2 elements of rank 0's shard that no rank of the trainer holds",
        ),
        (
            [{"w": Box((0,), (4,))}, {"w": Box((1,), (4,))}],
            [{"w": Box((0,), (5,))}],
            "got 3 elements of rank 0's shard that two ranks hold",
        ),
        (
            [{"w": Box((0,), (2,))}],
            [{"v": Box((0,), (2,))}],
            "only one of trainer and rollout has: v, w",
        ),
    ],
)
def test_weights_that_do_not_fit(having: list[dict], wanting: list[dict], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        plan(having, wanting, {"w": 4, "v": 4}, 256)
