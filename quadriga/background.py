# SPDX-License-Identifier: Apache-2.0
"""Work in a thread of its own, and a wait for it that an interrupt can end."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
LOOK_S = 0.1


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Begin work in a thread.

    Args:
        work: is called there.
        name: of the thread.

    Returns:
        its result, or its error; see `result_of`.
    """
    executor = ThreadPoolExecutor(1, name)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def result_of(future: Future[T]) -> T:
    """Wait for work that goes on in a thread. Returns its result, or raises its error."""
    # In short waits: an interrupt that is meant for this thread is raised between them.
    while not future.done():
        wait([future], LOOK_S)
    return future.result()
