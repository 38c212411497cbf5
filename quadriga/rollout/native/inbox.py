# SPDX-License-Identifier: Apache-2.0
"""Inbox of the native engine: any thread puts in requests and work, one runner takes them out.

    put          any thread        tells the caller whether it has to start a runner
    take         the runner        between two steps; the last take of a runner finds nothing
    next_work    the runner        between two steps, until there is no work

At most one runner exists. Whether it goes on is decided under the lock of the inbox, so a request
that arrives while a runner ends starts the next runner.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import torch

from quadriga.rollout.native.generation import GenerationRequest
from quadriga.rollout.native.scheduler import Scheduler


class Work(NamedTuple):
    """Work to be done between two steps; see `NativeEngine.between_steps`."""

    function: Callable[[], None]
    keeps_cache: bool
    recomputes: bool
    done: Future[int]


class Inbox:
    """Requests and work that wait for the runner, and the requests that the runner has.

    Attributes:
        taken: requests that the runner has, running ones first; some may be done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.taken: list[GenerationRequest] = []
        self._new: list[GenerationRequest] = []
        self._work: list[Work] = []
        self._has_runner = False

    def put(self, requests: Sequence[GenerationRequest] = (), work: Sequence[Work] = ()) -> bool:
        """Add requests, and work to be done before the next step.

        Args:
            requests: new requests.
            work: new work.

        Returns:
            Whether the caller has to start a runner. Only one caller is told so until that runner
            ends.
        """
        with self._lock:
            self._new += requests
            self._work += work
            needs_runner = bool(self._new or self._work) and not self._has_runner
            self._has_runner |= needs_runner
            return needs_runner

    def take(
        self, scheduler: Scheduler[GenerationRequest]
    ) -> tuple[list[GenerationRequest], list[GenerationRequest], bool]:
        """Move the new requests to the scheduler.

        Args:
            scheduler: the scheduler of the runner.

        Returns:
            The new requests, the aborted requests, and whether there are requests or work. If not,
            the caller is no longer the runner.
        """
        with self._lock:
            added = self._new
            self._new = []
            scheduler.add(added)
            self.taken = [*scheduler.running, *scheduler.waiting]
            # Under the lock, so that the next caller of `put` starts a runner if this one ends.
            self._has_runner = bool(self._work) or not scheduler.is_done
            # A caller that has cancelled its future does not wait any more.
            aborted = [
                request
                for request in self.taken
                if request.is_aborted or request.future.cancelled()
            ]
            return added, aborted, self._has_runner

    def next_work(self, requests: Callable[[], list[GenerationRequest]]) -> Work | None:
        """Take the oldest work; None if there is none.

        Args:
            requests: returns the runner's unfinished requests. They become `taken`, because the
                work may call `unfinished`.
        """
        # Without the lock, because only the runner removes work. Work that is added meanwhile is
        # found in the next round.
        if not self._work:
            return None
        with self._lock:
            work = self._work.pop(0)
            self.taken = requests()
        return work

    def unfinished(self) -> list[GenerationRequest]:
        """Requests that are neither done nor aborted."""
        with self._lock:
            return [
                request
                for request in (*self.taken, *self._new)
                if not (request.future.done() or request.is_aborted)
            ]

    def abort(self) -> None:
        """Mark all requests as aborted; the runner ends them after the current step."""
        with self._lock:
            for request in (*self.taken, *self._new):
                request.is_aborted = True

    def fail(self, error: BaseException) -> None:
        """Empty the inbox after the runner has failed, and give the error to all callers' futures.

        Args:
            error: the runner's error.
        """
        with self._lock:
            requests = [
                request for request in (*self.taken, *self._new) if not request.future.done()
            ]
            undone_work = self._work
            self.taken = []
            self._new = []
            self._work = []
            self._has_runner = False
        # Without the lock, because callbacks of the futures may use the inbox.
        for work in undone_work:
            work.done.set_exception(error)
        for request in requests:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(error)


class RunnerThread:
    """Thread for runners that must not block a caller. It is started with the first runner."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._turn: Future[None] | None = None  # end of the function that was started last

    def start(self, run: Callable[[], None]) -> None:
        """Run a function in the thread, after the function that was started before it."""
        if self._executor is None:
            # In torch, each thread has its own number of threads: use that of the caller.
            set_threads = partial(torch.set_num_threads, torch.get_num_threads())
            self._executor = ThreadPoolExecutor(1, "native", initializer=set_threads)
        self._turn = self._executor.submit(run)

    def finish(self) -> None:
        """Wait for the function that was started last."""
        if self._turn is not None:
            wait([self._turn])
            self._turn = None

    def close(self) -> None:
        """End the thread."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
