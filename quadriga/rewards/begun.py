# SPDX-License-Identifier: Apache-2.0
"""Work that goes on in a thread of its own until its result is asked for, or nobody wants it any more.

    caller   Begun(work) ── does something else ── result()
    thread      └── work ─────────────────────────────┘

Consumes: a function. Waits for: its end, in `result` and in `cancel`. Unblocked by: its result, its error, or what
`give_up` does to it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")
LOOK_S = 0.1


class Begun(Generic[T]):
    """Begins at once.

    Args:
        work: is done in the thread.
        give_up: makes work end soon that is under way, or has not begun; from another thread.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], T], give_up: Callable[[], None], *, name: str) -> None:
        executor = ThreadPoolExecutor(1, name)
        self._future = executor.submit(work)
        executor.shutdown(wait=False)
        self._give_up = give_up

    def result(self) -> T:
        """Waits; raises what the work raised."""
        # In short waits: an interrupt that is meant for this thread is raised between them.
        while not self._future.done():
            wait([self._future], LOOK_S)
        return self._future.result()

    def cancel(self) -> None:
        """Ends the work, and waits until it has ended. What it raises is not told: nobody wants the result."""
        self._give_up()
        wait([self._future])
