# SPDX-License-Identifier: Apache-2.0
"""Calls to worker processes, on the driver: waiting for outputs, and ending processes.

`docs/controller.md` (Waits) says what `resolve` consumes, waits for and is unblocked by.

    short wait     ray.get(all, 0.25 s) ---- all complete ----> outputs
    long wait      ray.wait(all, 0.25 s), repeated; completed calls are checked for failures
                   every 5 s: do the head and the nodes still accept connections?
    failure        wait a moment for further failures, to raise the cause and not a consequence:
                   deaths first, then exceptions in order of time, then lost peers (PeerLostError)

When a process dies, its peers fail in their collective, often before Ray notices the death. When a
process raises, its peers hang in their collective. In both cases the driver raises the error within
seconds.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from quadriga.descendants import start_time_of
from quadriga.errors import PeerLostError, QuadrigaError, WorkerError, WorkerLostError
from quadriga.observe.watchdog import waiting
from quadriga.single_controller.ray import cluster, transport
from quadriga.single_controller.ray.errors import (
    CrashLog,
    Failure,
    WorkerName,
    cause_of_death,
    crash_log,
)
from quadriga.single_controller.ray.process import ProcessAddress, Status

REPORT_EVERY_S = 30.0
POLL_S = 0.25
LOOK_AT_NODES_S = 5.0
HEAD_LOST = threading.Event()
"""Set by the heartbeat when the cluster's head is lost. The next wait then checks the nodes at
once: a driver that makes only short calls would not notice the loss before Ray ends the driver."""
GRACE_S = 1.0
"""Time to wait for further failures after the first one, which may be a consequence of them."""
PEER_LOST_GRACE_S = 8.0
"""The same if all failures are lost peers: Ray has yet to notice the death that caused them."""
_LOST_PEER = 2  # first number of the sort key of lost peers, which come last; see `_cause_order`
STATUS_LIMIT_S = 2.0  # time for processes to report their status
CRASH_LOG_LIMIT_S = 5.0  # time to read the traces of a dead process on its node
END_LIMIT_S = 10.0  # time for killed processes to be gone
# The same on another node. A busy machine may take long to start the process that checks.
NODE_LIMIT_S = 70.0
RAY_KILLS_S = 3.0  # time for Ray to kill a process before it is killed directly


@dataclass(frozen=True)
class RemoteCall:
    """Handle of a started method, returned by `RayWorkerGroup.start_all`."""

    ref: Any  # Ray's reference of the output
    actor: Any  # handle of the process
    address: ProcessAddress | None  # None: not known yet
    worker: WorkerName
    method: str
    # Returns a description of the arguments, for errors. It keeps the arguments alive.
    arguments: Callable[[], str]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the call with the description of its arguments instead of the arguments."""
        arguments = partial(str, self.arguments())
        fields = (self.ref, self.actor, self.address, self.worker, self.method, arguments)
        return RemoteCall, fields


