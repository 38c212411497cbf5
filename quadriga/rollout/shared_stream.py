# SPDX-License-Identifier: Apache-2.0
"""One stream of weights for several engines, each in a thread: none is ahead, so a tensor is lent to all at once.

    source ── next ──> tensor k ──┬─> engine 0 copies it ─ wants the next ─┐
       ^                          └─> engine 1 copies it ─ wants the next ─┤
       └────────────────────────── all of them want the next ──────────────┘

Consumes: the source, in the thread that calls `lend`. Waits for: every reader that has not left. Unblocked by: a reader
that asks for the next tensor, or leaves because its engine failed or was satisfied.
"""

from collections.abc import Iterable, Iterator
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedStream(Generic[T]):
    """See the module.

    Args:
        source: what is lent; asked for its next item only when nobody reads the one before any more.
        num_readers: how many will read.
    """

    def __init__(self, source: Iterable[T], num_readers: int) -> None:
        self._source = source
        self._changed = Condition()
        self.readers = [_Reader(self) for _ in range(num_readers)]
        self._reading = set(self.readers)
        self._waiting: set[_Reader[T]] = set()
        self._item: list[T] = []
        """The item that is lent; none once there are no more."""
        self._is_over = False
        self._error: BaseException | None = None

    def lend(self) -> None:
        """Lend one item after the other, until there are no more or nobody reads.

        Raises:
            BaseException: of the source; the readers get it too.
        """
        try:
            source = iter(self._source)
            is_open = True
            while is_open and self._all_wait():
                item = list(next(([one] for one in source), []))
                is_open = bool(item)
                self._give(item)
        except BaseException as error:
            self._error = error
            self._give([])
            raise

    def leave(self, reader: "_Reader[T]") -> None:
        """Nobody waits for this reader any more."""
        with self._changed:
            self._reading.discard(reader)
            self._waiting.discard(reader)
            self._changed.notify_all()

    def next_for(self, reader: "_Reader[T]") -> T:
        """The next item, once all have read the one before."""
        with self._changed:
            if not self._is_over:
                self._waiting.add(reader)
                self._changed.notify_all()
                self._changed.wait_for(lambda: reader not in self._waiting)
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopIteration
            return self._item[0]

    def _all_wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == self._reading)
            return bool(self._reading)

    def _give(self, item: list[T]) -> None:
        with self._changed:
            self._item, self._is_over = item, not item
            self._waiting.clear()
            self._changed.notify_all()


class _Reader(Iterator[T]):
    """An engine's view of the stream."""

    def __init__(self, stream: SharedStream[T]) -> None:
        self._stream = stream

    def __next__(self) -> T:
        return self._stream.next_for(self)
