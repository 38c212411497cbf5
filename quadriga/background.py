# SPDX-License-Identifier: Apache-2.0
"""Work in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` in a new thread named `name`; the future has its result or its error."""
    executor = ThreadPoolExecutor(1, name)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future
