# SPDX-License-Identifier: Apache-2.0
"""Which sequences are computed together, decided without a tensor in sight.

    waiting ── admit: places, tokens of a pass, cache ──> running ── finish ──> gone
       ^                                                     │
       └────────── preempt: the cache is full ───────────────┘

The rows of a batch have no gaps: the last row moves to the place of one that ends. A sequence that has to give way
waits before all others and begins again with what it has written as part of its context.
"""

import math
from collections.abc import Hashable, Iterable, Sized
from typing import Generic, Protocol, TypeVar


class Tokens(Hashable, Sized, Protocol):
    """Tokens, and what belongs to them: equal where all of it is."""


class Sequence(Protocol):
    """What the scheduler asks of a sequence."""

    @property
    def context(self) -> "Tokens":
        """What it begins with; equal ones are computed once."""
        ...

    @property
    def num_left(self) -> int:
        """Tokens that it may still come to hold besides its context."""
        ...


S = TypeVar("S", bound=Sequence)


class Scheduler(Generic[S]):
    """Hands out the places of a batch and the tokens of the cache.

    Args:
        max_num_seqs: rows that a batch may have.
        max_num_batched_tokens: context tokens that start in one round, unless one context alone has more.
        max_cache_tokens: tokens that the cache may hold, padding included; None: any number.
        refill_share: of the places must be free before waiting sequences start, unless all that wait find room.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_cache_tokens: int | None = None,
        refill_share: float = 0.3,
    ) -> None:
        self.waiting: list[S] = []
        self.running: list[S] = []  # by row
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_cache_tokens = max_cache_tokens
        self.refill_share = refill_share

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequences: Iterable[S]) -> None:
        """Sequences wait in their order, but next to each other where they have the same context."""
        groups: dict[Tokens, list[S]] = {}
        for sequence in (*self.waiting, *sequences):
            groups.setdefault(sequence.context, []).append(sequence)
        self.waiting = [sequence for group in groups.values() for sequence in group]

    def finish(self, row: int) -> int:
        """The sequence in this row is done. Returns the row whose sequence stands there from here on, or `row`."""
        last = len(self.running) - 1
        self.running[row] = self.running[last]
        self.running.pop()
        return last

    def admit(self, room: int) -> list[S]:
        """Sequences that start now, in the rows after those that run.

        Args:
            room: tokens of an answer that each row would have in the cache.
        """
        num_free = self.max_num_seqs - len(self.running)
        worthwhile = max(1, math.ceil(self.refill_share * self.max_num_seqs))
        if self.running and num_free < min(worthwhile, len(self.waiting)):
            return []
        contexts = {sequence.context for sequence in self.running}
        started: list[S] = []
        num_tokens = 0
        for sequence in self.waiting[:num_free]:
            more = contexts | {sequence.context}
            num_tokens += len(sequence.context) if len(more) > len(contexts) else 0
            is_first = not started and not self.running
            if not is_first and (num_tokens > self.max_num_batched_tokens and started):
                break
            if not is_first and not self._fits(more, len(self.running) + len(started) + 1, room):
                break
            contexts = more
            started.append(sequence)
        self.waiting = self.waiting[len(started) :]
        self.running += started
        return started

    def fits(self, room: int) -> bool:
        """Whether the cache has this much room for every running answer."""
        return self._fits({sequence.context for sequence in self.running}, len(self.running), room)

    def preempt(self) -> S:
        """The sequence of the last row gives way."""
        sequence = self.running.pop()
        self.waiting.insert(0, sequence)
        return sequence

    def _fits(self, contexts: set[Tokens], num_rows: int, room: int) -> bool:
        if self.max_cache_tokens is None:
            return True
        return cache_tokens((len(context) for context in contexts), num_rows, room) <= self.max_cache_tokens


def cache_tokens(context_lengths: Iterable[int], num_rows: int, room: int) -> int:
    """Tokens that a cache holds, padding included: all contexts are as long as the longest, all answers as the room."""
    lengths = list(context_lengths)
    return len(lengths) * max(lengths, default=0) + num_rows * room
