# SPDX-License-Identifier: Apache-2.0
"""Partitions items into equal parts or into buckets of bytes, and a dimension over ranks.

The module does not need torch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
U = TypeVar("U")


class BalancedParts:
    """Parts that grow evenly: each item goes to the cheapest part that has room for it.

    If items come in descending order of their costs, this is the LPT rule (longest processing time
    first), whose largest part is at most 4/3 of the optimum. Among equally cheap parts the first is
    taken.

    Args:
        room: room in each part, [R], in the unit of `size` (see `give`).

    Attributes:
        items: items of each part, in the order in which they came.
        costs: sum of the costs of each part, [R].
        room: room that is left in each part, [R].
    """

    def __init__(self, room: Sequence[float]) -> None:
        self.items: list[list[Any]] = [[] for _ in room]
        self.costs = np.zeros(len(room))
        self.room = np.array(room, dtype=np.float64)

    def give(
        self,
        items: Iterable[Any],
        cost: float,
        *,
        size: float = 0,
        extra: np.ndarray | None = None,
    ) -> int | None:
        """Add items that must stay together to one part.

        Args:
            items: the items.
            cost: their cost in any part.
            size: room that they need.
            extra: additional cost in each part, [R], which is considered when the cheapest part is
                chosen. None: there is no additional cost.

        Returns:
            The number of the part. None: no part has room, and nothing was added.
        """
        # The costs by which parts are compared. With `extra` they are the new costs of each part.
        # Without it, all parts would grow by the same cost, which cannot change the choice.
        costs = self.costs if extra is None else self.costs + cost + extra
        has_room = self.room >= size
        if not has_room.any():
            return None
        part = int(np.where(has_room, costs, np.inf).argmin())
        if extra is None:
            self.costs[part] += cost
        else:
            self.costs[part] = costs[part]
        self.room[part] -= size
        self.items[part] += items
        return part


def part_of(total: int, parts: int, number: int) -> tuple[int, int]:
    """Start and size of a part of a dimension, which is divided in the way of `torch.chunk`.

    Args:
        total: size of the dimension.
        parts: number of parts.
        number: number of the part, starting at 0.

    Returns:
        Start and size. The last parts may be smaller than the others, or empty.
    """
    size = -(-total // parts)  # rounded up
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
    """Pack a stream of items, in order, into buckets of limited size.

    A bucket is yielded before `put` is called for an item of the next one, so that all buckets may
    be written to the same memory.

    Args:
        items: the items. An item is taken only after `put` was called for the previous one.
        num_bytes: returns the size of an item.
        max_bytes: size of a bucket. A larger item gets a bucket of its own.
        put: writes an item at an offset in the bucket, in bytes, and returns what describes it.
        alignment: offsets are multiples of it, in bytes.

    Yields:
        The results of `put` for the items of a bucket.
    """
    bucket = []
    used = 0
    for item in items:
        size = num_bytes(item)
        if bucket and used + size > max_bytes:
            yield bucket
            bucket = []
            used = 0
        bucket.append(put(item, used))
        # The size is rounded up, so that the next item begins at a multiple of the alignment.
        used += -(-size // alignment) * alignment
    if bucket:
        yield bucket
