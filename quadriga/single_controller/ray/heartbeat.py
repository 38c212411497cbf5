# SPDX-License-Identifier: Apache-2.0
"""Looks after the processes of a run: one that no longer answers, or is beyond its limit, is killed, and so lost.

    heartbeat thread, on the driver     each process, every few seconds
      status.remote  ---------------->  control thread: answers whatever the working thread does
      no answer for a while             it is named, with its state
      none for stall_timeout_s          SIGKILL
      a call over half of it            it is named, with its limit
      a call over phase_timeout_s       stacks of all processes are printed, then SIGKILL

A process that answers is never killed for working long unless there is a limit for a call. What is killed here is seen
by `calls.resolve` like any death. Consumes: statuses. Waits for: nothing but its own clock. Unblocked by: `close`.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from quadriga.config.trainer import TrainerConfig
from quadriga.single_controller.ray import calls
from quadriga.single_controller.ray.calls import Call
from quadriga.single_controller.ray.cluster import is_cluster_lost, run_on_node
from quadriga.single_controller.ray.errors import WorkerName
from quadriga.single_controller.ray.process import ProcessAddress, Status, state_of

EVERY_S = 2.5
NAMED_AFTER_S = 15.0
"""Without an answer for so long a process is named; a call in C that holds the interpreter's lock may take a while."""

STACKS_LIMIT_S = 5.0
NODE_LIMIT_S = 10.0


@dataclass
class _Watched:
    """A process, the question that is under way, and for how long it has gone without an answer."""

    actor: Any
    worker: WorkerName
    address: ProcessAddress
    question: Any
    silent_s: float = 0.0
    is_named: bool = False
    long_call: str = ""  # the call that was named because it takes long


class Heartbeat:
    """A thread that asks the processes of a run what they are doing, until `close`.
    `starts`: give the starts of the processes of a group; each process is watched once it has started.
    `settings`: `stall_timeout_s` and `phase_timeout_s` are read."""

    def __init__(
        self,
        starts: Sequence[Callable[[], list[Call]]],
        settings: TrainerConfig,
        emit: Callable[[str], None] = print,
    ) -> None:
        self.stall_s, self.phase_s, self.emit = (
            settings.stall_timeout_s,
            settings.phase_timeout_s,
            emit,
        )
        self._starts, self._known = starts, set[Any]()
        self._watched: list[_Watched] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        calls.HEAD_LOST.clear()
        self._thread.start()

    def close(self) -> None:
        """Look no longer; after that processes may be ended without a word from here."""
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        # Looks are counted, not the time between them: the driver itself may have been stopped for an hour.
        while not self._is_over.wait(EVERY_S) and ray.is_initialized():
            if is_cluster_lost():
                calls.HEAD_LOST.set()
                return
            self._take_started()
            for each in list(self._watched):
                try:
                    self._look(each)
                except RayError:
                    # It has died, and whoever waits for it is told why.
                    self._watched.remove(each)

    def _take_started(self) -> None:
        new = {
            start.ref: start
            for group in self._starts
            for start in group()
            if start.ref not in self._known
        }
        ready, _ = ray.wait(list(new), num_returns=len(new), timeout=0) if new else ([], [])
        self._known.update(ready)
        for start in map(new.__getitem__, ready):
            # One that could not start is not watched: whoever waits for it is told why.
            with suppress(RayError):
                address: ProcessAddress = ray.get(start.ref)
                worker = replace(start.worker, node=address.node, pid=address.pid)
                self._watched.append(
                    _Watched(start.actor, worker, address, start.actor.status.remote())
                )

    def _look(self, process: _Watched) -> None:
        ready, _ = ray.wait([process.question], timeout=0)
        if ready:
            status: Status = ray.get(process.question)
            process.silent_s, process.is_named = 0.0, False
            process.question = process.actor.status.remote()
            if self.phase_s is not None:
                self._limit_call(process, status, self.phase_s)
            return
        process.silent_s += EVERY_S
        if process.silent_s >= self.stall_s:
            told = f"no answer of its control thread for {process.silent_s:.0f} s{self._state(process)}"
            self._kill(process, told, f"It was killed: trainer.stall_timeout_s is {self.stall_s}.")
        elif process.silent_s >= NAMED_AFTER_S and not process.is_named:
            process.is_named = True
            self.emit(
                f"{process.worker}, process {process.worker.pid}, has not answered for {process.silent_s:.0f} s"
                f"{self._state(process)}; after {self.stall_s} s (trainer.stall_timeout_s) it is killed, and so lost"
            )

    def _limit_call(self, process: _Watched, status: Status, limit_s: float) -> None:
        """Name a call that has taken half of its time; end one that is over its limit."""
        call = f"{status.role}.{status.method}" if status.running_s > limit_s / 2 else ""
        if status.running_s > limit_s:
            self._end_call(process, status)
        elif call and call != process.long_call:
            self.emit(
                f"{process.worker}: {call} has taken {status.running_s:.0f} s, at {status.phase}; "
                f"after {limit_s:g} s the process is killed, and so lost. "
                "Raise trainer.phase_timeout_s if the call may take longer."
            )
        process.long_call = call

    def _end_call(self, process: _Watched, status: Status) -> None:
        """Print where all processes stand, ranks alike together; then kill the one whose call is over its limit."""
        name, limit = f"{status.role}.{status.method}", f"trainer.phase_timeout_s is {self.phase_s}"
        refs = {each.actor.stacks.remote(): each.worker for each in self._watched}
        ready, silent = ray.wait(list(refs), num_returns=len(refs), timeout=STACKS_LIMIT_S)
        workers_at: dict[str, list[str]] = {}
        for ref in ready:
            workers_at.setdefault(ray.get(ref), []).append(str(refs[ref]))
        told = [
            f"{process.worker}: {name} has taken {status.running_s:.0f} s, {limit}; all processes stand here:"
        ]
        told += [f"{', '.join(workers)}:\n{stacks}" for stacks, workers in workers_at.items()]
        self.emit("\n".join([*told, *(f"{refs[ref]}: no answer" for ref in silent)]))
        self._kill(
            process, f"{name} not done after {status.running_s:.0f} s", f"It was killed: {limit}."
        )

    def _state(self, process: _Watched) -> str:
        """What the kernel says of a process, in brackets; "" for nothing of note."""
        try:
            state = run_on_node(
                process.address.node_id, state_of, process.address.pid, limit_s=NODE_LIMIT_S
            )
        except RayError as error:
            return f" (its node does not say why: {type(error).__name__})"
        return f" ({state})" if state else ""

    def _kill(self, process: _Watched, got: str, fix: str) -> None:
        try:
            calls.kill(process.address, got, fix)
        except RayError as error:
            # Its node is lost too, or will answer at the next look.
            self.emit(f"{process.worker} cannot be killed: {type(error).__name__} from its node")
            return
        self._watched.remove(process)
