# SPDX-License-Identifier: Apache-2.0
"""An event loop in a thread of its own."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


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
