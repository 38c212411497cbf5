# SPDX-License-Identifier: Apache-2.0
"""A rollout group: ranks that hold one engine together, each a shard of its weights and KV cache.

    leader   broadcast(step) ── compute ── all_reduce, all_gather_columns ──┐
    member   receive() ──────── compute ── all_reduce, all_gather_columns ──┘

The leader takes requests, and sends the changes before each step to the members.

Groups are formed of neighbouring ranks: with groups of 2, ranks 0 and 1, ranks 2 and 3, ...
"""

import pickle
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from quadriga.errors import EngineError
from quadriga.observe.machine import detect_lost_peer
from quadriga.observe.watchdog import waiting
from quadriga.partition import part_of


class RolloutGroup:
    """The ranks that hold one engine, seen from one of them.

    All ranks of torch's default group have to make their objects at the same time, because this
    forms the process groups of all rollout groups.

    Args:
        rank: rank of this process in torch's default group.
        world_size: number of ranks in the default group.
        size: number of ranks of each rollout group.
        device: device of the tensors that are sent.

    Attributes:
        number: number of the rollout group.
        rank: rank in the rollout group; 0 is the leader.
        size: number of ranks of the rollout group.
        ranks: ranks of the rollout group's members in the default group.
        device: device of the tensors that are sent.
        tensors: torch's process group for tensors.
        messages: torch's process group for messages, on gloo.
    """

    def __init__(self, rank: int, world_size: int, size: int, device: torch.device) -> None:
        self.number, self.rank = divmod(rank, size)
        self.size = size
        self.device = device
        self.ranks = tuple(range(self.number * size, (self.number + 1) * size))
        # torch needs every rank to take part in making every process group, in the same order.
        for first in range(0, world_size, size):
            ranks = list(range(first, first + size))
            # Messages are on the CPU, which NCCL cannot send.
            messages = dist.new_group(ranks, backend="gloo")
            tensors = dist.new_group(ranks) if device.type == "cuda" else messages
            if rank in ranks:
                self.messages = messages
                self.tensors = tensors

    @property
    def is_leader(self) -> bool:
        """Whether this rank takes requests."""
        return self.rank == 0

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs may contain sums over the ranks. NCCL allows this, gloo does not."""
        return dist.get_backend(self.tensors) == "nccl"

    def broadcast(self, message: Any) -> None:
        """Send a message from the leader to all members.

        Args:
            message: any object that can be pickled. None is the cheapest: only its length is sent.
        """
        # torch's broadcast needs a size that all ranks know, so the length is sent first.
        content = bytearray()
        if message is not None:
            content += pickle.dumps(message)
        with detect_lost_peer(f"{self}, in a message to its members"):
            dist.broadcast(torch.tensor([len(content)]), self.ranks[0], self.messages)
            if content:
                content_tensor = torch.frombuffer(content, dtype=torch.uint8)
                dist.broadcast(content_tensor, self.ranks[0], self.messages)

    def receive(self, *, is_idle: bool = False) -> Any:
        """Receive the leader's next message.

        Args:
            is_idle: whether this rank has no unfinished requests. The wait may then be long, as
                when conversations wait for tools, so it is reported.

        Returns:
            The object that the leader has sent.
        """
        length = torch.empty(1, dtype=torch.int64)
        reported_wait = waiting(f"{self} for its leader") if is_idle else nullcontext()
        with detect_lost_peer(f"{self}, in a message of its leader"), reported_wait:
            dist.broadcast(length, self.ranks[0], self.messages)
            # The leader sends None as an empty message.
            if not int(length):
                return None
            content = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(content, self.ranks[0], self.messages)
        return pickle.loads(content.numpy().tobytes())

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor [...] over the ranks, in place; all ranks get the same bits."""
        with detect_lost_peer(f"{self}, in a sum"):
            dist.all_reduce(tensor, group=self.tensors)
        return tensor

    def all_gather_columns(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """Gather the columns of all ranks on all ranks, side by side.

        Args:
            part: [B, V'], this rank's columns, as `part_of` divides V columns among the ranks.
            total: V, number of columns of all ranks together.

        Returns:
            [B, V].
        """
        # all_gather needs equal shapes, so all ranks pad to the width of rank 0, the largest. As
        # with `torch.chunk`, only the last ranks have fewer columns, such as 3, 3, 3, 1 for V = 10.
        # So all padding ends up on the right, where it is cut off.
        _, width = part_of(total, self.size, 0)
        padding = (0, width - part.shape[1])
        padded = torch.nn.functional.pad(part, padding).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with detect_lost_peer(f"{self}, in the parts of the logits"):
            dist.all_gather(parts, padded, group=self.tensors)
        return torch.cat(parts, 1)[:, :total]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"rank {self.rank} of rollout group {self.number} (ranks {ranks})"


def require_same_tokens(
    group: RolloutGroup, engine: str, *, checksum: int, leader_checksum: int
) -> None:
    """Compare the tokens that this rank generated with the leader's.

    Args:
        group: the rank's group.
        engine: name of the engine.
        checksum: checksum of the rank's tokens.
        leader_checksum: checksum of the leader's tokens.

    Raises:
        EngineError: the tokens differ.
    """
    if checksum != leader_checksum:
        raise EngineError(
            f"{engine}, {group}",
            got="other tokens than the leader's",
            expected="the same on all ranks",
            fix="Give the ranks equal devices, and publish the weights again.",
        )