# ---- waiting ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loss:
    """A call without an output, because its process died or Ray could not transfer data."""

    call: RemoteCall
    error: RayError  # Ray's error for the call

    def __str__(self) -> str:
        return f"{self.call.worker}.{self.call.method} has no answer either"

    def as_error(self) -> WorkerError:
        """Make the error to raise, with the cause as far as Ray and the node know it.

        The error has a note with the end of the process's standard error.
        """
        call = self.call
        error = self.error
        address = call.address
        # The process is alive if Ray could not transfer the arguments or the output.
        if isinstance(error, RayTaskError):
            return self._transfer_error(f"{type(error.cause).__name__}: {error.cause}")
        if isinstance(error, RaySystemError) and error.traceback_str:
            return self._transfer_error(str(error.client_exc))

        if isinstance(error, ActorUnavailableError):
            error = _second_error(call) or error
        log = CrashLog()
        # A lost node cannot be asked.
        if address is not None and not isinstance(error, NodeDiedError):
            try:
                log = cluster.run_on_node(
                    address.node_id, crash_log, address.log, limit_s=CRASH_LOG_LIMIT_S
                )
            except RayError as failure:
                log = CrashLog((f"(they could not be read: {type(failure).__name__})",))

        # Kernel's count of memory kills when the process started. Without an address it is unknown:
        # with the present count instead, no memory kill is blamed.
        oom_kills = address.oom_kills if address else log.oom_kills
        # Either this driver has killed the process, or Ray and the traces say why it died.
        got, fix = _KILLED.get(address) or cause_of_death(error, log, oom_kills, call.worker.pid)
        if call.arguments():
            got += f" (called with {call.arguments()})"
        death = WorkerLostError(f"{call.worker} died in {call.method}", got=got, fix=fix)
        death.worker = str(call.worker)
        if log.last_lines:
            process = f"{call.worker}, process {call.worker.pid}"
            death.add_note(f"\n{process}, its last lines on standard error:")
            death.add_note("\n".join(f"  {line}" for line in log.last_lines))
        return death

    def _transfer_error(self, problem: str) -> WorkerError:
        """Make the error for arguments or an output that Ray could not transfer.

        Args:
            problem: type and message of the exception.
        """
        call = self.call
        error = WorkerError(
            f"{call.worker} failed in {call.method}",
            got=f"{problem} (called with {call.arguments()})",
            expected="arguments and a result that can be pickled here and unpickled there",
        )
        error.worker = str(call.worker)
        error.add_note(f"\nRay says:\n{self.error}")
        return error


_FAILED = (Failure, _Loss)  # classes in place of the output of a call that failed


def resolve(
    handles: Sequence[RemoteCall],
    borrow: bool = False,
    report_every_s: float | None = None,
    emit: Callable[[str], None] = print,
) -> list[Any]:
    """Wait for calls and return their outputs, in the order of the calls.

    Args:
        handles: the calls.
        borrow: whether outputs may be read-only views of shared memory. The caller must copy them.
        report_every_s: seconds between two reports on a long wait. Defaults to `REPORT_EVERY_S`.
        emit: receives the reports.

    Raises:
        WorkerError: a worker raised. Errors of Quadriga keep their type. A note of the error has
            the traceback.
        WorkerLostError: the process, its node or the cluster is lost. A note of the error has the
            end of the process's standard error.
    """
    pending_calls = _PendingCalls(handles)
    # A single call to Ray is enough if all are complete soon. If that fails or takes too long,
    # `go_on` fetches the outputs one by one.
    with suppress(RayError):
        outputs = ray.get(list(pending_calls.calls), timeout=POLL_S)
        pending_calls.outputs = dict(zip(pending_calls.calls, outputs, strict=True))
    pending_calls.go_on(report_every_s or REPORT_EVERY_S, emit)
    if pending_calls.failures():
        raise pending_calls.error()
    return [transport.unpack_result(pending_calls.outputs[call.ref], borrow) for call in handles]


def first_outcomes(handles: Sequence[RemoteCall]) -> dict[RemoteCall, Any]:
    """Wait until at least one of several calls has ended.

    Args:
        handles: the calls.

    Returns:
        Output or error of each call that has ended, by call. Outputs are lent, as with `borrow` of
        `resolve`.
    """
    pending_calls = _PendingCalls(handles)
    pending_calls.go_on(REPORT_EVERY_S, for_one=True)
    outcomes = {}
    for ref, output in pending_calls.outputs.items():
        if isinstance(output, _FAILED):
            outcomes[pending_calls.calls[ref]] = output.as_error()
        else:
            outcomes[pending_calls.calls[ref]] = transport.unpack_result(output, borrow=True)
    return outcomes


