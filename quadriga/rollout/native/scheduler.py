# SPDX-License-Identifier: Apache-2.0
"""Which requests are computed together (continuous batching), decided without a tensor.

    waiting ── admit: slots, tokens of a prefill, KV cache ──> running ── finish ──> gone
       ^                                                          │
       └──────────── preempt: the KV cache is full ───────────────┘

A running request has a slot, which is a row of the batch. Slots have no gaps: the last request moves to the slot of one
that ends. A preempted request waits before all others and begins again with its response so far as part of its prefix.
"""

import math
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

R = TypeVar(
    "R", bound=Any
)  # a request; its `prefix` are the tokens it begins with: equal ones are computed once


class Scheduler(Generic[R]):
    """Hands out the slots of a batch and the tokens of the KV cache.

    Args:
        max_num_batched_tokens: prefix tokens that start in one round, unless one prefix alone has more.
        max_cache_tokens: tokens that the KV cache may hold, padding included; None: any number.
        refill_share: of the slots must be free before waiting requests start, unless all that wait find a slot.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_cache_tokens: int | None = None,
        refill_share: float = 0.3,
    ) -> None:
        self.waiting: list[R] = []
        self.running: list[R] = []  # by slot
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_cache_tokens = max_cache_tokens
        self.refill_share = refill_share

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.running

    def add(self, requests: Iterable[R]) -> None:
        """Requests wait in their order, but next to each other where they have the same prefix."""
        groups: dict[Any, list[R]] = {}
        for request in (*self.waiting, *requests):
            groups.setdefault(request.prefix, []).append(request)
        self.waiting = [request for group in groups.values() for request in group]

    def finish(self, slot: int) -> int:
        """Frees a slot. Returns the slot whose request moved here, or `slot` where it was the last one."""
        last = len(self.running) - 1
        self.running[slot] = self.running[last]
        self.running.pop()
        return last

    def admit(self, room: int) -> list[R]:
        """Requests that start now, in the slots after those that run.
        `room`: tokens of a response that each slot would have in the KV cache.
        """
        num_free = self.max_num_seqs - len(self.running)
        worthwhile = max(1, math.ceil(self.refill_share * self.max_num_seqs))
        if self.running and num_free < min(worthwhile, len(self.waiting)):
            return []
        prefixes = {request.prefix for request in self.running}
        started: list[R] = []
        num_tokens = 0
        for request in self.waiting[:num_free]:
            more = prefixes | {request.prefix}
            num_tokens += len(request.prefix) if len(more) > len(prefixes) else 0
            is_over = bool(started) and num_tokens > self.max_num_batched_tokens
            num_slots = len(self.running) + len(started) + 1
            if is_over or (num_slots > 1 and not self._fit(more, num_slots, room)):
                break
            prefixes = more
            started.append(request)
        self.waiting = self.waiting[len(started) :]
        self.running += started
        return started

    def fits(self, room: int) -> bool:
        """Whether the KV cache has this many tokens for the response of every running request."""
        return self._fit({request.prefix for request in self.running}, len(self.running), room)

    def preempt(self) -> R:
        """The request of the last slot gives way."""
        request = self.running.pop()
        self.waiting.insert(0, request)
        return request

    def _fit(self, prefixes: set[Any], num_slots: int, room: int) -> bool:
        """With padding: all prefixes are as long as the longest, all responses as the room."""
        num_tokens = len(prefixes) * max(map(len, prefixes), default=0) + num_slots * room
        return self.max_cache_tokens is None or num_tokens <= self.max_cache_tokens
