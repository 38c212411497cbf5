# SPDX-License-Identifier: Apache-2.0
"""Items shared out: over equal parts (longest first), and into buckets of bytes. Host code without torch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
U = TypeVar("U")


class Parts:
    """Parts that grow evenly: each item goes to the cheapest part that has room for it.

    Offered the costliest items first this is the LPT rule (longest processing time first), whose largest part is at
    most 4/3 of the best one. Of equally cheap parts the first is taken.

    Args:
        room: [R] what each part can hold, in the units of `size`.

    Attributes:
        items: [R] what each part holds, in the order in which it was given.
        costs: [R] of each part.
        room: [R] what is left in each part.
    """

    def __init__(self, room: Sequence[float]) -> None:
        self.items: list[list[Any]] = [[] for _ in room]
        self.costs, self.room = np.zeros(len(room)), np.array(room, dtype=np.float64)

    def give(
        self, items: Iterable[Any], cost: float, *, size: float = 0, extra: np.ndarray | None = None
    ) -> int | None:
        """Give items to one part together.

        Args:
            items: that stay together.
            cost: of them.
            size: the room that they take.
            extra: [R] what they cost besides in each part; the part that is then the cheapest gets them.

        Returns:
            the number of the part; None: no part has room, and none was changed.
        """
        costs = self.costs if extra is None else self.costs + cost + extra
        has_room = self.room >= size
        if not has_room.any():
            return None
        part = int(np.where(has_room, costs, np.inf).argmin())
        self.costs[part] = self.costs[part] + cost if extra is None else costs[part]
        self.room[part] -= size
        self.items[part] += items
        return part


def buckets(
    items: Iterable[T],
    num_bytes: Callable[[T], int],
    max_bytes: int,
    put: Callable[[T, int], U],
    *,
    alignment: int = 1,
) -> Iterator[list[U]]:
    """Items in their order, in as few buckets as hold `max_bytes` each; a larger item has a bucket of its own.

    Args:
        items: a stream; each is put before the next one is asked for.
        num_bytes: of an item.
        max_bytes: of a bucket.
        put: from an item and the byte at which it begins in its bucket to what the bucket lists. A bucket is yielded
            before the first item of the next one is put, so all may be written to the same memory.
        alignment: items begin at multiples of it.
    """
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
