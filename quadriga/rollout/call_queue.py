# SPDX-License-Identifier: Apache-2.0
"""Queue of requests from `serve`, which an engine answers beside the batches of its own process.

    server     exchange([call 7, call 8]) ──> while open: engine.generate
               <── call 5: its completion ─── finished
               <── call 7: None ───────────── not taken, because the queue is closed

An engine that generates continuously lets a call join the running batch. An engine that blocks
takes all calls that have arrived as its next batch, in turn with the batches of training.

exchange  consumes calls; waits up to `WAIT_S` for a call to finish, or up to `CLOSED_S` for the
          queue to open; unblocked by either.
a call    waits for the engine; unblocked by its completion, or by a cancellation.
closing   waits for the calls that the engine computes.
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Condition
from typing import NamedTuple, TypeAlias

import torch

from quadriga.background import EventLoopThread
from quadriga.errors import EngineLostError, QuadrigaError, RolloutError
from quadriga.rollout.interface import Completion, Images, RolloutEngine, SamplingParams

WAIT_S = 0.02  # how long `exchange` waits for a call to finish
CLOSED_S = 0.1  # how long `exchange` waits for an idle queue to open


class ServedCall(NamedTuple):
    """A request that a server has received."""

    number: int  # number by which the server knows the request
    prompt: list[int]  # token ids
    sampling: SamplingParams
    images: Images | None = None  # images of the prompt


Outcome: TypeAlias = Completion | QuadrigaError | None
"""Completion of a call, the error that prevented it, or None if the queue was closed.

The server queues a call with the outcome None again."""


class QueueReply(NamedTuple):
    """Outcomes of earlier calls.

    Attributes:
        is_open: whether the queue takes calls.
        outcomes: outcomes with the numbers of their calls.
    """

    is_open: bool
    outcomes: list[tuple[int, Outcome]]


class CallQueue:
    """Answers calls with an engine while it is open.

    Args:
        engine: generates the responses.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._thread = EventLoopThread("served calls")
        self._retry_lock = asyncio.Lock()
        # Calls that the engine computes; only the thread of the queue counts them.
        self._num_computing = 0
        self._num_threads = torch.get_num_threads()
        # Guards everything below. Calls are told apart by their numbers.
        self._changed = Condition()
        self._is_open = False
        self._running: dict[int, Future[Completion | None]] = {}
        self._finished: list[tuple[int, Outcome]] = []  # since the last exchange

    def exchange(self, calls: Sequence[ServedCall], cancelled: Collection[int]) -> QueueReply:
        """Take new calls, and return the outcomes of calls that have finished.

        Args:
            calls: the new calls.
            cancelled: numbers of earlier calls that nobody waits for any more.
        """
        with self._changed:
            futures = {call.number: self._thread.submit(self._answer(call)) for call in calls}
            self._running |= futures
            running = self._running
            cancelled_futures = [running.pop(number) for number in cancelled if number in running]
        # Not under the lock, because `_finish` takes it. If a future is done already, or when it is
        # cancelled, its callback runs in this thread.
        for number, future in futures.items():
            future.add_done_callback(lambda done, number=number: self._finish(number, done))
        for future in cancelled_futures:
            future.cancel()
        with self._changed:
            # A closed and idle queue has nothing to report until it opens, so it waits longer.
            if self._running or self._finished or self._is_open:
                self._changed.wait_for(lambda: self._finished or not self._running, WAIT_S)
            else:
                self._changed.wait_for(lambda: self._is_open, CLOSED_S)
            outcomes = self._finished
            self._finished = []
            return QueueReply(self._is_open, outcomes)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Context manager: answer calls inside. On exit, wait for calls under way."""
        self.accept()
        try:
            yield
        finally:
            self._thread.submit(self._drain()).result()

    def accept(self) -> None:
        """Answer calls with the engine from now on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel all calls, and end the thread."""
        with self._changed:
            futures = list(self._running.values())
            self._running.clear()
        for future in futures:
            future.cancel()
        if futures:
            # The thread may be inside a batch, which the engine ends at its next token.
            self._engine.abort()
        self._thread.close()

    async def _drain(self) -> None:
        """Close the queue, and wait for the calls that the engine computes."""
        with self._changed:
            self._is_open = False
        while self._num_computing:
            await asyncio.sleep(WAIT_S / 10)

    async def _answer(self, call: ServedCall) -> Completion | None:
        """Generate the response of a call; None if the queue is closed. Runs in the thread."""
        if not self._is_open:
            return None
        # An engine that blocks computes in this thread. Each thread has its own setting of torch's
        # number of threads.
        torch.set_num_threads(self._num_threads)
        self._num_computing += 1
        try:
            try:
                return await self._engine.generate(call.prompt, call.sampling, call.images)
            except EngineLostError:
                raise
            except Exception:
                # A batch fails as a whole, so another call may be at fault. Under the lock, each
                # call of the batch runs once more by itself; the one at fault fails again.
                async with self._retry_lock:
                    return await self._engine.generate(call.prompt, call.sampling, call.images)
        finally:
            self._num_computing -= 1

    def _finish(self, number: int, done: "Future[Completion | None]") -> None:
        """Store the outcome of a call for the next exchange, unless it was cancelled.

        Args:
            number: number of the call.
            done: future of the call, which is done.
        """
        with self._changed:
            if self._running.pop(number, None) is None or done.cancelled():
                return
            error = done.exception()
            if error is None:
                outcome: Outcome = done.result()
            elif isinstance(error, QuadrigaError):
                outcome = error
            else:
                # Errors of libraries may not survive pickling on their way to the server.
                outcome = RolloutError(self._engine.name, got=f"{type(error).__name__}: {error}")
            self._finished.append((number, outcome))
            self._changed.notify_all()
