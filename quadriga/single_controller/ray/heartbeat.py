# SPDX-License-Identifier: Apache-2.0
"""Heartbeat: kills processes of a run that no longer answer, or whose call exceeds its time limit.

    heartbeat thread, on the driver     every process of the run
      status.remote, every 2.5 s  --->  control thread: answers while the working thread computes
      no answer for a while             a message names the process and its state
      none for stall_timeout_s          SIGKILL
      a call over half of its limit     a message names the call and its limit
      a call over phase_timeout_s       stacks of all processes are printed, then SIGKILL

Without `phase_timeout_s`, a process that answers is never killed. `calls.resolve` notices a killed
process like any other death.

Consumes: statuses. Waits for: its own clock. Unblocked by: `close`.
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
from quadriga.single_controller.ray.calls import RemoteCall
from quadriga.single_controller.ray.cluster import is_cluster_lost, run_on_node
from quadriga.single_controller.ray.errors import WorkerName
from quadriga.single_controller.ray.process import ProcessAddress, Status, state_of

EVERY_S = 2.5
NAMED_AFTER_S = 15.0
"""Time without an answer until a message names the process. Until then it may be in a function in C
that holds the interpreter's lock."""

STACKS_LIMIT_S = 5.0  # time for processes to send their stacks
NODE_LIMIT_S = 10.0  # time for a node to tell the state of a process


@dataclass
class _Watched:
    """A watched process, and what its last answers said."""

    actor: Any
    worker: WorkerName
    address: ProcessAddress
    status_ref: Any  # reference of the status that was requested last
    silent_s: float = 0.0  # time without an answer
    is_named: bool = False  # whether a message has reported its silence
    long_call: str = ""  # call (ROLE.METHOD) that a message has reported as long; "": none


