# SPDX-License-Identifier: Apache-2.0
"""Work in background threads: a single call, restarts with backoff, and coroutines."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a new thread.

    Args:
        work: the function.
        name: name of the thread.

    Returns:
        Future of the function's result or error.
    """
    executor = ThreadPoolExecutor(1, name)
    future = executor.submit(work)
    # The thread ends after this call. The future still gets its result.
    executor.shutdown(wait=False)
    return future


def off_the_loop(work: Callable[[], T]) -> T:
    """Call `work` in a thread without a running event loop, and return its result.

    This is the current thread, or a new one if a loop is running in it, as in a notebook.
    """
    if asyncio._get_running_loop():
        return in_background(work, "off the loop").result()
    return work()


def run_coroutine(
    work: Coroutine[Any, Any, T], run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
) -> T:
    """Run a coroutine to its end, even where an event loop is already running.

    Args:
        work: the coroutine.
        run: called in a thread that has no running loop; runs a coroutine to its end, as
            `asyncio.run` does.

    Returns:
        The result of the coroutine. An interrupt of the wait, such as KeyboardInterrupt, cancels
        the coroutine.
    """
    if not asyncio._get_running_loop():
        return run(work)

    # The other thread adds its task here, so that this one can cancel it.
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []
    is_interrupted = Event()

    async def run_as_task() -> T:
        task = asyncio.ensure_future(work)
        tasks.append((asyncio.get_running_loop(), task))
        # The interrupt may have come before there was a task to cancel.
        if is_interrupted.is_set():
            task.cancel()
        return await task

    future = in_background(lambda: run(run_as_task()), "coroutine")
    try:
        return future.result()
    except BaseException:
        # Either the coroutine has failed, or something has interrupted the wait for it.
        if not future.done():
            is_interrupted.set()
            for loop, task in tasks:
                loop.call_soon_threadsafe(task.cancel)
            # Wait until the cancelled coroutine has cleaned up.
            future.exception()
        raise


class Restarts(Generic[T]):
    """Restarts components in background threads with exponential backoff.

    Components have numbers. The first restart of a component has no pause; further ones have a
    pause that doubles each time, until `reset_pause` is called. After the pause, the restart begins with
    the next call of `ended` or `request`, not by itself.

    Args:
        start: starts the component with a number and returns it; called in a thread.
        name: name of the threads.
    """

    def __init__(self, start: Callable[[int], T], name: str) -> None:
        self._start = start
        self._name = name
        # All three are by the number of a component.
        # The earliest time at which its restart begins, of `time.monotonic`.
        self._due: dict[int, float] = {}
        # Restarts that have begun and that `ended` has not returned.
        self._running: dict[int, Future[T]] = {}
        # Requests since the last call of `reset_pause`.
        self._num_in_a_row = Counter[int]()

    def request(self, number: int) -> None:
        """Request the restart of a component, now or after its pause. Does not wait for it."""
        num_earlier = self._num_in_a_row[number]
        self._num_in_a_row[number] += 1
        pause_s = 0.0
        if num_earlier:
            pause_s = min(FIRST_PAUSE_S * 2 ** (num_earlier - 1), LONGEST_PAUSE_S)
        self._due[number] = time.monotonic() + pause_s
        self._begin_due_restarts()

    def ended(self) -> dict[int, Future[T]]:
        """Begin the restarts that are due, and return those that have ended since the last call.

        Returns:
            By number of the component, the future of its restart, with a result or an error.
        """
        self._begin_due_restarts()
        done = {number: restart for number, restart in self._running.items() if restart.done()}
        for number in done:
            del self._running[number]
        return done

    def reset_pause(self, number: int) -> None:
        """Report that a component has done its work, so that its next restart has no pause."""
        self._num_in_a_row.pop(number, None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the restarts that have begun, whether they succeed or fail.

        Args:
            timeout_s: limit of the wait for each of them in seconds; None: no limit.

        Raises:
            TimeoutError: a restart took longer than `timeout_s`.
        """
        for restart in self._running.values():
            restart.exception(timeout_s)  # waits, and returns an error instead of raising it

    def stop(self) -> dict[int, Future[T]]:
        """Cancel the restarts that have not begun. Wait for those that have, and return them.

        The caller closes the components that these restarts return.
        """
        self._due.clear()
        self.wait()
        return self.ended()

    def _begin_due_restarts(self) -> None:
        """Begin all restarts that are due."""
        now = time.monotonic()
        due_numbers = [number for number, due in self._due.items() if due <= now]
        for number in due_numbers:
            del self._due[number]
            start_component = partial(self._start, number)
            self._running[number] = in_background(start_component, f"{self._name} {number}")


class EventLoopThread:
    """Event loop in a separate thread, which also runs while the caller's thread is blocked.

    The thread does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all coroutines and end the loop; a second call does nothing.

        Args:
            timeout_s: limit for the coroutines to end, and the same again for the thread to end.
        """

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
