# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: decides which requests are computed together. Needs no tensors.

    waiting ── admit: slots, tokens of a prefill, KV cache ──> running ── finish ──> gone
       ^                                                          │
       └──────────── preempt: the KV cache is full ───────────────┘

A running request has a slot, which is a row of the batch. Slots have no gaps: when a request ends,
the last one moves to its slot. A preempted request waits before all others and begins again, with
its response so far as part of its prefix.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

# A request. It has a `prefix`, the tokens that it begins with: equal prefixes are computed once.
R = TypeVar("R", bound=Any)


@dataclass
class Scheduler(Generic[R]):
    """Hands out the slots of a batch and the tokens of the KV cache."""

    max_num_seqs: int  # number of slots
    max_num_batched_tokens: int  # most prefix tokens that `admit` starts; one prefix may have more
    # Most tokens in the KV cache, padding included; None: any number.
    max_cache_tokens: int | None = None
    # Waiting requests start beside running ones only if this share of the slots is free, or if all
    # waiting requests get a slot.
    refill_share: float = 0.3
    waiting: list[R] = field(default_factory=list)  # in the order in which they start
    running: list[R] = field(default_factory=list)  # by slot

    @property
    def is_done(self) -> bool:
        """Whether there is no request."""
        return not self.waiting and not self.running

    def add(self, requests: Iterable[R]) -> None:
        """Queue requests in order, but move requests with the same prefix together.

        `admit` then starts all samples of a prompt in the same prefill.
        """
        groups: dict[Any, list[R]] = {}
        for request in (*self.waiting, *requests):
            groups.setdefault(request.prefix, []).append(request)
        self.waiting = [request for group in groups.values() for request in group]

    def finish(self, slot: int) -> int:
        """Free a slot, and move the request of the last slot there.

        Args:
            slot: the slot of the request that has ended.

        Returns:
            The slot that the moved request had. It is `slot` itself if nothing had to be moved.
        """
        last = len(self.running) - 1
        self.running[slot] = self.running[last]
        self.running.pop()
        return last

    def admit(self, room: int) -> list[R]:
        """Start waiting requests, in the slots after the running ones.

        Args:
            room: tokens of a response that each slot would have in the KV cache.

        Returns:
            The requests that start.
        """
        # A prefill stops all running requests, so a few free slots are not worth it.
        num_free = self.max_num_seqs - len(self.running)
        min_free = max(1, math.ceil(self.refill_share * self.max_num_seqs))
        if self.running and num_free < min(min_free, len(self.waiting)):
            return []

        prefixes = {request.prefix for request in self.running}
        started = []
        num_tokens = 0
        for request in self.waiting[:num_free]:
            if request.prefix not in prefixes:
                num_tokens += len(request.prefix)
            # The first request that starts may exceed the limit of a prefill, and a request that is
            # alone in the batch may exceed the KV cache: otherwise a large one could never start.
            if started and num_tokens > self.max_num_batched_tokens:
                break
            new_prefixes = prefixes | {request.prefix}
            num_slots = len(self.running) + len(started) + 1
            if num_slots > 1 and not self._can_hold(new_prefixes, num_slots, room):
                break
            prefixes = new_prefixes
            started.append(request)
        self.waiting = self.waiting[len(started) :]
        self.running += started
        return started

    def fits(self, room: int) -> bool:
        """Whether the KV cache can hold `room` tokens of the response of every running request."""
        return self._can_hold({request.prefix for request in self.running}, len(self.running), room)

    def preempt(self) -> R:
        """Take the slot of the last request away, and let the request wait before all others.

        Returns:
            The request. Its KV cache is lost, so the caller must reset its prefix.
        """
        request = self.running.pop()
        self.waiting.insert(0, request)
        return request

    def _can_hold(self, prefixes: set[Any], num_slots: int, room: int) -> bool:
        """Whether the KV cache can hold some prefixes, and the responses of some slots.

        Args:
            prefixes: the different prefixes.
            num_slots: number of slots.
            room: tokens of the response of each slot.
        """
        # Padding counts: all prefixes take as much as the longest one.
        num_tokens = len(prefixes) * max(map(len, prefixes), default=0) + num_slots * room
        return self.max_cache_tokens is None or num_tokens <= self.max_cache_tokens
