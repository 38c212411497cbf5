# SPDX-License-Identifier: Apache-2.0
"""Engines behind the server, in this process or others, each with a thread that exchanges calls.

    event loop of the server    generate ──> waiting ──────┬──────────> as many as its share
                                <── future <── outcomes ──┤
    a thread for each engine                              └─ exchange (`CallQueue`), again and again
                                                             while calls wait or are under way

An engine whose queue is closed gives calls back. They wait for another engine, or until the queue is open again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import count
from threading import Condition, Thread
from typing import TypeAlias

from quadriga.errors import QuadrigaError, RolloutError
from quadriga.rollout.call_queue import Outcome, QueueReply, ServedCall
from quadriga.rollout.interface import Completion, Images, SamplingParams

Exchange: TypeAlias = Callable[[Sequence[ServedCall], Collection[int]], QueueReply]
"""`CallQueue.exchange` of an engine, perhaps in another process."""
PAUSE_S = 1.0  # pause after an error of an engine, which may be restarting


class EngineLine:
    """Calls of an engine. The lock of `Engines` guards them.

    Args:
        exchange: exchanges calls with the engine.

    Attributes:
        exchange: as in the arguments.
        is_open: whether the engine's queue was open in the last exchange, so that it takes calls.
        running: unfinished calls of the engine, by number.
        cancelled: numbers of cancelled calls, which the next exchange passes to the engine.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.is_open = False
        self.running: dict[int, ServedCall] = {}
        self.cancelled: list[int] = []


class Engines:
    """All engines of the served policy. Each gets an equal share of the calls.

    Args:
        exchanges: `CallQueue.exchange` of each engine.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._numbers = count()
        # The lock that guards the attributes below and the lines. It is notified of new and cancelled
        # calls and of `close`, for which the threads wait.
        self._changed = Condition()
        self._waiting: deque[ServedCall] = deque()
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._is_closed = False
        self._lines = [EngineLine(exchange) for exchange in exchanges]
        self._threads = []
        for number, line in enumerate(self._lines):
            name = f"served engine {number}"
            thread = Thread(target=self._run, args=(line,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """Complete a prompt. Cancelling the awaiting task cancels the call.

        Args:
            prompt: token ids.
            sampling: sampling parameters.
            images: images of the prompt.

        Raises:
            QuadrigaError: the engine failed.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        call = ServedCall(next(self._numbers), prompt, sampling, images)
        with self._changed:
            self._futures[call.number] = future
            self._waiting.append(call)
            self._changed.notify_all()
        try:
            return await future
        finally:
            with self._changed:
                # `_settle_calls` has removed the future of a call that has its outcome. Other calls were
                # cancelled.
                if self._futures.pop(call.number, None) is not None:
                    if call in self._waiting:
                        self._waiting.remove(call)
                    for line in self._lines:
                        if line.running.pop(call.number, None) is not None:
                            line.cancelled.append(call.number)
                    self._changed.notify_all()

    def close(self) -> None:
        """End the threads; wait up to `PAUSE_S` for exchanges that are under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + PAUSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, line: EngineLine) -> None:
        """Main function of an engine's thread: exchange calls with it until `close` is called.

        If an exchange raises an error, all calls of the engine end with it, and the thread pauses.
        """
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or line.running or line.cancelled or self._is_closed
                )
                if self._is_closed:
                    return
                calls = self._take_share(line)
                cancelled = line.cancelled
                line.cancelled = []
            # Without the lock, because the exchange waits for the engine.
            try:
                reply = line.exchange(calls, cancelled)
            except Exception as error:  # raised in `generate`, where the calls are awaited
                if not isinstance(error, QuadrigaError):
                    error = RolloutError("engine", got=f"{type(error).__name__}: {error}")
                # As if the engine's queue were closed, so that it gets no calls until an exchange succeeds.
                reply = QueueReply(False, [(number, error) for number in list(line.running)])
                time.sleep(PAUSE_S)
            with self._changed:
                line.is_open = reply.is_open
                self._settle_calls(line, reply.outcomes)

    def _take_share(self, line: EngineLine) -> list[ServedCall]:
        """Move an engine's share of the waiting calls to `line.running`. The caller holds the lock.

        Returns:
            The calls that the engine gets now; empty if its queue is closed.
        """
        if not line.is_open:
            return []
        open_lines = [other for other in self._lines if other.is_open]
        num_calls = len(self._waiting) + sum(len(other.running) for other in open_lines)
        # Rounded up, so that the shares of all engines cover all calls.
        share = -(-num_calls // len(open_lines))
        # An engine that has its share or more gets none, because `range` of a negative number is empty.
        num_taken = min(share - len(line.running), len(self._waiting))
        calls = [self._waiting.popleft() for _ in range(num_taken)]
        for call in calls:
            line.running[call.number] = call
        return calls

    def _settle_calls(self, line: EngineLine, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Pass the outcomes of calls to their futures. The caller holds the lock.

        Args:
            line: the engine.
            outcomes: numbers of calls, with their outcomes. None: the engine gives the call back, and
                the call waits for an engine again.
        """
        # Backwards, because each call that waits again is put in front of the others.
        for number, outcome in reversed(outcomes):
            call = line.running.pop(number, None)
            if call is None:  # cancelled
                continue
            if outcome is None:
                # These calls have waited longest.
                self._waiting.appendleft(call)
                continue
            future = self._futures.pop(number)
            if not future.get_loop().is_closed():
                future.get_loop().call_soon_threadsafe(_set_outcome, future, outcome)


def _set_outcome(future: "asyncio.Future[Completion]", outcome: Completion | QuadrigaError) -> None:
    """Set the result or the error of a future, unless its caller was cancelled."""
    if future.done():
        return
    if isinstance(outcome, Completion):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
