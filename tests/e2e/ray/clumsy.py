# SPDX-License-Identifier: Apache-2.0
"""A worker that fails on request, and what is asked when it has; for the tests of failures and waits."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist

from quadriga.descendants import start_time_of
from quadriga.errors import DataError, PeerLostError, QuadrigaError
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, WorkerPlace, register
from tests.limits import PROCESS_ENDS_S

POLL_S = 0.05


class UnpicklableError(Exception):
    """Holds on to what cannot travel."""

    def __init__(self) -> None:
        super().__init__("cannot be pickled")
        self.generator = (number for number in range(3))


class Clumsy(Worker):
    """Fails on request."""

    def __init__(self, breaks_rank: int | None = None) -> None:
        if self.rank == breaks_rank:
            raise FileNotFoundError("no model here")

    def process(self) -> tuple[int, int]:
        """Process id and start."""
        return os.getpid(), int(start_time_of(os.getpid()))

    def where(self) -> tuple[WorkerPlace, str]:
        """Its place, and the address of its node."""
        return self.place, ray.util.get_node_ip_address()

    def raise_on_one(self, what: str) -> str:
        """Rank 1 raises, if there is anything to raise; the others return."""
        if self.rank == 1 and what:
            self._raise(what)
        return f"rank {self.rank} is well"

    def end(self, what: str) -> None:
        """Every rank raises or dies, if it is said how."""
        if what:
            self._raise(what)

    async def raise_in_coroutine(self) -> None:
        """Rank 1 raises behind an await."""
        await asyncio.sleep(0)
        if self.rank == 1:
            self._raise("value")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, data: DataProto) -> DataProto:
        """Rank 1 finds its rows wanting."""
        if self.rank == 1:
            raise ValueError("loss is not finite")
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self) -> None:
        """Rank 1 raises, and whoever asks for the result learns it."""
        self.raise_on_one("value")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def consume(self, result: object) -> object:
        """Gets a result that is to come."""
        return result

    def join(self) -> None:
        """Meet the others."""
        place = self.place
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{place.master_addr}:{place.master_port}",
            rank=place.rank,
            world_size=place.world_size,
        )

    def add_up(self, sign: str, end: str) -> float:
        """The sum over all ranks; rank 1 waits for a sign (a file), and does not take part if it ends before."""
        if self.rank == 1:
            while not Path(sign).exists():
                time.sleep(POLL_S)
            if end:
                self._raise(end)
        total = torch.ones(1)
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise PeerLostError("the sum", got=str(error).partition("\n")[0]) from error
        return float(total)

    async def wait_for(self, sign: str) -> None:
        """A coroutine that waits for a sign, two calls below."""
        await self._wait_for(Path(sign))

    async def _wait_for(self, sign: Path) -> None:
        while not sign.exists():
            await asyncio.sleep(POLL_S)

    def sleep(self, seconds: float) -> None:
        """Takes its time."""
        time.sleep(seconds)

    def start_child(self) -> int:
        """A process that the worker starts and forgets."""
        return subprocess.Popen(["sleep", "600"]).pid

    def interruptible_child(self) -> int:
        """How a child of a worker ends on SIGINT."""
        child = subprocess.Popen(["sleep", "600"])
        child.send_signal(signal.SIGINT)
        return child.wait(PROCESS_ENDS_S)

    def lock(self) -> object:
        """An output that cannot travel."""
        return threading.Lock()

    def numbers(self) -> object:
        """An output that Ray would take the first value of."""
        return (number for number in range(3))

    def _raise(self, what: str) -> None:
        if what == "exit status":
            os._exit(7)
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
        raise {
            "value": ValueError("of rank 1"),
            "ours": DataError("data/x.parquet", got="no rows", expected="some", fix="Add rows."),
            "unpicklable": UnpicklableError(),
            "exit": SystemExit(3),
            "interrupt": KeyboardInterrupt(),
        }[what]


def is_gone(pid: int, started: int | None = None) -> bool:
    """Whether a process of this machine has ended, within `PROCESS_ENDS_S`."""
    deadline = time.monotonic() + PROCESS_ENDS_S
    while (now := int(start_time_of(pid) or 0)) != 0 and now == (started or now):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def error_of(call: Callable[[], object]) -> QuadrigaError:
    """The error that a call raises."""
    with pytest.raises(QuadrigaError) as caught:
        call()
    return caught.value


def notes(error: QuadrigaError) -> str:
    """What stands below an error's message in a traceback."""
    return "\n".join(getattr(error, "__notes__", []))
