# SPDX-License-Identifier: Apache-2.0
"""Work in a thread of its own: once, until it succeeds, or as coroutines of an event loop there."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` in a new thread named `name`; the future has its result or its error."""
    executor = ThreadPoolExecutor(1, name)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def off_the_loop(work: Callable[[], T]) -> T:
    """Call `work` here; or in a thread of its own, if an event loop is running in this one, as in a notebook."""
    return in_background(work, "off the loop").result() if asyncio._get_running_loop() else work()


def run_coroutine(
    work: Coroutine[Any, Any, T], run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
) -> T:
    """The result of a coroutine by `run`, off a loop that is running; what interrupts the wait there cancels it."""
    if not asyncio._get_running_loop():
        return run(work)
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def apart() -> T:
        task = asyncio.ensure_future(work)
        tasks.append((asyncio.get_running_loop(), task))
        return await task

    done = in_background(lambda: run(apart()), "coroutine")
    try:
        return done.result()
    except BaseException:
        if not done.done():
            for loop, task in tasks:
                loop.call_soon_threadsafe(task.cancel)
            done.exception()
        raise


class Restarts(Generic[T]):
    """What is started again in threads of its own, by number: at once, then after pauses that double, until it lasts.

    Nothing runs by itself: `ended` begins what is due.
    """

    def __init__(self, start: Callable[[int], T], name: str) -> None:
        self._start, self._name = start, name
        self._due: dict[int, float] = {}
        self._running: dict[int, Future[T]] = {}
        self._num_in_a_row = Counter[int]()

    def request(self, number: int) -> None:
        """Start one again. Returns at once."""
        count = self._num_in_a_row[number]
        self._num_in_a_row[number] += 1
        pause = min(FIRST_PAUSE_S * 2 ** (count - 1), LONGEST_PAUSE_S) if count else 0.0
        self._due[number] = time.monotonic() + pause
        self._begin()

    def ended(self) -> dict[int, Future[T]]:
        """The starts that are over, with a result or an error; each once."""
        self._begin()
        over = {number: start for number, start in self._running.items() if start.done()}
        for number in over:
            del self._running[number]
        return over

    def lasts(self, number: int) -> None:
        """One has done its work: the next time it is started again at once."""
        self._num_in_a_row.pop(number, None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the starts that are under way, whatever comes of them."""
        for start in self._running.values():
            start.exception(timeout_s)

    def _begin(self) -> None:
        for number in [number for number, due in self._due.items() if due <= time.monotonic()]:
            del self._due[number]
            self._running[number] = in_background(
                partial(self._start, number), f"{self._name} {number}"
            )


class EventLoopThread:
    """An event loop that goes on while the caller's thread or loop is blocked. It does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; to cancel the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what runs, and end the loop; once more does nothing. Each of the two takes `timeout_s` at most."""

        async def cancel_all() -> None:
            running = asyncio.all_tasks() - {asyncio.current_task()}
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=timeout_s)

        if self._thread.is_alive():
            self.submit(cancel_all()).result(timeout_s + 1)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
            self._loop.close()
