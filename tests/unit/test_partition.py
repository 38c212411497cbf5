# SPDX-License-Identifier: Apache-2.0
"""Items in equal parts and in buckets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.partition import BalancedParts, buckets, part_of


def test_each_item_goes_to_the_cheapest_part() -> None:
    """The costliest first: 5 | 4, then 3 to the second, 3 to the first; equal parts are taken in their order."""
    parts = BalancedParts([9, 9])
    assert [
        parts.give([name], cost) for name, cost in (("a", 5), ("b", 4), ("c", 3), ("d", 3))
    ] == [0, 1, 1, 0]
    assert (parts.items, parts.costs.tolist()) == ([["a", "d"], ["b", "c"]], [8, 7])


def test_a_part_without_room_gets_nothing() -> None:
    """The next cheapest gets the item; where there is none, no part changes."""
    parts = BalancedParts([1, 2])
    assert [parts.give([number], 1, size=size) for number, size in enumerate((1, 2, 1))] == [
        0,
        1,
        None,
    ]
    assert (parts.items, parts.room.tolist()) == ([[0], [1]], [0, 0])


def test_what_an_item_costs_besides_decides() -> None:
    """A part that would be the cheapest with the item's extra cost is taken, although it is not without."""
    parts = BalancedParts([9, 9])
    parts.give(["a"], 2)
    assert parts.give(["b"], 1, extra=np.array([0.0, 5.0])) == 0
    assert parts.costs.tolist() == [3, 0]


def fill(sizes: list[int], max_bytes: int, alignment: int = 1) -> list[list[tuple[int, int]]]:
    """Sizes and offsets by bucket."""
    return list(
        buckets(sizes, int, max_bytes, lambda size, offset: (size, offset), alignment=alignment)
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([4, 4, 4], [[(4, 0), (4, 4)], [(4, 0)]]),
        ([20, 1], [[(20, 0)], [(1, 0)]]),
        ([1, 20, 1], [[(1, 0)], [(20, 0)], [(1, 0)]]),
    ],
)
def test_buckets_are_few_and_a_larger_item_stands_alone(sizes: list[int], expected: list) -> None:
    """Items keep their order; a bucket ends where the next item has no room."""
    assert fill(sizes, 8) == expected


def test_items_begin_at_multiples_of_the_alignment() -> None:
    """The gap counts as used."""
    assert fill([1, 4, 1], 8, alignment=4) == [[(1, 0), (4, 4)], [(1, 0)]]


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_nothing_is_lost(sizes: list[int], max_bytes: int) -> None:
    """All items are in the buckets, in order; only a bucket of one item is larger than it may be."""
    found = fill(sizes, max_bytes)
    assert [size for bucket in found for size, _ in bucket] == sizes
    assert all(sum(size for size, _ in bucket) <= max_bytes or len(bucket) == 1 for bucket in found)


def test_a_bucket_is_given_out_before_the_next_is_put() -> None:
    """So all buckets may be written to the same memory; and an item is put before the next one is asked for."""
    log: list[str] = []

    def stream():
        for size in (4, 4, 4):
            log.append("asked")
            yield size

    for bucket in buckets(stream(), int, 8, lambda size, _: log.append("put")):
        log.append(f"given {len(bucket)}")
    assert log == ["asked", "put", "asked", "put", "asked", "given 2", "put", "given 1"]


@pytest.mark.parametrize("parts", range(1, 9))
def test_parts_of_a_dimension_are_those_of_torch_chunk(parts: int) -> None:
    """FSDP2 shards rows as torch.chunk does; ranks behind the last row have none."""
    torch = pytest.importorskip("torch")
    for total in range(1, 20):
        rows = torch.arange(total)
        chunks = [chunk.tolist() for chunk in rows.chunk(parts)]
        chunks += [[]] * (parts - len(chunks))
        for number, chunk in enumerate(chunks):
            start, size = part_of(total, parts, number)
            assert rows[start : start + size].tolist() == chunk
