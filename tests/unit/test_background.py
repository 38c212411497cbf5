# SPDX-License-Identifier: Apache-2.0
"""Work in a thread: it begins at once, and its result or its error is got by a wait."""

import asyncio
import signal
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from quadriga.background import in_background, run_coroutine


def test_the_caller_goes_on_while_the_work_does() -> None:
    """The call returns before the work is done; the wait returns what it came to."""
    goes_on = threading.Event()
    future = in_background(lambda: goes_on.wait(20), "test")
    assert not future.done()
    goes_on.set()
    assert future.result()


def test_an_error_is_raised_by_the_wait() -> None:
    """What the work raises is raised where the result is asked for."""
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0, "test").result()


def test_an_interrupt_before_the_coroutine_has_begun_cancels_it() -> None:
    """The wait ends with the interrupt's error, and not after the whole coroutine."""
    main_thread = threading.get_ident()
    ended = []

    async def work() -> None:
        await asyncio.sleep(2)
        ended.append("work")

    def interrupt_first(coroutine: Coroutine[Any, Any, None]) -> None:
        time.sleep(0.1)  # in which the other thread begins to wait
        signal.pthread_kill(main_thread, signal.SIGUSR1)
        time.sleep(0.2)  # in which the other thread gets the signal
        asyncio.run(coroutine)

    async def wait_in_a_loop() -> None:
        run_coroutine(work(), interrupt_first)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    earlier_handler = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(wait_in_a_loop())
    finally:
        signal.signal(signal.SIGUSR1, earlier_handler)
    assert not ended
