# SPDX-License-Identifier: Apache-2.0
"""Waiting for calls: their outputs in order, or the error that came first.

    resolve        consumes the answers of the calls; waits for all of them, or for the first failure
                   unblocked by: the last answer; a Failure; a process that Ray says is gone; a node or the
                   cluster's head that takes no connections
    report thread  (observe.watchdog) every 30 s asks each process that has not answered what it is doing, prints it

    good case      ray.get(all, 0.25 s) ---- all there ----> outputs
    long wait      ray.wait(all, 0.25 s) again and again; what is ready is looked at: is it a failure?
                   every 5 s: do the head and the nodes still take connections?
    failure        others that fail now are given a moment, so that the cause is raised and not its consequence:
                   a death comes first, then what was raised first; a lost peer (PeerLostError) comes last

A process that dies makes its peers fail in their collective, often before Ray has noticed the death; a process that
raises leaves its peers hanging in theirs. Either way the driver hears of it within seconds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, NodeDiedError, RayError, RaySystemError, RayTaskError

from quadriga.errors import PeerLostError, QuadrigaError, WorkerError
from quadriga.observe.watchdog import waiting
from quadriga.single_controller.ray import transport
from quadriga.single_controller.ray.deaths import Remains, cause_of_death, remains
from quadriga.single_controller.ray.failures import Failure, Seat
from quadriga.single_controller.ray.nodes import head_address, is_lost, run_on_node
from quadriga.single_controller.ray.process import Call, ProcessAddress, Status, ask_status

REPORT_EVERY_S = 30.0
POLL_S = 0.25
LOOK_AT_NODES_S = 5.0

GRACE_S = 1.0
"""After a failure, time for the others to fail as well, so that the first one can be told from its consequences."""

PEER_LOST_GRACE_S = 8.0
"""The same where all that failed did so for the lack of a peer: the peer's end is still to be noticed."""

STATUS_LIMIT_S = 2.0
AUTOPSY_LIMIT_S = 5.0


@dataclass(frozen=True)
class Loss:
    """A call that Ray has no answer for, and why it says so."""

    call: Call
    error: RayError


def resolve(
    calls: Sequence[Call],
    borrow: bool = False,
    report_every_s: float | None = None,
    emit: Callable[[str], None] = print,
) -> list[Any]:
    """Wait for calls and return their outputs, in the order of the calls.

    Args:
        calls: what was started.
        borrow: outputs may be read-only views of shared memory, which the caller copies and does not keep.
        report_every_s: seconds between two reports on a long wait; None: `REPORT_EVERY_S`.
        emit: where the reports go.

    Raises:
        WorkerError: a worker raised, or its process, its node or the cluster is gone. An error of Quadriga's own comes
            as its own type. The worker's traceback, or its last words, are a note of the error.
    """
    wait = _Wait(calls)
    if not wait.is_over_at_once(POLL_S):
        with waiting(what_is_called(calls), wait.report, report_every_s or REPORT_EVERY_S, emit):
            wait.until_over()
    if wait.has_failed:
        raise wait.error()
    return [transport.unpack_result(answer, borrow) for answer in wait.in_order()]


def addresses(actors: Sequence[Any], refs: Sequence[Any], name: str) -> list[ProcessAddress]:
    """Where processes run; waits until all have started.

    Args:
        actors: in rank order.
        refs: what their `address` methods will return.
        name: what the processes are called.

    Raises:
        WorkerError: one could not be started.
    """
    size = len(actors)
    seats = [Seat(name, rank, size) for rank in range(size)]
    return resolve(
        [Call(ref, actor, None, seat, "start", "") for ref, actor, seat in zip(refs, actors, seats, strict=True)]
    )


