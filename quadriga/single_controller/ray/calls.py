# SPDX-License-Identifier: Apache-2.0
"""Calls to worker processes on the driver's side: the wait for their outputs, and the processes' end.

What `resolve` consumes, waits for and is unblocked by is in `docs/controller.md`, under Waits.

    good case      ray.get(all, 0.25 s) ---- all there ----> outputs
    long wait      ray.wait(all, 0.25 s) again and again; what is ready is looked at: is it a failure?
                   every 5 s: do the head and the nodes still take connections?
    failure        others that fail now are given a moment, so that the cause is raised and not its consequence:
                   a death comes first, then what was raised first; a lost peer (PeerLostError) comes last

A process that dies makes its peers fail in their collective, often before Ray has noticed the death; a process that
raises leaves its peers hanging in theirs. Either way the driver has the error within seconds.
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

from quadriga.descendants import start_of
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
"""Set by the heartbeat: short calls alone would not notice before Ray ends the driver, after a minute."""
GRACE_S = 1.0
"""After a failure, time for the others to fail as well, so that the cause is distinguished from its consequences."""
PEER_LOST_GRACE_S = 8.0
"""The same where all that failed did so for the lack of a peer: the peer's end is still to be noticed."""
_LOST_PEER = 2
STATUS_LIMIT_S = 2.0
CRASH_LOG_LIMIT_S = 5.0
END_LIMIT_S = 10.0  # time for killed processes to be gone
NODE_LIMIT_S = 70.0  # the same on another node, where a busy machine may take long to start the process that looks
RAY_KILLS_S = 3.0  # time for Ray to kill a process; what then still lives is killed without it


@dataclass(frozen=True)
class Call:
    """The handle of a method that was started: what `RayWorkerGroup.start_all` returns."""

    ref: Any  # Ray's reference of the output
    actor: Any
    address: ProcessAddress | None  # of the process (`actor`); None: not known yet
    worker: WorkerName
    method: str
    arguments: Callable[
        [], str
    ]  # describes them, for an error; it may hold on to them, but a pickled call has the text

    def __reduce__(self) -> tuple[Any, ...]:
        text = partial(str, self.arguments())
        return Call, (self.ref, self.actor, self.address, self.worker, self.method, text)


# ---- waiting ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loss:
    """A call that Ray has no output for, and why it says so."""

    call: Call
    error: RayError

    def __str__(self) -> str:
        return f"{self.call.worker}.{self.call.method} has no answer either"

    def as_error(self) -> WorkerError:
        """Why the process is gone, as far as Ray and its node know, and the end of its log."""
        call, error, address = self.call, self.error, self.call.address
        is_unreadable = isinstance(error, RaySystemError) and bool(error.traceback_str)
        if is_unreadable or isinstance(error, RayTaskError):
            # The process lives: Ray could not bring the arguments there or the output back.
            told = (
                str(error.client_exc)
                if is_unreadable
                else f"{type(error.cause).__name__}: {error.cause}"
            )
            where, got = (
                f"{call.worker} failed in {call.method}",
                f"{told} (called with {call.arguments()})",
            )
            failed = WorkerError(
                where, got, "arguments and a result that can be pickled here and unpickled there"
            )
            failed.worker = str(call.worker)
            failed.add_note(f"\nRay says:\n{error}")
            return failed
        if isinstance(error, ActorUnavailableError):
            error = _asked_again(call) or error
        log = CrashLog()
        # Nothing can be read on a node that is gone.
        if address is not None and not isinstance(error, NodeDiedError):
            try:
                log = cluster.run_on_node(
                    address.node_id, crash_log, address.log, limit_s=CRASH_LOG_LIMIT_S
                )
            except RayError as failure:
                log = CrashLog((f"(they could not be read: {type(failure).__name__})",))
        oom_kills = address.oom_kills if address else log.oom_kills
        got, fix = _KILLED.get(address) or cause_of_death(error, log, oom_kills, call.worker.pid)
        given = f" (called with {call.arguments()})" if call.arguments() else ""
        died = WorkerLostError(f"{call.worker} died in {call.method}", got=f"{got}{given}", fix=fix)
        died.worker = str(call.worker)
        if log.last_lines:
            died.add_note(
                f"\n{call.worker}, process {call.worker.pid}, its last lines on standard error:"
            )
            died.add_note("\n".join(f"  {line}" for line in log.last_lines))
        return died


