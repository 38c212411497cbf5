# SPDX-License-Identifier: Apache-2.0
"""A rollout group: ranks that hold one engine together, each a shard of its weights and of its KV cache.

    leader     tell(step) ── compute ── add_up, gather ──┐      takes requests, and says before each step what is
    member     hear() ────── compute ── add_up, gather ──┘      added to it or given up, so that all step alike

Groups are formed of neighbouring ranks: with groups of 2, ranks 0 and 1, ranks 2 and 3, ...
"""

import pickle
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from quadriga.observe.machine import taking_part
from quadriga.observe.watchdog import waiting
from quadriga.partition import part_of


class RolloutGroup:
    """The ranks of one engine, seen from one of them.

    Attributes:
        number: of the group.
        rank, size: number of this rank in it, and how many there are; rank 0 is the leader.
        ranks: their numbers in torch's default group.
        device: where tensors lie that are sent.
        tensors, messages: torch's groups of them; messages go over gloo.
    """

    def __init__(self, rank: int, world_size: int, size: int, device: torch.device) -> None:
        """Form all groups of `size` of the ranks of torch's default group; every one of them does, in this order."""
        self.number, self.rank = divmod(rank, size)
        self.size, self.device = size, device
        self.ranks = tuple(range(self.number * size, (self.number + 1) * size))
        for first in range(0, world_size, size):
            ranks = list(range(first, first + size))
            messages = dist.new_group(ranks, backend="gloo")
            tensors = dist.new_group(ranks) if device.type == "cuda" else messages
            if rank in ranks:
                self.messages, self.tensors = messages, tensors

    @property
    def is_leader(self) -> bool:
        """Whether this rank takes requests."""
        return self.rank == 0

    def tell(self, message: Any) -> None:
        """Give all members a message; None costs a number."""
        content = bytearray() if message is None else bytearray(pickle.dumps(message))
        with taking_part(f"{self}, in a message to its members"):
            dist.broadcast(torch.tensor([len(content)]), self.ranks[0], self.messages)
            if content:
                dist.broadcast(
                    torch.frombuffer(content, dtype=torch.uint8), self.ranks[0], self.messages
                )

    def hear(self, *, is_idle: bool = False) -> Any:
        """The leader's next message; to an idle member it may be long in coming, while conversations wait for tools."""
        length = torch.empty(1, dtype=torch.int64)
        wait = waiting(f"{self} for its leader") if is_idle else nullcontext()
        with taking_part(f"{self}, in a message of its leader"), wait:
            dist.broadcast(length, self.ranks[0], self.messages)
            if not int(length):
                return None
            content = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(content, self.ranks[0], self.messages)
        return pickle.loads(content.numpy().tobytes())

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor [...] over the ranks, in its place; the same bits everywhere."""
        with taking_part(f"{self}, in a sum"):
            dist.all_reduce(tensor, group=self.tensors)
        return tensor

    def join(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """Columns [B, total] of the ranks' parts [B, V'], cut as `part_of` does."""
        size = part_of(total, self.size, 0)[1]
        padded = torch.nn.functional.pad(part, (0, size - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with taking_part(f"{self}, in the parts of the logits"):
            dist.all_gather(parts, padded, group=self.tensors)
        return torch.cat(parts, 1)[:, :total]

    def __str__(self) -> str:
        return f"rank {self.rank} of rollout group {self.number} (ranks {', '.join(map(str, self.ranks))})"
