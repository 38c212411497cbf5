# SPDX-License-Identifier: Apache-2.0
"""Which sequences are computed together, decided without a tensor in sight.

The rows of a batch stay where they are from step to step, so that keys and values are written in place. Finished
rows are computed along, unused, until a change of the batch pays: enough of them to fill with waiting requests, or
to shrink the batch.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A new batch: rows of the old one that stay, in order, and requests that start in the rows after them."""

    kept: tuple[int, ...]
    admitted: tuple[int, ...]


class Scheduler:
    """Hands out the places of a batch.

    Args:
        prompts: what stands for the prompt of each request; requests with equal ones start next to each other.
        max_num_seqs: rows that a batch may have.
        kept_share: the batch changes when at most this share of its places is still in use.
    """

    def __init__(self, prompts: Sequence[Hashable], max_num_seqs: int, kept_share: float = 0.7) -> None:
        first_seen: dict[Hashable, int] = {}
        for prompt in prompts:
            first_seen.setdefault(prompt, len(first_seen))
        self.waiting = sorted(range(len(prompts)), key=lambda request: first_seen[prompts[request]])
        self.rows: list[int] = []  # the request of each row
        self.running: list[bool] = []  # whether that request still runs
        self.max_num_seqs = max_num_seqs
        self.kept_share = kept_share

    def finish(self, row: int) -> None:
        """The request in this row is done."""
        self.running[row] = False

    @property
    def num_running(self) -> int:
        return sum(self.running)

    @property
    def is_done(self) -> bool:
        return not self.waiting and not any(self.running)

    def change(self) -> Change | None:
        """The change that pays now, already made in the scheduler's own rows; None to go on as before."""
        num_running = self.num_running
        num_free = self.max_num_seqs - num_running
        if self.waiting:
            worthwhile = max(1, math.ceil((1 - self.kept_share) * self.max_num_seqs))
            is_due = num_running == 0 or num_free >= min(worthwhile, len(self.waiting))
        else:
            is_due = 0 < num_running <= self.kept_share * len(self.rows)
        if not is_due:
            return None
        kept = tuple(row for row, is_running in enumerate(self.running) if is_running)
        admitted, self.waiting = tuple(self.waiting[:num_free]), self.waiting[num_free:]
        self.rows = [self.rows[row] for row in kept] + list(admitted)
        self.running = [True] * len(self.rows)
        return Change(kept, admitted)