_FAILED = Failure, _Loss


def resolve(
    handles: Sequence[Call],
    borrow: bool = False,
    report_every_s: float | None = None,
    emit: Callable[[str], None] = print,
) -> list[Any]:
    """Wait for calls and return their outputs, in the order of the calls.

    Args:
        borrow: outputs may be read-only views of shared memory, which the caller copies and does not keep.
        report_every_s: seconds between two reports on a long wait; None: `REPORT_EVERY_S`.
        emit: where the reports go.

    Raises:
        WorkerError: a worker raised; an error of Quadriga's own comes as its own type. Its traceback is a note.
        WorkerLostError: its process, its node or the cluster is gone. The end of its standard error is a note.
    """
    wait = _Wait(handles)
    # Where all respond in time, one call to Ray is enough; otherwise they are looked at one by one.
    with suppress(RayError):
        wait.outputs = dict(zip(wait.calls, ray.get(list(wait.calls), timeout=POLL_S), strict=True))
    wait.go_on(report_every_s or REPORT_EVERY_S, emit)
    if wait.failed():
        raise wait.error()
    return [transport.unpack_result(wait.outputs[call.ref], borrow) for call in handles]


def first_outcomes(handles: Sequence[Call]) -> dict[Call, Any]:
    """Wait for one of several calls. Returns what has come: outputs, lent as with `borrow` of `resolve`, and errors."""
    wait = _Wait(handles)
    wait.go_on(REPORT_EVERY_S, for_one=True)
    outcomes: dict[Call, Any] = {}
    for ref, output in wait.outputs.items():
        has_failed = isinstance(output, _FAILED)
        outcomes[wait.calls[ref]] = (
            output.as_error() if has_failed else transport.unpack_result(output, borrow=True)
        )
    return outcomes


