# SPDX-License-Identifier: Apache-2.0
"""Where the ranks that hold replicas of one model meet, and the few things that they do together.

    rank 0      rank 1      rank 2
      | join      | join      | join        once per process; the roles in it share the group
      |-- counts of the mini-batch --|      `totals`: small, before the first backward pass
      |-- sums of the gradients -----|      `add_up`: large, once per optimizer step
      | leave     | leave     | leave       the last role in the process to leave ends the group

Every rank calls the same collectives in the same order, also one that has no rows. A rank alone has no group and pays
nothing: its collectives return what they were given.

Legend: S ranks; [...] is the shape of a parameter.
"""

from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from quadriga.errors import EngineError
from quadriga.observe.machine import taking_part
from quadriga.observe.watchdog import waiting
from quadriga.partition import buckets

# A rank may wait for one that is still loading its model, or has the longer half of a batch.
TIMEOUT = timedelta(minutes=30)
# Large enough that a collective's latency does not count, small enough not to double the memory of the gradients.
BUCKET_BYTES = 256 << 20


class Place(Protocol):
    """Where a rank stands; a worker's place is one."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int


class ProcessGroup:
    """The ranks that hold the same model, seen from the one with this number; tensors are sent from `device`, by
    torch's `group` of them (None: its default one)."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.device = device or torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and reports what is the same everywhere."""
        return self.rank == 0

    def totals(self, *counts: int) -> list[int]:
        """Each count's sum over all ranks: int64 [counts] -> [counts]."""
        if self.size == 1:
            return list(counts)
        numbers = torch.tensor(counts, dtype=torch.int64, device=self.device)
        with taking_part(self._where("the sum of counts")):
            dist.all_reduce(numbers, group=self.group)
            return numbers.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The values [S] of all ranks in their order; for small things that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with taking_part(self._where("an exchange of facts")):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor [...] by its sum over all ranks, in place; all float32, the same shapes everywhere. Each
        element is added up in one place and sent from there: all ranks receive the same bits."""
        if self.size == 1:
            return
        with taking_part(self._where("the sum of gradients")):
            for bucket in buckets(
                tensors, attrgetter("nbytes"), BUCKET_BYTES, lambda tensor, _: tensor
            ):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    dist.all_reduce(bucket[0], group=self.group)
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self.group)
                totals = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(
                    bucket, [one.view(to.shape) for one, to in zip(totals, bucket, strict=True)]
                )

    def require_alike(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Raise an EngineError, on every rank, unless all of them hold the same numbers.
        `tensors`: [...] each, compared by the sums of their bits, which no order of additions changes."""
        if self.size == 1:
            return
        words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = [tensor.detach().view(words[tensor.element_size()]) for tensor in tensors]
        of_ranks = self.gather([int(one.sum(dtype=torch.int64)) for one in bits])
        others = [rank for rank, other in enumerate(of_ranks) if other != of_ranks[0]]
        if others:
            got = f"other numbers on rank {', '.join(map(str, others))} than on rank 0"
            fix = "Every node must read the same model and the same checkpoint: put them on a shared disk."
            raise EngineError(what, got=got, expected="the same on every rank", fix=fix)

    def _where(self, what: str) -> str:
        return f"rank {self.rank} of {self.size} in {what}"


ALONE = ProcessGroup()


class Membership:
    """The default group of torch in this process."""

    num_roles = 0  # of this process, in it
    num_meetings = (
        0  # how often this process has met others: groups made in an earlier meeting are gone
    )


def join(place: Place, device: torch.device, *, also_alone: bool = False) -> ProcessGroup:
    """Meet the other processes at rank 0's address; the first role of a process does, the others find the group there.
    `device`, of its models, chooses the backend (`nccl` for CUDA, `gloo` for all else); `also_alone`: a process without
    others is in a group too, else it pays for none.
    Raises EngineError: not all of them came, or this process is in a group of another shape."""
    if place.world_size == 1 and not also_alone:
        return ProcessGroup(device=device)
    is_cuda = device.type == "cuda"
    if place.world_size == 1 and not dist.is_initialized():
        dist.init_process_group(
            "nccl" if is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        Membership.num_meetings += 1
    if not dist.is_initialized():
        host = f"[{place.master_addr}]" if ":" in place.master_addr else place.master_addr
        address = f"{host}:{place.master_port}"
        where = f"rank {place.rank} of {place.world_size} at {address}"
        if is_cuda:
            torch.cuda.set_device(device)
        try:
            with waiting(f"the other ranks of a process group: {where}"):
                dist.init_process_group(
                    "nccl" if is_cuda else "gloo",
                    init_method=f"tcp://{address}",
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=TIMEOUT,
                    device_id=device if is_cuda else None,
                )
        except RuntimeError as error:
            got, expected = str(error).strip().partition("\n")[0], "all ranks to meet there"
            fix = "Check that the address can be reached from every node and that no other program uses the port."
            raise EngineError(
                f"process group, {where}", got=got, expected=expected, fix=fix
            ) from error
        Membership.num_meetings += 1
    found, expected = (dist.get_rank(), dist.get_world_size()), (place.rank, place.world_size)
    if found != expected:
        got = "rank {} of {} in this process already".format(*found)
        fix = "Roles that share processes need pools of one size."
        raise EngineError(
            "process group", got=got, expected="rank {} of {}".format(*expected), fix=fix
        )
    Membership.num_roles += 1
    return ProcessGroup(place.rank, place.world_size, device)


def leave(group: ProcessGroup) -> None:
    """End a role's part in the group; with the last role of the process the group ends."""
    if group.size == 1 and Membership.num_roles == 0:
        return
    Membership.num_roles -= 1
    if Membership.num_roles == 0 and dist.is_initialized():
        dist.destroy_process_group()