class Heartbeat:
    """A thread that requests the statuses of a run's processes, until `close`.

    Args:
        starts: for each group, a function that returns the starts of its processes. A process is
            watched once it has started.
        settings: provides `stall_timeout_s` and `phase_timeout_s`.
        emit: receives the messages.
    """

    def __init__(
        self,
        starts: Sequence[Callable[[], list[RemoteCall]]],
        settings: TrainerConfig,
        emit: Callable[[str], None] = print,
    ) -> None:
        self.stall_s = settings.stall_timeout_s
        self.phase_s = settings.phase_timeout_s
        self.emit = emit
        self._starts = starts
        self._started_refs: set[Any] = set()  # refs of the starts that are complete
        self._watched: list[_Watched] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        # The heartbeat of an earlier cluster may have set it.
        calls.HEAD_LOST.clear()
        self._thread.start()

    def close(self) -> None:
        """End the thread. Afterwards processes can be ended without a message."""
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        """Request statuses in rounds, until `close`. The thread's main function."""
        # Silence is counted in rounds and not by a clock: if the driver itself was stopped for
        # long, the processes were not silent meanwhile.
        while not self._is_over.wait(EVERY_S) and ray.is_initialized():
            if is_cluster_lost():
                calls.HEAD_LOST.set()
                return
            self._watch_started()
            for process in list(self._watched):
                try:
                    self._check_status(process)
                except RayError:
                    # The process has died. The call that waits for it raises the reason.
                    self._watched.remove(process)

    def _watch_started(self) -> None:
        """Watch the processes that have started since the last round."""
        pending = {}  # starts that were not complete in the last round, by reference
        for group in self._starts:
            for start in group():
                if start.ref not in self._started_refs:
                    pending[start.ref] = start
        if not pending:
            return
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        self._started_refs.update(ready)
        for ref in ready:
            start = pending[ref]
            # If a process could not start, the call that waits for it raises the reason.
            with suppress(RayError):
                address: ProcessAddress = ray.get(ref)
                worker = replace(start.worker, node=address.node, pid=address.pid)
                status_ref = start.actor.status.remote()
                self._watched.append(_Watched(start.actor, worker, address, status_ref))

    def _check_status(self, process: _Watched) -> None:
        """Check whether a process has answered the last request for its status.

        If it has, check its call's time limit and request the next status; else report its silence
        or kill it.

        Args:
            process: the process.

        Raises:
            RayError: the process has died.
        """
        ready, _ = ray.wait([process.status_ref], timeout=0)
        if ready:
            status: Status = ray.get(process.status_ref)
            process.silent_s = 0.0
            process.is_named = False
            process.status_ref = process.actor.status.remote()
            if self.phase_s is not None:
                self._limit_call(process, status, self.phase_s)
            return
        process.silent_s += EVERY_S
        if process.silent_s >= self.stall_s:
            got = f"no answer of its control thread for {process.silent_s:.0f} s"
            got += self._kernel_state(process)
            self._kill(process, got, f"It was killed: trainer.stall_timeout_s is {self.stall_s}.")
        elif process.silent_s >= NAMED_AFTER_S and not process.is_named:
            process.is_named = True
            self.emit(
                f"{process.worker}, process {process.worker.pid}, has not answered for "
                f"{process.silent_s:.0f} s{self._kernel_state(process)}; after {self.stall_s} s "
                "(trainer.stall_timeout_s) it is killed, and so lost"
            )

    def _limit_call(self, process: _Watched, status: Status, limit_s: float) -> None:
        """Report a call that has taken half of its time limit, or end one that has exceeded it.

        Args:
            process: the process.
            status: its status.
            limit_s: `trainer.phase_timeout_s`.
        """
        call = ""  # ROLE.METHOD if the call has taken half of its limit
        if status.running_s > limit_s / 2:
            call = f"{status.role}.{status.method}"
        if status.running_s > limit_s:
            self._end_call(process, status)
        # Each call is reported once.
        elif call and call != process.long_call:
            self.emit(
                f"{process.worker}: {call} has taken {status.running_s:.0f} s, at {status.phase}; "
                f"after {limit_s:g} s the process is killed, and so lost. "
                "Raise trainer.phase_timeout_s if the call may take longer."
            )
        process.long_call = call

    def _end_call(self, process: _Watched, status: Status) -> None:
        """Print the stacks of all processes, and kill the process whose call has taken too long.

        Args:
            process: the process.
            status: its status, which names the call.
        """
        name = f"{status.role}.{status.method}"
        limit = f"trainer.phase_timeout_s is {self.phase_s}"
        refs = {watched.actor.stacks.remote(): watched.worker for watched in self._watched}
        ready, silent = ray.wait(list(refs), num_returns=len(refs), timeout=STACKS_LIMIT_S)
        # Names of workers by their stacks, because equal stacks are printed once.
        workers_at = {}
        for ref in ready:
            stacks = calls.output_or_none(ref)
            if stacks is None:
                # This process has died. The one with the long call must be killed all the same.
                silent.append(ref)
            else:
                workers_at.setdefault(stacks, []).append(str(refs[ref]))
        taken = f"{process.worker}: {name} has taken {status.running_s:.0f} s"
        lines = [f"{taken}, {limit}; stacks of all processes:"]
        lines += [f"{', '.join(workers)}:\n{stacks}" for stacks, workers in workers_at.items()]
        lines += [f"{refs[ref]}: no answer" for ref in silent]
        self.emit("\n".join(lines))
        self._kill(
            process, f"{name} not done after {status.running_s:.0f} s", f"It was killed: {limit}."
        )

    def _kernel_state(self, process: _Watched) -> str:
        """Describe the kernel's state of a silent process, to be appended to a message.

        Returns:
            Text in parentheses that begins with a space; "" if the state does not explain the
            silence.
        """
        try:
            state = run_on_node(
                process.address.node_id, state_of, process.address.pid, limit_s=NODE_LIMIT_S
            )
        except RayError as error:
            return f" (its node does not say why: {type(error).__name__})"
        return f" ({state})" if state else ""

    def _kill(self, process: _Watched, got: str, fix: str) -> None:
        """Kill a process and stop watching it. If its node is lost, keep watching.

        Args:
            process: the process.
            got: the problem, for the error of the call that waits for the process.
            fix: what to do about it, for that error.
        """
        try:
            calls.kill(process.address, got, fix)
        except RayError as error:
            # The next round tries again, unless it finds that the process has died with its node.
            self.emit(f"{process.worker} cannot be killed: {type(error).__name__} from its node")
            return
        self._watched.remove(process)
