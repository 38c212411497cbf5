# SPDX-License-Identifier: Apache-2.0
"""Items shared out: over equal parts (longest first), and into buckets of bytes; a dimension cut over ranks. Host code
without torch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
U = TypeVar("U")


class Parts:
    """Parts that grow evenly: each item goes to the cheapest part that has room for it.

    Offered the costliest items first this is the LPT rule (longest processing time first), whose largest part is at
    most 4/3 of the best one. Of equally cheap parts the first is taken."""

    def __init__(self, room: Sequence[float]) -> None:
        # Of each part, [R]: its items as they came, the sum of their costs, and its room, in the units of `size`.
        self.items: list[list[Any]] = [[] for _ in room]
        self.costs, self.room = np.zeros(len(room)), np.array(room, dtype=np.float64)

    def give(
        self, items: Iterable[Any], cost: float, *, size: float = 0, extra: np.ndarray | None = None
    ) -> int | None:
        """Give items that stay together to one part; returns its number, or None if no part has `size` left.
        `extra`: [R] their additional cost in each part; the part that is then the cheapest gets them."""
        costs = self.costs if extra is None else self.costs + cost + extra
        has_room = self.room >= size
        if not has_room.any():
            return None
        part = int(np.where(has_room, costs, np.inf).argmin())
        self.costs[part] = self.costs[part] + cost if extra is None else costs[part]
        self.room[part] -= size
        self.items[part] += items
        return part


def part_of(total: int, parts: int, number: int) -> tuple[int, int]:
    """Start and size of a part of a dimension [total], cut as `torch.chunk` does: the last may be smaller, or empty."""
    size = -(-total // parts)
    start = min(total, number * size)
    return start, min(size, total - start)


def buckets(
    items: Iterable[T],
    num_bytes: Callable[[T], int],
    max_bytes: int,
    put: Callable[[T, int], U],
    *,
    alignment: int = 1,
) -> Iterator[list[U]]:
    """Pack a stream of items, in order, into buckets of at most `max_bytes`; a larger item has a bucket of its own.
    `put`: called with an item and its offset in the bucket, in bytes; what it returns is what the bucket lists. A
    bucket is yielded before the first item of the next one is put, so all may be written to the same memory.
    `alignment`: items begin at multiples of it, in bytes."""
    bucket: list[U] = []
    used = 0
    for item in items:
        size = num_bytes(item)
        if bucket and used + size > max_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(put(item, used))
        used += -(-size // alignment) * alignment
    if bucket:
        yield bucket
