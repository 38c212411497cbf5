# SPDX-License-Identifier: Apache-2.0
"""Work in a thread: it begins at once, and its result or its error is got by a wait."""

import threading

import pytest

from quadriga.background import in_background


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
