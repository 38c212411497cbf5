# SPDX-License-Identifier: Apache-2.0
"""A class in the place of `ProcessGroupNCCL` that has NCCL's rules for making groups.

In a group that is bound to a device, torch makes every new group by splitting a communicator, for
which all ranks of the parent must come, members or not. In others each group of NCCL makes a
communicator when it is first used. Host tensors are refused, because the groups have no backend for
them.
"""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.limits import SOON_S


class Nccl(dist.ProcessGroupGloo):
    """A group of NCCL: counts communicators, and blocks where NCCL would.

    Attributes:
        living: groups of this process, which has a communicator for each.
        num_splits: splits that this process took part in.
        current_device: number of the GPU that this process uses, unique on its node.
    """

    # torch keeps the C++ part of a group only.
    living: ClassVar[list["Nccl"]] = []
    num_splits: ClassVar[int] = 0
    current_device: ClassVar[int] = 0

    class Options(SimpleNamespace):
        """Options that torch sets."""

        split_from: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        # A rank that waits in vain must not wait for the timeout of a run.
        super().__init__(store, rank, size, timedelta(seconds=SOON_S))
        self.living.append(self)
        if options.split_from is not None:
            options.split_from.split()
        store.set(f"device of {rank}", str(self.current_device))
        devices = [store.get(f"device of {other}").decode() for other in range(size)]
        if len(set(devices)) < size:
            raise RuntimeError(f"Duplicate GPU detected: {devices}")

    @property
    def supports_splitting(self) -> bool:
        return True

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make the communicator now; it is counted with the group."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.split()

    def split(self) -> None:
        """Wait for all ranks of the group, as `ncclCommSplit` does."""
        Nccl.num_splits += 1
        self.barrier().wait()


def replace_nccl() -> None:
    """Make torch take this class for NCCL."""
    distributed_c10d.ProcessGroupNCCL = Nccl
    distributed_c10d._NCCL_AVAILABLE = True