class _PendingCalls:
    """Calls that the driver waits for.

    Args:
        calls: the calls.

    Attributes:
        description: methods and number of ranks, for messages.
        calls: the calls by the references of their outputs.
        outputs: packed output, `Failure` or `_Loss` of each completed call, by reference.
    """

    def __init__(self, calls: Sequence[RemoteCall]) -> None:
        names = ", ".join(dict.fromkeys(f"{call.worker.role}.{call.method}" for call in calls))
        self.description = f"{names} on {len(calls)} rank{'s' if len(calls) != 1 else ''}"
        self.calls = {call.ref: call for call in calls}
        self.outputs: dict[Any, Any] = {}
        if HEAD_LOST.is_set():
            self.check_nodes()

    def pending(self) -> list[Any]:
        """References of calls that are not complete."""
        return [ref for ref in self.calls if ref not in self.outputs]

    def failures(self) -> list[Failure | _Loss]:
        """Failures of completed calls."""
        return [output for output in self.outputs.values() if isinstance(output, _FAILED)]

    def poll(self, limit_s: float) -> bool:
        """Wait at most `limit_s` seconds for all calls, and fetch outputs that are there.

        Returns:
            Whether the wait is over: all calls are complete, or one has failed.
        """
        if pending := self.pending():
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=limit_s)
            for ref in ready:
                try:
                    self.outputs[ref] = ray.get(ref)
                except RayError as error:
                    self.outputs[ref] = _Loss(self.calls[ref], error)
        return not self.pending() or bool(self.failures())

    def go_on(
        self, report_every_s: float, emit: Callable[[str], None] = print, *, for_one: bool = False
    ) -> None:
        """Wait until all calls are complete, or one has failed.

        Args:
            report_every_s: seconds between two reports.
            emit: receives the reports.
            for_one: whether to return as soon as any call is complete.
        """
        if self.poll(0):
            return
        with waiting(self.description, self.report, report_every_s, emit):
            next_look = time.monotonic() + LOOK_AT_NODES_S
            while not self.poll(POLL_S) and not (for_one and self.outputs):
                if time.monotonic() >= next_look:
                    self.check_nodes()
                    next_look = time.monotonic() + LOOK_AT_NODES_S

    def check_nodes(self) -> None:
        """Look for lost nodes, which accept no connections, and record the calls there as lost.

        Raises:
            WorkerLostError: the head of the cluster accepts no connections.
        """
        host, port = cluster.head_address()
        if cluster.is_cluster_lost():
            raise WorkerLostError(
                f"Ray cluster at {host}:{port}",
                got=f"no answer from its head while waiting for {self.description}",
                expected="a cluster that stays up until the run ends",
                fix="A run restarts the cluster that it started itself; restart any other by hand.",
            )

        # Each node is checked once, however many calls it runs.
        refs_by_node = {}
        for ref in self.pending():
            address = self.calls[ref].address
            if address:
                refs_by_node.setdefault((address.node, address.raylet_port), []).append(ref)
        for (node, raylet_port), refs in refs_by_node.items():
            if cluster.is_lost(node, raylet_port):
                for ref in refs:
                    self.outputs[ref] = _Loss(self.calls[ref], NodeDiedError("its node has died"))

    def error(self) -> QuadrigaError:
        """Make the error to raise: the likeliest cause, with the other failures as notes.

        Waits a moment for further failures, because the cause may be reported after a consequence.
        """
        start = time.monotonic()
        while pending := self.pending():
            # A lost peer is a consequence, so its cause is awaited for longer.
            waited_s = time.monotonic() - start
            kinds = {_cause_order(failure)[0] for failure in self.failures()}
            grace_s = PEER_LOST_GRACE_S if kinds == {_LOST_PEER} else GRACE_S
            if waited_s > grace_s:
                break
            # `poll` would wait for all calls.
            ray.wait(pending, timeout=POLL_S)
            self.poll(0)
        first, *further = sorted(self.failures(), key=_cause_order)
        error = first.as_error()
        for failure in further:
            error.add_note(f"And: {failure}")
        return error

    def report(self) -> str:
        """Describe which ranks have responded, and what the other ranks do.

        Asks the late processes for their statuses, for at most `STATUS_LIMIT_S`.
        """
        done = {}  # ranks with an output, by role
        late_calls = []
        for ref, call in self.calls.items():
            if ref in self.outputs:
                done.setdefault(call.worker.role, []).append(call.worker.rank)
            else:
                late_calls.append(call)
        # Ranks without an output, by role and phase (what they do). Many ranks wait in the same
        # place, so they are reported together.
        ranks_at = {}
        statuses = ask_status([call.actor for call in late_calls], STATUS_LIMIT_S)
        for call, status in zip(late_calls, statuses, strict=True):
            if status is None:
                phase = "silent: the process does not say" if call.address else "not started"
            elif not status.method:
                phase = "not begun: the arguments are not there yet"
            # The process runs its calls in order, and is still busy with an earlier call.
            elif (status.role, status.method) != (call.worker.role, call.method):
                phase = f"still in {status.role}.{status.method} for {status.running_s:.0f} s, "
                phase += f"at {status.phase}"
            else:
                phase = f"at {status.phase}"
            ranks_at.setdefault((call.worker.role, phase), []).append(call.worker.rank)

        # The role is named only if there are several.
        roles = {call.worker.role for call in self.calls.values()}
        prefixes = {role: f"{role} " if len(roles) > 1 else "" for role in roles}
        responded = ", ".join(
            f"{prefixes[role]}{_ranks_text(ranks)}" for role, ranks in done.items()
        )
        missing = "; ".join(
            f"{prefixes[role]}{_ranks_text(ranks)} {phase}"
            for (role, phase), ranks in ranks_at.items()
        )
        return f"{responded or 'no rank'} answered; not yet: {missing or 'none'}"