class _Wait:
    """Calls, and the outputs so far, failures too."""

    def __init__(self, calls: Sequence[Call]) -> None:
        names = ", ".join(dict.fromkeys(f"{call.worker.role}.{call.method}" for call in calls))
        self.what = f"{names} on {len(calls)} rank{'s' if len(calls) != 1 else ''}"
        self.calls = {call.ref: call for call in calls}
        self.outputs: dict[Any, Any] = {}
        if HEAD_LOST.is_set():
            self.look_at_nodes()

    def pending(self) -> list[Any]:
        """References of what has not come."""
        return [ref for ref in self.calls if ref not in self.outputs]

    def failed(self) -> list[Failure | _Loss]:
        return [output for output in self.outputs.values() if isinstance(output, _FAILED)]

    def is_over(self, limit_s: float) -> bool:
        """Wait for so many seconds. Returns whether all have come, or one has failed."""
        if pending := self.pending():
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=limit_s)
            for ref in ready:
                try:
                    self.outputs[ref] = ray.get(ref)
                except RayError as error:
                    self.outputs[ref] = _Loss(self.calls[ref], error)
        return not self.pending() or bool(self.failed())

    def go_on(
        self, report_every_s: float, emit: Callable[[str], None] = print, *, for_one: bool = False
    ) -> None:
        """Wait until all have come or one has failed; with `for_one` until one has come."""
        if self.is_over(0):
            return
        with waiting(self.what, self.report, report_every_s, emit):
            look = time.monotonic() + LOOK_AT_NODES_S
            while not self.is_over(POLL_S) and not (for_one and self.outputs):
                if time.monotonic() >= look:
                    self.look_at_nodes()
                    look = time.monotonic() + LOOK_AT_NODES_S

    def look_at_nodes(self) -> None:
        """Give up the calls of nodes that take no connections; an error if the cluster's head does not either."""
        host, port = cluster.head_address()
        if cluster.is_cluster_lost():
            where, got = (
                f"Ray cluster at {host}:{port}",
                f"no answer from its head while waiting for {self.what}",
            )
            fix = (
                "A run starts its own cluster again; one that it joined has to be started by hand."
            )
            raise WorkerLostError(
                where, got=got, expected="a cluster that stays up until the run ends", fix=fix
            )
        addresses = {ref: address for ref in self.pending() if (address := self.calls[ref].address)}
        ports = {(address.node, address.raylet_port) for address in addresses.values()}
        lost = {node for node in ports if cluster.is_lost(*node)}
        for ref, address in addresses.items():
            if (address.node, address.raylet_port) in lost:
                self.outputs[ref] = _Loss(self.calls[ref], NodeDiedError("its node has died"))

    def error(self) -> QuadrigaError:
        """The failure to raise, after a moment for those that fail now; the others are notes of it."""
        start = time.monotonic()
        while pending := self.pending():
            waited_s = time.monotonic() - start
            have_lost_peers = all(
                _cause_first(failure)[0] == _LOST_PEER for failure in self.failed()
            )
            if waited_s > (PEER_LOST_GRACE_S if have_lost_peers else GRACE_S):
                break
            ray.wait(pending, timeout=POLL_S)
            self.is_over(0)
        first, *others = sorted(self.failed(), key=_cause_first)
        error = first.as_error()
        for other in others:
            error.add_note(f"And: {other}")
        return error

    def report(self) -> str:
        """Which ranks have responded, and what the others are doing."""
        late = [self.calls[ref] for ref in self.pending()]
        done: dict[str, list[int]] = {}
        for call in (call for ref, call in self.calls.items() if ref in self.outputs):
            done.setdefault(call.worker.role, []).append(call.worker.rank)
        has_several = len({call.worker.role for call in self.calls.values()}) > 1
        ranks_at: dict[tuple[str, str], list[int]] = {}
        for call, status in zip(
            late, ask_status([call.actor for call in late], STATUS_LIMIT_S), strict=True
        ):
            if status is None:
                phase = "silent: the process does not say" if call.address else "not started"
            elif not status.method:
                phase = "not begun: the arguments are not there yet"
            elif (status.role, status.method) != (call.worker.role, call.method):
                phase = f"still in {status.role}.{status.method} for {status.running_s:.0f} s, at {status.phase}"
            else:
                phase = f"at {status.phase}"
            ranks_at.setdefault((call.worker.role, phase), []).append(call.worker.rank)
        there = ", ".join(
            f"{f'{role} ' * has_several}{_ranks(ranks)}" for role, ranks in done.items()
        )
        missing = "; ".join(
            f"{f'{role} ' * has_several}{_ranks(ranks)} {phase}"
            for (role, phase), ranks in ranks_at.items()
        )
        return f"{there or 'no rank'} answered; not yet: {missing or 'none'}"


def ask_status(actors: Sequence[Any], limit_s: float) -> list[Status | None]:
    """What processes are doing; None for one that does not respond in time, or is gone."""
    refs = [actor.status.remote() for actor in actors]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s)
    # Of a process that is gone the call itself tells, with the reason.
    return [_value(ref) if ref in ready else None for ref in refs]


def _value(ref: Any) -> Any:
    """What a call has returned; None if its process has died."""
    try:
        return ray.get(ref)
    except RayError:
        return None


def _cause_first(failure: Failure | _Loss) -> tuple[int, float]:
    """Sorts failures: deaths, then other failures by their time, then what failed for the lack of a peer."""
    if isinstance(failure, _Loss):
        return 0, failure.call.worker.rank
    return _LOST_PEER if isinstance(failure.error, PeerLostError) else 1, failure.time_s


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0, 2-5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join(
        "-".join(map(str, span)) for span in spans
    )


