# SPDX-License-Identifier: Apache-2.0
"""The process group of ranks that hold replicas of one model, and the few collectives they need.

    rank 0      rank 1      rank 2
      | join      | join      | join        once per process; its roles share the group
      |-- counts of the mini-batch --|      `totals`: small, before the first backward pass
      |-- sums of the gradients -----|      `add_up`: large, once per optimizer step
      | leave     | leave     | leave       the last role of a process to leave ends the group

Every rank calls the same collectives in the same order, even one that has no rows. A single rank
has no group, and its collectives return their input.

Legend: S ranks; [...] is the shape of a parameter.
"""

from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from quadriga.errors import EngineError
from quadriga.observe.machine import detect_lost_peer
from quadriga.observe.watchdog import waiting
from quadriga.partition import buckets

# A rank may have to wait while another loads its model, or computes a longer part of a batch.
TIMEOUT = timedelta(minutes=30)
# Large enough to hide a collective's latency, small enough not to double the gradients' memory.
BUCKET_BYTES = 256 << 20


class ProcessPlace(Protocol):
    """Position of a rank, and the address where ranks meet. `Worker.place` implements it."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int


class ProcessGroup:
    """Ranks that hold the same model, seen from one of them.

    Args:
        rank: number of this rank.
        size: number of ranks.
        device: device of tensors to send; a CPU by default.
        group: torch's group of the ranks; None for its default group.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.device = device or torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and reports what is the same on all ranks."""
        return self.rank == 0

    def totals(self, *counts: int) -> list[int]:
        """Sum each of the counts over all ranks."""
        if self.size == 1:
            return list(counts)
        numbers = torch.tensor(counts, dtype=torch.int64, device=self.device)
        with detect_lost_peer(self._name_activity("the sum of counts")):
            dist.all_reduce(numbers, group=self.group)
            # Within the context: on a GPU, errors of the collective appear here.
            return numbers.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Gather a small picklable object from each rank, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        with detect_lost_peer(self._name_activity("an exchange of facts")):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors [...] over all ranks in place.

        Each element is summed on one rank and sent from there, so all ranks get the same bits. The
        tensors are float32 and have the same shapes on all ranks.
        """
        if self.size == 1:
            return
        with detect_lost_peer(self._name_activity("the sum of gradients")):
            nbytes = attrgetter("nbytes")
            # Each bucket is a list of tensors.
            for bucket in buckets(tensors, nbytes, BUCKET_BYTES, lambda tensor, _: tensor):
                # A tensor that fills a bucket alone is summed in place, without a copy.
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    dist.all_reduce(bucket[0], group=self.group)
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self.group)
                totals = flat.split([tensor.numel() for tensor in bucket])
                for tensor, total in zip(bucket, totals, strict=True):
                    tensor.copy_(total.view(tensor.shape))

    def require_alike(self, description: str, tensors: Sequence[torch.Tensor]) -> None:
        """Check that all ranks hold the same numbers.

        Args:
            description: what the tensors are, for an error.
            tensors: [...] each. Ranks compare the sum of each tensor's bits as integers, which does
                not depend on the order of additions.

        Raises:
            EngineError: on every rank, if any rank has other numbers than rank 0.
        """
        if self.size == 1:
            return
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = []
        for tensor in tensors:
            bits = tensor.detach().view(integers[tensor.element_size()])
            sums.append(int(bits.sum(dtype=torch.int64)))
        sums_by_rank = self.gather(sums)
        expected = sums_by_rank[0]
        differing = [str(rank) for rank, other in enumerate(sums_by_rank) if other != expected]
        if differing:
            raise EngineError(
                description,
                got=f"other numbers on rank {', '.join(differing)} than on rank 0",
                expected="the same numbers on every rank",
                fix="Every node must read the same model and the same checkpoint: put them on a "
                "shared disk.",
            )

    def _name_activity(self, activity: str) -> str:
        """Say which rank waits in which collective, for the error of a lost peer."""
        return f"rank {self.rank} of {self.size} in {activity}"


ALONE = ProcessGroup()


class Membership:
    """Counters of torch's default group in this process. Never instantiated.

    A meeting is the forming of the default group by all ranks. They meet again after it has ended.
    """

    num_roles = 0  # roles of this process in the group
    num_meetings = 0  # meetings so far; groups that were formed after an earlier one are invalid


def join(place: ProcessPlace, device: torch.device, *, also_alone: bool = False) -> ProcessGroup:
    """Join the process group at rank 0's address. The first role of a process forms the group.

    Args:
        place: position of this rank, and the address of rank 0.
        device: device of the models; it chooses the backend, `nccl` for CUDA and otherwise `gloo`.
        also_alone: whether a single process forms a group, which Megatron needs.

    Returns:
        The group, seen from this rank.

    Raises:
        EngineError: not all ranks connected, or this process has another rank or another number of
            ranks in the existing group.
    """
    if place.world_size == 1 and not also_alone:
        return ProcessGroup(device=device)
    if not dist.is_initialized():
        _form_group(place, device)
        Membership.num_meetings += 1
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.world_size):
        raise EngineError(
            "process group",
            got=f"rank {dist.get_rank()} of {dist.get_world_size()} in this process already",
            expected=f"rank {place.rank} of {place.world_size}",
            fix="Roles that share processes need pools of the same size.",
        )
    Membership.num_roles += 1
    return ProcessGroup(place.rank, place.world_size, device)


def _form_group(place: ProcessPlace, device: torch.device) -> None:
    """Initialise torch's default group, together with all other ranks."""
    is_cuda = device.type == "cuda"
    backend = "nccl" if is_cuda else "gloo"
    if place.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    # An IPv6 address needs brackets in a URL.
    host = f"[{place.master_addr}]" if ":" in place.master_addr else place.master_addr
    address = f"{host}:{place.master_port}"
    where = f"rank {place.rank} of {place.world_size} at {address}"
    # Do not pass `device_id`: torch would then split a communicator of NCCL for every later group,
    # even for gloo groups, and also on ranks that are not members.
    if is_cuda:
        torch.cuda.set_device(device)
    try:
        with waiting(f"the other ranks of a process group: {where}"):
            dist.init_process_group(
                backend,
                init_method=f"tcp://{address}",
                rank=place.rank,
                world_size=place.world_size,
                timeout=TIMEOUT,
            )
    except RuntimeError as error:
        raise EngineError(
            f"process group, {where}",
            got=str(error).strip().partition("\n")[0],
            expected="all ranks to connect",
            fix="Check that every node can reach the address and that no other program uses the "
            "port.",
        ) from error


def leave(group: ProcessGroup) -> None:
    """Remove a role from the group. The last role of the process ends the group."""
    # A single process has a group only with `also_alone`.
    if group.size == 1 and Membership.num_roles == 0:
        return
    Membership.num_roles -= 1
    if Membership.num_roles == 0 and dist.is_initialized():
        dist.destroy_process_group()