class _Wait:
    """Calls, and what has come of them."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = {call.ref: call for call in calls}
        self._order = [call.ref for call in calls]
        self._pending = list(self._calls)
        self._answers: dict[Any, Any] = {}

    @property
    def has_failed(self) -> bool:
        return bool(self._failed())

    def is_over_at_once(self, limit_s: float) -> bool:
        """The same as `is_over`, with one call to Ray instead of two where all answer in time."""
        try:
            self._answers = dict(zip(self._pending, ray.get(self._pending, timeout=limit_s), strict=True))
        except RayError:
            # Some are late, or one is lost: which, must be asked one by one.
            return self.is_over(0)
        self._pending = []
        return True

    def is_over(self, limit_s: float) -> bool:
        """Wait for so many seconds, and say whether all have answered, or one has failed."""
        if self._pending:
            ready, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=limit_s)
            self._take(ready)
        return not self._pending or self.has_failed

    def until_over(self) -> None:
        """Wait as long as it takes.

        Raises:
            WorkerError: the cluster is gone.
        """
        look = time.monotonic() + LOOK_AT_NODES_S
        while not self.is_over(POLL_S):
            if time.monotonic() >= look:
                self._look_at_nodes()
                look = time.monotonic() + LOOK_AT_NODES_S

    def in_order(self) -> list[Any]:
        """The answers in the order of the calls."""
        return [self._answers[ref] for ref in self._order]

    def error(self) -> QuadrigaError:
        """The failure to raise, after a moment for those that fail now; the others are notes of it."""
        limit = time.monotonic() + GRACE_S
        patience = time.monotonic() + PEER_LOST_GRACE_S
        while self._pending and time.monotonic() < (patience if self._has_only_lost_peers() else limit):
            ready, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=POLL_S)
            self._take(ready)
        first, *others = sorted(self._failed(), key=_order_of_blame)
        error = error_of_loss(first) if isinstance(first, Loss) else first.as_error()
        for other in others:
            told = f"{other.call} has no answer either" if isinstance(other, Loss) else str(other)
            error.add_note(f"And: {told}")
        return error

    def report(self) -> str:
        """Who has answered, and what the others are doing."""
        pending = list(self._pending)
        late = [self._calls[ref] for ref in pending]
        answered = [call.seat.rank for ref, call in self._calls.items() if ref not in pending]
        states = ask_status([call.actor for call in late], STATUS_LIMIT_S)
        ranks_at: dict[str, list[int]] = {}
        for call, state in zip(late, states, strict=True):
            ranks_at.setdefault(_phase(call, state), []).append(call.seat.rank)
        missing = "; ".join(f"{_ranks(ranks)} {phase}" for phase, ranks in ranks_at.items())
        return f"{_ranks(answered) if answered else 'no rank'} answered; not yet: {missing or 'none'}"

    def _take(self, refs: Sequence[Any]) -> None:
        try:
            # One call for all is the quick way; it tells nothing but the first error.
            self._answers |= zip(refs, ray.get(list(refs)), strict=True)
        except RayError:
            self._answers |= {ref: _answer(self._calls[ref]) for ref in refs}

    def _failed(self) -> list[Failure | Loss]:
        return [answer for answer in self._answers.values() if isinstance(answer, (Failure, Loss))]

    def _has_only_lost_peers(self) -> bool:
        return all(_is_lost_peer(failure) for failure in self._failed())

    def _look_at_nodes(self) -> None:
        host, port = head_address()
        if is_lost(host, port):
            raise error_of_lost_cluster(what_is_called(list(self._calls.values())))
        where = {address for ref in self._pending if (address := self._calls[ref].address)}
        ports = {(address.node, address.raylet_port) for address in where}
        lost = {(node, port) for node, port in ports if is_lost(node, port)}
        for ref in list(self._pending):
            address = self._calls[ref].address
            if address and (address.node, address.raylet_port) in lost:
                self._pending.remove(ref)
                self._answers[ref] = Loss(self._calls[ref], NodeDiedError("its node has died"))


def what_is_called(calls: Sequence[Call]) -> str:
    """Calls in few words: `actor.update_actor on 4 ranks`."""
    names = list(dict.fromkeys(f"{call.seat.role}.{call.method}" for call in calls))
    return f"{', '.join(names)} on {len(calls)} rank{'s' if len(calls) != 1 else ''}"


def error_of_lost_cluster(during: str) -> WorkerError:
    """The error for a cluster whose head takes no connections.

    Args:
        during: what was waited for.
    """
    host, port = head_address()
    return WorkerError(
        f"Ray cluster at {host}:{port}",
        got=f"no answer from its head while waiting for {during}",
        expected="a cluster that stays up until the run ends",
        fix="Start it again; a run that wrote checkpoints goes on from the last one.",
    )


def error_of_loss(loss: Loss) -> WorkerError:
    """The error for a process that is gone: why, as far as Ray and its node can tell, and its last words."""
    call, error = loss.call, loss.error
    if isinstance(error, RayTaskError):
        return _error_of_travel(call, error, f"{type(error.cause).__name__}: {error.cause}")
    if isinstance(error, RaySystemError) and error.traceback_str:
        return _error_of_travel(call, error, str(error.client_exc))
    if isinstance(error, ActorUnavailableError):
        error = _second_opinion(call) or error
    # Nothing can be asked of a node that is gone.
    left = Remains() if isinstance(error, NodeDiedError) else _remains(call.address)
    before = call.address.oom_kills if call.address else left.oom_kills
    cause = cause_of_death(error, left, before, call.seat.pid)
    given = f" (called with {call.described()})" if call.described() else ""
    died = WorkerError(f"{call.seat} died in {call.method}", got=f"{cause.got}{given}", fix=cause.fix)
    died.worker = str(call.seat)
    if left.last_lines:
        died.add_note(f"\n{call.seat}, process {call.seat.pid}, its last lines on standard error:")
        died.add_note("\n".join(f"  {line}" for line in left.last_lines))
    return died


def _error_of_travel(call: Call, error: RayError, told: str) -> WorkerError:
    """The error for what Ray could not bring there or back: the process lives, its method may even have run."""
    failed = WorkerError(
        f"{call.seat} failed in {call.method}",
        got=f"{told} (called with {call.described()})",
        expected="arguments and a result that can be pickled here and unpickled there",
    )
    failed.worker = str(call.seat)
    failed.add_note(f"\nRay says:\n{error}")
    return failed


def _answer(call: Call) -> Any:
    try:
        return ray.get(call.ref)
    except RayError as error:
        return Loss(call, error)


def _second_opinion(call: Call) -> RayError | None:
    """What Ray says of a process when it is asked again: right after a death it may only know of a lost connection."""
    if call.address and is_lost(call.address.node, call.address.raylet_port):
        return NodeDiedError("its node has died")
    try:
        ray.get(call.actor.status.remote(), timeout=AUTOPSY_LIMIT_S)
    except GetTimeoutError:
        # Ray has not made up its mind; what it said first has to do.
        return None
    except RayError as error:
        return error
    return None


def _remains(address: ProcessAddress | None) -> Remains:
    if address is None:
        return Remains()
    try:
        return run_on_node(address.node_id, remains, address.log, limit_s=AUTOPSY_LIMIT_S)
    except RayError as error:
        return Remains((f"(they could not be read: {type(error).__name__})",))


def _order_of_blame(failure: Failure | Loss) -> tuple[int, float]:
    if isinstance(failure, Loss):
        return 0, failure.call.seat.rank
    return 2 if _is_lost_peer(failure) else 1, failure.time_s


def _is_lost_peer(failure: Failure | Loss) -> bool:
    return isinstance(failure, Failure) and failure.known_as is not None and failure.known_as[0] is PeerLostError


def _phase(call: Call, status: Status | None) -> str:
    if status is None:
        return "silent: the process does not say" if call.address else "not started"
    if not status.method:
        return "not begun: the arguments are not there yet"
    if (status.role, status.method) != (call.seat.role, call.method):
        return f"still in {status.role}.{status.method} for {status.running_s:.0f} s, at {status.phase}"
    return f"at {status.phase}"


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0, 2-5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, span)) for span in spans)