def _asked_again(call: Call) -> RayError | None:
    """What Ray says of a process at a second call: right after a death it may only know of a lost connection."""
    if call.address and cluster.is_lost(call.address.node, call.address.raylet_port):
        return NodeDiedError("its node has died")
    try:
        ray.get(call.actor.status.remote(), timeout=CRASH_LOG_LIMIT_S)
    except GetTimeoutError:
        # Ray has not decided; what it said first has to do.
        return None
    except RayError as error:
        return error
    return None


# ---- the end of processes -----------------------------------------------------------------------

_KILLED: dict[ProcessAddress | None, tuple[str, str]] = {}
"""What was wrong with a process that this one has killed, and the reason to kill it."""


def end_processes(actors: Sequence[Any], address_refs: Sequence[Any]) -> None:
    """Kill worker processes, and wait until they are gone; one that has ended already does no harm. `address_refs` are
    outputs of their `address` methods; those that have started are waited for.
    Raises WorkerError: processes are still there after `END_LIMIT_S`."""
    if not ray.is_initialized():
        # The connection is over, and with it what this process started; `ray.kill` would begin a new one.
        return
    ready, _ = ray.wait(list(address_refs), num_returns=len(address_refs), timeout=0)
    addresses: list[ProcessAddress] = [
        address for ref in ready if (address := _value(ref)) is not None
    ]
    # Without its head Ray kills nothing, and waits for a minute before it says so.
    has_head = not cluster.is_cluster_lost()
    patience_s = RAY_KILLS_S if has_head else 0.0
    for actor in actors if has_head else ():
        ray.kill(actor, no_restart=True)
    left: list[str] = []
    for node_id, node, raylet_port in {
        (each.node_id, each.node, each.raylet_port) for each in addresses
    }:
        processes = [
            (address.pid, address.started) for address in addresses if address.node_id == node_id
        ]
        alive: list[int] = []
        # Elsewhere a process ends itself: when its node's raylet does, and a raylet when it has no head for a minute.
        if node_id == cluster.own_node_id() or (has_head and cluster.responds(node, raylet_port)):
            try:
                alive = cluster.run_on_node(
                    node_id, _end, processes, patience_s, limit_s=NODE_LIMIT_S
                )
            except RayError as error:
                # Else the node is gone, and what ran there with it.
                alive = [pid for pid, _ in processes] if isinstance(error, GetTimeoutError) else []
        left += [f"process {pid} on {node}" for pid in alive]
    if left:
        got = f"{', '.join(left)} alive {END_LIMIT_S:g} s after SIGKILL or not answered for"
        fix = "Such a process waits for a device or a file system; the node's `dmesg` may say why."
        raise WorkerError("closing a worker group", got=got, expected="no process left", fix=fix)


def kill(address: ProcessAddress, got: str, fix: str) -> None:
    """Kill a process wherever it is, and note why for who waits for it. RayError: its node did not do it."""
    _KILLED[address] = got, fix
    cluster.run_on_node(
        address.node_id, _end, [(address.pid, address.started)], 0.0, limit_s=NODE_LIMIT_S
    )


def _end(processes: Sequence[tuple[int, bytes]], patience_s: float) -> list[int]:
    """Wait until processes (pid, start) of this node are gone, after `patience_s` with a SIGKILL. Returns the rest."""
    start = time.monotonic()
    is_killed = False
    while alive := [pid for pid, started in processes if start_of(pid) == started]:
        waited_s = time.monotonic() - start
        if waited_s > END_LIMIT_S:
            return alive
        if waited_s >= patience_s and not is_killed:
            for pid in alive:
                # It may end by itself in the meantime.
                with suppress(ProcessLookupError):
                    # With its process group, if it leads one.
                    (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
            is_killed = True
        time.sleep(0.01)
    return []