def ask_status(actors: Sequence[Any], limit_s: float) -> list[Status | None]:
    """Request the statuses of processes.

    Args:
        actors: handles of the processes.
        limit_s: time limit for all of them together.

    Returns:
        Status of each process; None if it is gone or does not respond in time.
    """
    refs = [actor.status.remote() for actor in actors]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s)
    # If a process is gone, the call that waits for it raises the reason.
    return [output_or_none(ref) if ref in ready else None for ref in refs]


def output_or_none(ref: Any) -> Any:
    """Output of a call to a process; None if the process died or the method raised."""
    try:
        return ray.get(ref)
    except RayError:
        return None


def _cause_order(failure: Failure | _Loss) -> tuple[int, float]:
    """Sort key that puts likely causes first.

    Returns:
        Kind of the failure (0 death, 1 exception, 2 lost peer), and its order among failures of the
        same kind: rank of a dead process, time of an exception.
    """
    if isinstance(failure, _Loss):
        return 0, failure.call.worker.rank
    kind = _LOST_PEER if isinstance(failure.error, PeerLostError) else 1
    return kind, failure.time_s


def _ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0, 2-5`."""
    # For each run of consecutive ranks [first, last], or [rank] alone.
    spans = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            # The rank becomes the last one of the run.
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    texts = ["-".join(map(str, span)) for span in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def _second_error(call: RemoteCall) -> RayError | None:
    """Find the reason for an ActorUnavailableError: Ray raises it before it knows of a death.

    Args:
        call: the call that raised the error.

    Returns:
        The error of a second call to the process; None if it succeeds, or Ray has not decided.
    """
    if call.address and cluster.is_lost(call.address.node, call.address.raylet_port):
        return NodeDiedError("its node has died")
    try:
        ray.get(call.actor.status.remote(), timeout=CRASH_LOG_LIMIT_S)
    except GetTimeoutError:
        return None
    except RayError as error:
        return error
    return None


# ---- the end of processes -----------------------------------------------------------------------

_KILLED: dict[ProcessAddress | None, tuple[str, str]] = {}
"""For each process that `kill` has ended: problem and fix, for the error of the call that waits."""


def end_processes(actors: Sequence[Any], address_refs: Sequence[Any]) -> None:
    """Kill worker processes, and wait until they are gone. Some may have ended already.

    Args:
        actors: handles of the processes.
        address_refs: references of the outputs of their `address` methods. Processes without an
            address have not started, and are not waited for.

    Raises:
        WorkerError: processes are still alive after `END_LIMIT_S`.
    """
    if not ray.is_initialized():
        # The processes have ended with the connection. `ray.kill` would open a new connection.
        return
    ready, _ = ray.wait(list(address_refs), num_returns=len(address_refs), timeout=0)
    addresses: list[ProcessAddress] = list(filter(None, map(output_or_none, ready)))
    # Without a head, Ray kills nothing, and reports that only after a minute: kill at once.
    has_head = not cluster.is_cluster_lost()
    patience_s = RAY_KILLS_S if has_head else 0.0
    if has_head:
        for actor in actors:
            ray.kill(actor, no_restart=True)
    survivors = []
    nodes = {(address.node_id, address.node, address.raylet_port) for address in addresses}
    for node_id, node, raylet_port in nodes:
        is_here = node_id == cluster.own_node_id()
        # A function cannot run on another node without its raylet and the head. A process there
        # ends with its raylet, and a raylet ends a minute after the head.
        if not is_here and not (has_head and cluster.responds(node, raylet_port)):
            continue
        processes = [
            (address.pid, address.started) for address in addresses if address.node_id == node_id
        ]
        try:
            alive = cluster.run_on_node(
                node_id, _await_end, processes, patience_s, limit_s=NODE_LIMIT_S
            )
        except GetTimeoutError:
            # Nobody knows which processes are alive, so report all of them.
            alive = [pid for pid, _ in processes]
        except RayError:
            # The node is gone, and its processes with it.
            alive = []
        survivors += [f"process {pid} on {node}" for pid in alive]
    if survivors:
        raise WorkerError(
            "closing a worker group",
            got=f"{', '.join(survivors)} alive after {END_LIMIT_S:g} s, or on a silent node",
            expected="no process left",
            fix="Look at the node's `dmesg`: a process that survives SIGKILL waits for a device or "
            "a file system.",
        )


def kill(address: ProcessAddress, got: str, fix: str) -> None:
    """Kill a process on any node.

    Args:
        address: the process.
        got: the problem, for the error of the call that waits for the process.
        fix: what to do about it, for that error.

    Raises:
        RayError: the node did not kill it.
    """
    _KILLED[address] = (got, fix)
    processes = [(address.pid, address.started)]
    # 0.0: no patience, so SIGKILL is sent at once.
    cluster.run_on_node(address.node_id, _await_end, processes, 0.0, limit_s=NODE_LIMIT_S)


def _await_end(processes: Sequence[tuple[int, bytes]], patience_s: float) -> list[int]:
    """Wait until processes of this node are gone. Kills them after `patience_s`.

    Args:
        processes: process id and start time of each process. Another process with the same id has
            another start time.
        patience_s: seconds before the SIGKILL.

    Returns:
        Ids of the processes that are alive after `END_LIMIT_S`.
    """
    start = time.monotonic()
    is_killed = False
    while alive := [pid for pid, started in processes if start_time_of(pid) == started]:
        waited_s = time.monotonic() - start
        if waited_s > END_LIMIT_S:
            return alive
        if waited_s >= patience_s and not is_killed:
            for pid in alive:
                # A process may end by itself in the meantime.
                with suppress(ProcessLookupError):
                    # If the process leads a process group, kill the group.
                    kill_process = os.killpg if os.getpgid(pid) == pid else os.kill
                    kill_process(pid, signal.SIGKILL)
            is_killed = True
        time.sleep(0.01)
    return []
